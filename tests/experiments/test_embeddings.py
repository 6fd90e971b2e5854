"""The smallest version of the experiment, from lines of WordNet to its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import embeddings
from experiments.embeddings import EmbeddingsArgs, compare, measure, pairs, write_pairs
from lingua.embedder import load_embedder
from lingua.errors import UserError
from tests.pairs import backbone, cosine
from tests.pairs import pairs as made_up
from tests.support import ROOT

LINES = [
    "  1 This software and database is being provided to you, the LICENSEE  ",
    '00217593 04 n 01 kill 1 002 @ 00217014 n 0000 + 00355365 v 0101 | the destruction of an enemy; "two kills"  ',
    "00217773 04 n 05 laying_waste 0 ruin 0 ruining 0 ruination 0 wrecking 0 001 @ 00217014 n 0000 | destruction  ",
    "00001740 00 a 01 able(p) 0 001 = 05200169 n 0000 | having the necessary means; able to; \"able to swim\"  ",
]  # fmt: skip


def test_a_synset_is_its_words_and_its_definition_without_examples() -> None:
    assert list(pairs(LINES)) == [
        {"query": "kill", "positive": "the destruction of an enemy"},
        {"query": "laying waste, ruin, ruining, ruination, wrecking", "positive": "destruction"},
        {"query": "able", "positive": "having the necessary means; able to"},
    ]


def test_nothing_of_the_test_is_in_training(tmp_path: Path) -> None:
    lines = [f"{i:08d} 00 n 01 word_{i % 700} 0 000 | meaning {i % 900}  " for i in range(3000)]
    write_pairs(tmp_path, lines)
    train, test = ([json.loads(line) for line in (tmp_path / f"{n}.jsonl").open()] for n in ("train", "test"))
    assert 20 < len(test) < 200
    for key in ("query", "positive"):
        assert not {row[key] for row in train} & {row[key] for row in test}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Two seeds of every way, at the smallest size."""
    folder = tmp_path_factory.mktemp("embeddings")
    (folder / "data").mkdir()
    for name, rows in (("train", made_up(60)[:40]), ("test", made_up(60)[40:])):
        text = "".join(json.dumps({key: row[key] for key in ("query", "positive")}) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(text)
    for seed in (0, 1):
        backbone(folder / "encoders" / str(seed) / "crossbert", init_std=0.1 * (seed + 1))
        backbone(folder / "encoders" / str(seed) / "bert", predictor=None)
    small = ["epochs=null", "steps=3", "batch_queries=8", "data.max_length={query: 64, passage: 80}", "dtype=fp32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        asked: list[tuple[str, ...]] = []
        patch.setattr(embeddings, "run_module", lambda *words: asked.append(words))
        args = EmbeddingsArgs(
            out=str(folder / "out.json"),
            seeds=[0, 1],
            encoders=str(folder / "encoders"),
            runs=str(folder / "runs"),
            data=str(folder / "data"),
            train=[*small, "logging.tensorboard=false"],
        )
        embeddings.main(args)
    # However far they are: the training itself knows whether it is finished.
    assert [(words[0], *words[2:]) for words in asked] == [
        (f"apps.{app}.train", f"dump_dir={folder}/encoders/{seed}/{app}", f"seed={seed}")
        for seed in (0, 1)
        for app in ("bert", "crossbert")
    ]
    return json.loads((folder / "out.json").read_text()), folder


def test_every_way_is_measured_and_compared(result: tuple[dict, Path]) -> None:
    found, _ = result
    assert found["test"] == {"rows": 20, "different query": 20, "different positive": 20}
    assert set(found["found"]) == set(embeddings.WAYS)
    for runs in found["found"].values():
        assert len(runs) == 2
        assert all(0 <= run["recall@10"] <= 100 for run in runs)
    assert len(found["compared"]) == 1 + 10
    recall = [run["recall@10"] for run in found["found"]["crossbert, mean"]]
    assert found["compared"]["recall@10"]["crossbert, mean"]["mean"] == pytest.approx(np.mean(recall), abs=0.01)


def test_the_recall_is_that_of_a_plain_loop(result: tuple[dict, Path]) -> None:
    found, folder = result
    run = folder / "runs/1/crossbert_warm_pooler"
    rows = [json.loads(line) for line in (folder / "data/test.jsonl").open()]
    model = load_embedder(run, device="cpu")
    score_NM = cosine(*(model.encode([row[key] for row in rows]) for key in ("query", "positive")))
    hits = [int((score > score[place]).sum()) < 10 for place, score in enumerate(score_NM)]
    assert found["found"]["crossbert, warm pooler"][1]["recall@10"] == pytest.approx(100 * np.mean(hits), abs=0.01)
    assert measure(run, folder / "data/test.jsonl") == found["found"]["crossbert, warm pooler"][1]


def test_differences_are_taken_seed_by_seed() -> None:
    found = {"a": [{"recall@10": 3.0}, {"recall@10": 9.0}], "b": [{"recall@10": 1.0}, {"recall@10": 7.0}]}
    assert compare(found)["a above b"] == {"mean": 2.0, "plus_minus": 0.0}
    with pytest.raises(UserError, match="expected 2 or more, all different"):
        EmbeddingsArgs(out="x", seeds=[1, 1])
