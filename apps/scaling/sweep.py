"""The points of one stool sweep over budgets, sizes, learning rates and batches.

    python -m apps.scaling.sweep family=bert base=BASE.yaml budgets=[1e12,4e12] lr_factors=[0.5,1,2] out=points.yaml

writes a file for ``python -m lingua.stool ... sweep.file=points.yaml`` and prints that command.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from apps.scaling.rules import Plan, Planner, RuleArgs, write_text
from lingua.args import cli
from lingua.errors import UserError


@dataclass
class SweepArgs(RuleArgs):
    """Every combination of budgets, ratios and factors, planned."""

    budgets: list[float] = field(default_factory=list)  # FLOPs
    ratios: list[float] = field(default_factory=list)  # D/F, for sizes at the same FLOPs (IsoFLOP); empty: ratio
    lr_factors: list[float] = field(default_factory=lambda: [1.0])  # times the planned learning rate
    batch_factors: list[float] = field(default_factory=lambda: [1.0])  # times the planned batch, rounded to whole rows
    out: str = "???"  # YAML file of the points

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budgets:
            raise UserError("no budgets: give budgets=[1e18,1e19,1e20]")
        for name in ("budgets", "ratios", "lr_factors", "batch_factors"):
            values = getattr(self, name)
            if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
                raise UserError(f"{name}={values}: expected different finite numbers above 0")
        if self.out != "???" and not self.out.endswith((".yaml", ".yml")):
            raise UserError(f"out={self.out}: expected a file that ends in .yaml")
        if self.dim is not None and len(self.ratios) > 1:
            raise UserError(f"dim={self.dim} is one size at every D/F: leave out dim, or ratios={self.ratios}")
        if not self.lr_factors or not self.batch_factors:
            raise UserError("lr_factors and batch_factors: expected at least one number")


def sweep(args: SweepArgs) -> list[dict[str, Any]]:
    """Write the points and say what they cost and how to launch them."""
    points: list[dict[str, Any]] = []
    compute, again = 0.0, 0
    for ratio in args.ratios or [args.ratio]:
        args.ratio = ratio
        planner = Planner(args)
        for budget in args.budgets:
            made = planner.plan(flops=budget)
            shape = f"{made.shape.n_layers} blocks, {made.shape.dim} wide"
            print(f"{budget:.3g} FLOPs: {shape}, D/F {made.ratio:.3g}, {made.steps:,} steps, lr {made.lr:.3g}")
            for lr_factor, batch_factor in itertools.product(args.lr_factors, args.batch_factors):
                point = point_of(made, planner.row_tokens, lr_factor, batch_factor)
                if point in points:  # two ratios may come to the same shape, two factors to the same batch
                    again += 1
                    continue
                points.append(point)
                compute += made.flops
    text = OmegaConf.to_yaml(OmegaConf.create({"points": points}))
    write_text(args.out, text)
    folder = Path(args.out).with_suffix("")
    others = [f"{name}=null" for name in planner.replaced if name != "steps"]
    if again:
        print(f"{again} more came to the same as one of these")
    print(
        f"{len(points)} runs, {compute:.3g} FLOPs in all, written to {args.out}. To launch them:\n"
        f"python -m lingua.stool script=apps.{args.family}.train config={args.base or 'BASE.yaml'} "
        f"dump_dir={folder} sweep.file={args.out} launcher=local ngpu=0 cpus=1 max_parallel=1"
        + (f" -- {' '.join(others)}" if others else "")
    )
    return points


def point_of(made: Plan, row_tokens: int, lr_factor: float, batch_factor: float) -> dict[str, Any]:
    """One run, as keys of the app's config; the tokens stay those of the plan."""
    batch = row_tokens * max(1, round(made.batch_tokens * batch_factor / row_tokens))
    point = {
        "steps": max(1, round(made.tokens / batch)),
        "model.dim": made.shape.dim,
        "model.n_layers": made.shape.n_layers,
        "model.n_heads": made.shape.n_heads,
        "batch_tokens": batch,
        "optim.lr": float(f"{made.lr * lr_factor:.3g}"),
    }
    if made.shape.pred_layers is not None:
        point["model.predictor.n_layers"] = made.shape.pred_layers
    return point


if __name__ == "__main__":
    cli(SweepArgs, sweep, "python -m apps.scaling.sweep")
