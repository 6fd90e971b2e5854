"""The benchmark of the probes at toy size: what it measures, not how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.probe import GLUE_SIZES, ProbeSpeedArgs, features, glue_speed, main
from lingua.errors import UserError
from lingua.transformer import TransformerArgs


def test_figures_and_bars_are_written(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    main(ProbeSpeedArgs(out=str(out), rows=[500, 900], dim=20, queries=200, rounds=2))
    result = json.loads(out.read_text())
    assert [found["rows"] for found in result["measurements"]] == [500, 900]
    for found in result["measurements"]:
        assert found["equal_scores"] is True
        assert len(found["scores"]) == 9
        assert found["ridge_speedup"] == found["sklearn_seconds"] / found["ridge_seconds"]
        assert found["knn_slowdown"] == max(found["knn_seconds"].values()) / found["products_seconds"]
        bars = found["ridge_speedup"] >= 4.5 and found["knn_slowdown"] <= 2.0
        assert (found["ridge_speedup_bar"], found["knn_slowdown_bar"], found["met"]) == (4.5, 2.0, bars)
    assert result["versions"]["scikit-learn"]
    assert "glue" not in result


def test_the_features_can_be_told_apart_but_not_all_of_them() -> None:
    x, y = features(2000, 768, 3, 1)
    assert x.dtype == torch.float32
    centers = torch.stack([x[torch.from_numpy(y == c)].mean(0) for c in range(3)])
    nearest = torch.cdist(x, centers).argmin(1).numpy()
    assert 0.6 < (nearest == y).mean() < 0.999


def test_glue_at_a_thousandth() -> None:
    shape = TransformerArgs(dim=16, n_layers=2, n_heads=2, vocab_size=50_265)
    found = glue_speed(0.001, shape)
    rows = sum(max(20, round(0.001 * n)) for sizes in GLUE_SIZES.values() for n in sizes[:2])
    mean = found["tokens"] / rows
    assert 25 < mean < 45
    assert found["total_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert "met" not in found  # the bar is for all of it


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"rows": []}, "rows="), ({"queries": 0}, "queries=0"), ({"classes": 1}, "classes=1"), ({"glue": 2.0}, "glue=2")],
)
def test_impossible_settings_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProbeSpeedArgs(out="x", **bad)
