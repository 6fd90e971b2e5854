"""benchmarks.curves at toy size: where it measures, what it predicts, and that a plot comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import curves
from benchmarks.contestants import Contestant, Size
from benchmarks.curves import TOY, CurvesArgs, Reference, main, measure_ranks, sizes
from benchmarks.made_up import prepare_text
from lingua.errors import UserError

REFERENCE = Size(256, 6, 4, predictor_layers=2, rows=16)


def test_where_it_measures() -> None:
    lengths = dict(sizes("length", "bert", REFERENCE))
    assert [(at, size.rows) for at, size in lengths.items()] == [
        (128, 64), (256, 32), (512, 16), (1024, 8), (2048, 4), (4096, 2), (8192, 1)
    ]  # fmt: skip
    assert all(size.seq_len == at for at, size in lengths.items())
    assert [size.rows for _, size in sizes("batch", "bert", REFERENCE)] == [1, 2, 4, 8, 16, 32]
    assert [size.ratio("crossbert") for _, size in sizes("ratio", "crossbert", REFERENCE)] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert REFERENCE.ratio("bert") == 0.2
    assert REFERENCE.ratio("crossbert") == 0.5


def test_twice_the_flops_are_predicted_to_take_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of 4 tokens: the reference's costs 30 FLOPs a token, the other's 60.
    steps = iter([Contestant("bert", print, 4, all_flops=120.0), Contestant("bert", print, 8, all_flops=480.0)])
    monkeypatch.setattr(curves, "ours", lambda *given: next(steps))
    # The machine is twice as slow in the second round. Of the steps in turns, the other takes 4 times as long.
    monkeypatch.setattr(curves, "in_turns", lambda *given: [(0.4, 1.6), (0.8, 3.2), (0.4, 1.6)])
    reference = Reference(CurvesArgs("x"), "bert", TOY, torch.device("cpu"))
    points = [reference.measure(TOY)]
    reference.finish(points)
    assert points[0]["over_reference"] == 0.5  # twice the tokens in 4 times the time
    assert points[0]["tokens_per_second"] == 5.0
    assert points[0]["predicted"] == 5.0


def test_all_curves_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {1: 100.0, 4: 150.0}  # of real processes: below
    monkeypatch.setattr(curves, "measure_ranks", lambda args, family, n, size, folder: speeds[n])
    monkeypatch.setattr(curves.os, "cpu_count", lambda: 2)
    out = tmp_path / "curves.json"
    main(CurvesArgs(str(out), str(tmp_path / "curves"), repeats=1, ranks=[1, 4], toy=True))
    found = json.loads(out.read_text())["curves"]
    assert set(found) == {"length", "batch", "ratio", "ranks"}
    for family in ("bert", "crossbert"):
        assert [p["predicted"] for p in found["ranks"][family]] == [100.0, 200.0]  # no more than the CPUs
        assert all(p["tokens_per_second"] > 0 for curve in found.values() for p in curve[family])
        cost = {p["at"]: p["flops_per_token"] for p in found["length"][family]}
        # 12 times the width of each block's attention, at the length that each model's encoder sees.
        if family == "bert":
            assert cost[256] - cost[128] == pytest.approx(3 * 4 * TOY.dim * TOY.n_layers * 128, rel=0.02)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "curves.svg").is_file()


@pytest.mark.slow
def test_two_ranks_of_the_real_app(tmp_path: Path) -> None:
    prepare_text(tmp_path, "roberta")
    assert measure_ranks(CurvesArgs("x", ranks=[2]), "crossbert", 2, TOY, tmp_path) > 0
    assert (tmp_path / "crossbert_2/logs/rank_00001.log").is_file()


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match="curves="):
        CurvesArgs(out="x", curves=["width"])
    for bad in ({"ranks": [0]}, {"ranks": []}, {"repeats": 0}, {"curves": []}):
        with pytest.raises(UserError, match=rf"^{next(iter(bad))}="):
            CurvesArgs(out="x", **bad)
