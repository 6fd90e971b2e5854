"""The benchmark of embedding models at toy size: what it measures, not how fast."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.embed import EmbedSpeedArgs, figures, made_up_texts, main
from lingua.errors import UserError


@pytest.mark.slow
def test_both_compute_the_same_and_the_figures_are_written(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    main(EmbedSpeedArgs(out=str(out), dim=16, n_layers=1, n_heads=2, texts=60, batch=4, steps=2, rounds=2))
    result = json.loads(out.read_text())
    assert result["encoding"]["vectors_differ_by"] < 1e-5
    for key, bar in (("encoding", 1.2), ("training", 1.0), ("training_gradcache", 1.0)):
        found = result[key]
        assert found["bar"] == bar
        assert found["ratio"] == median(found["ratios"])
        assert found["met"] == (found["ratio"] >= bar)
        assert len(found["ratios"]) == 2
    first, second = result["training"]["first_losses"]
    assert first == pytest.approx(second, abs=1e-3)
    assert result["training"]["first_losses"][0] == pytest.approx(result["training_gradcache"]["first_losses"][0])


def test_ratios_are_of_rounds_and_lengths_are_mixed() -> None:
    found = figures(([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]), 10, "pairs", 1.1)
    assert (found["pairs_per_second"], found["sentence_transformers_pairs_per_second"]) == (5, 5)
    assert (found["ratios"], found["ratio"], found["met"]) == ([2.0, 1.0, 0.5], 1.0, False)
    counts = sorted(len(text.split()) for text in made_up_texts(1000, 30, 0))
    assert 25 < counts[500] < 37
    assert counts[10] < 8
    assert counts[-10] > 150
    with pytest.raises(UserError, match="batch=1"):
        EmbedSpeedArgs(out="x", batch=1)
