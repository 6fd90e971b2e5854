"""The miniature law's budgets, and its bars."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from apps.scaling.sweep import SweepArgs, sweep
from experiments.scaling import BATCH, ScalingArgs, bars
from lingua import paper
from lingua.errors import UserError
from tests.support import ROOT

BASE = "dump_dir: x\ndata: {root_dir: x, seq_len: 64, tokenizer: {name: bytes}}\nmodel: {vocab_size: 2048}\n"


def test_budgets_are_four_over_one_and_a_half_orders_of_magnitude() -> None:
    args = ScalingArgs(out="x")
    assert len(args.budgets) == 3
    assert math.log10(args.largest / args.budgets[0]) >= 1.5
    assert args.bases == {family: f"apps/{family}/configs/quickstart.yaml" for family in paper.FAMILIES}
    assert all((ROOT / base).exists() for base in args.bases.values())
    with pytest.raises(UserError, match="three budgets, and a larger one"):
        ScalingArgs(out="x", largest=1e12)


@pytest.mark.parametrize("family", paper.FAMILIES)
def test_its_plans_exist_and_grow(family: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    args = ScalingArgs(out="x")
    common = {"family": family, "base": str(tmp_path / "base.yaml"), "head_dim": args.head_dim, "lr": args.lr}
    common |= {"batch_tokens": BATCH[family], "gpus": 1, "out": str(tmp_path / "points.yaml")}
    points = sweep(SweepArgs(**common, budgets=[*args.budgets, args.largest], ratio=args.ratio))
    assert len({(p["model.dim"], p["model.n_layers"]) for p in points}) >= 3
    assert [p["model.dim"] for p in points] == sorted(p["model.dim"] for p in points)
    sizes = sweep(SweepArgs(**common, budgets=args.budgets[1:2], ratios=[args.ratios[0], args.ratio, args.ratios[1]]))
    assert len({(p["model.dim"], p["model.n_layers"]) for p in sizes}) == 3  # as many as a parabola needs


def test_bars_by_hand() -> None:
    law = {"law": {"constant": 1.0, "exponent": 1.0}, "largest": {"error": -0.06}}
    found = {"families": {"bert": {"laws": {"loss": law}}, "crossbert": {"laws": {"loss": {"none": "0.2 nat"}}}}}
    assert [(bar["name"].split(":")[0], bar["met"]) for bar in bars(found)] == [
        ("bert", True), ("bert", False), ("crossbert", False), ("crossbert", False),
    ]  # fmt: skip
    law["largest"]["error"] = 0.04
    assert [bar["met"] for bar in bars({"families": {"bert": {"laws": {"loss": law}}}})] == [True, True, False, False]
