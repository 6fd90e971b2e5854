"""Frozen encoders as embedding models: a warm and a cold pooler against the mean, over seeds, on WordNet.

    bash setup/quickstart.sh && python -m experiments.embeddings out=docs/results/embeddings.json

Fixed before the run: the encoders (the quickstart's CrossBERT and BERT, as experiments/quickstart_seeds.py trains
them), the data (Debian's wordnet-base: the words of a synset as the query, its definition as the passage; queries whose
hash says so are the test), the training of each pooler (experiments/embeddings.yaml) and what is compared: recall@10
among all definitions of the test, each way's difference to every other seed by seed, with 95% intervals of Student's t.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.embed.run import EmbedTrainArgs
from apps.embed.train import train
from benchmarks.common import command, environment, write_result
from experiments.objectives import check_seeds, rounded_interval
from experiments.quickstart_seeds import run_module
from lingua.args import parse
from lingua.embedder import load_embedder
from lingua.errors import UserError
from lingua.evaluation.retrieval import retrieval_scores
from lingua.evaluation.tables import read_rows
from lingua.hashing import text_hash

CONFIG = "experiments/embeddings.yaml"
PACKAGE = "wordnet-base"
TEST_PERCENT = 2  # of the queries
# By name: whose encoder, and the settings of its pooler; without any, the mean of the encoder's output, not trained.
WAYS: dict[str, tuple[str, list[str] | None]] = {
    "crossbert, warm pooler": ("crossbert", ["pooler.warm_start=true"]),
    "crossbert, cold pooler": ("crossbert", ["pooler.warm_start=false"]),
    "bert, cold pooler": ("bert", ["pooler.n_layers=1"]),  # as many blocks as the quickstart's predictor has
    "crossbert, mean": ("crossbert", None),
    "bert, mean": ("bert", None),
}


@dataclass
class EmbeddingsArgs:
    """Train poolers on frozen encoders with several seeds, and compare them."""

    out: str = "???"  # JSON file to write
    seeds: list[int] = field(default_factory=lambda: [6, 7, 8])  # of encoders and poolers
    encoders: str = "runs/quickstart_seeds"  # SEED/bert and SEED/crossbert; what is not finished is trained
    runs: str = "runs/embeddings"  # run folders; finished ones are not repeated
    data: str = "data/embeddings"  # where the pairs go; those that are there are used
    train: list[str] = field(default_factory=list)  # more key=value for every pooler, for a smaller try

    def __post_init__(self) -> None:
        check_seeds(self.seeds)


def main(args: EmbeddingsArgs) -> None:
    """Run everything and write the result."""
    data = Path(args.data)
    if not (data / "test.jsonl").is_file():
        write_pairs(data, wordnet_lines())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for seed in args.seeds:
        for app in ("bert", "crossbert"):  # a finished one says so and ends
            encoder = Path(args.encoders) / str(seed) / app
            words = [f"config=apps/{app}/configs/quickstart.yaml", f"dump_dir={encoder}", f"seed={seed}"]
            run_module(f"apps.{app}.train", *words)
        for name, (app, settings) in WAYS.items():
            run = encoder = Path(args.encoders) / str(seed) / app
            if settings is not None:
                run = Path(args.runs) / str(seed) / re.sub(r"\W+", "_", name)
                words = train_words(encoder, run, data, seed)
                train(parse(EmbedTrainArgs, [*words, *settings, *args.train]))
            found[name].append(measure(run, data / "test.jsonl"))
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    result = {"seeds": args.seeds, "test": counts(data / "test.jsonl"), "train": counts(data / "train.jsonl")}
    result |= {"found": found, "compared": compare(found), **environment("torch", "numpy", "sentencepiece")}
    write_result(args.out, result)


def train_words(encoder: Path, run: Path, data: Path, seed: int) -> list[str]:
    """The command line of one pooler's training."""
    given = {"backbone": encoder, "dump_dir": run, "data.path": data / "train.jsonl", "seed": seed}
    return [f"config={CONFIG}", *(f"{key}={value}" for key, value in given.items())]


def measure(run: Path, path: Path) -> dict[str, float]:
    """Recall, MRR and NDCG of the rows in ``path``, each query against all their passages, in per cent."""
    rows = [row for _, row in read_rows(str(path))]
    queries = sorted({row["query"] for row in rows})
    passages = sorted({row["positive"] for row in rows})
    number = {text: place for place, text in enumerate(passages)}
    relevant = [np.unique([number[row["positive"]] for row in rows if row["query"] == query]) for query in queries]
    model = load_embedder(run)
    vectors = [
        torch.from_numpy(model.encode(texts, role)) for texts, role in ((queries, "query"), (passages, "passage"))
    ]
    return {name: round(100 * score, 2) for name, score in retrieval_scores(*vectors, relevant).items()}


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Recall@10 of each way, and of each pair of ways how much the first is above the other."""
    recall = {name: [scores["recall@10"] for scores in runs] for name, runs in found.items()}
    differences = {
        f"{a} above {b}": rounded_interval([x - y for x, y in zip(recall[a], recall[b], strict=True)])
        for a, b in combinations(recall, 2)
    }
    return {"recall@10": {name: rounded_interval(values) for name, values in recall.items()}, **differences}


def counts(path: Path) -> dict[str, int]:
    """Rows, and different queries and passages."""
    rows = [row for _, row in read_rows(str(path))]
    return {"rows": len(rows), **{f"different {key}": len({row[key] for row in rows}) for key in ("query", "positive")}}


def wordnet_lines() -> list[str]:
    """The lines of WordNet's data files, out of Debian's package. Raises UserError if it cannot be fetched."""
    tools = ("apt-get", "dpkg-deb")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise UserError(f"no {missing[0]} here: unpack Debian's {PACKAGE} elsewhere, and make data/*.jsonl from it")
    with tempfile.TemporaryDirectory() as folder:
        for command in (["apt-get", "download", PACKAGE], ["dpkg-deb", "-x", "*.deb", "files"]):
            archives = [str(path) for path in Path(folder).glob("*.deb")]
            words = [word for part in command for word in (archives if part == "*.deb" else [part])]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip())[-500:]
                raise UserError(f"{' '.join(words)} failed: {said}; apt-get update may help")
        files = sorted(Path(folder).glob("files/usr/share/wordnet/data.*"))
        if not files:
            raise UserError(f"{PACKAGE} is not what was expected: no usr/share/wordnet/data.* in it")
        return [line for file in files for line in file.read_text().splitlines()]


def pairs(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """A row a synset: ``offset file type count(hex) word id word id ... | definition; "example"``."""
    for line in lines:
        if line.startswith("  ") or "|" not in line:  # the licence
            continue
        head, _, gloss = line.partition("|")
        fields = head.split()
        words = [re.sub(r"\(\w+\)$", "", word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
        definition = re.split(r';\s*"', gloss.strip())[0].strip(" ;")
        if definition:
            yield {"query": ", ".join(words).replace("_", " "), "positive": definition}


def write_pairs(folder: Path, lines: Iterable[str]) -> None:
    """``train.jsonl`` and ``test.jsonl``, without a query or a passage of the test in training."""
    rows = list(pairs(lines))
    test = [row for row in rows if text_hash(row["query"]) % 100 < TEST_PERCENT]
    known = {row["positive"] for row in test}
    rest = [row for row in rows if text_hash(row["query"]) % 100 >= TEST_PERCENT and row["positive"] not in known]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rest), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    command(EmbeddingsArgs, main, "python -m experiments.embeddings")
