"""A miniature law on a CPU: BERT and CrossBERT over four budgets and 1.5 orders of magnitude of FLOPs.

    bash setup/quickstart.sh && python -m experiments.scaling out=docs/results/scaling.json

Runs the commands of docs/scaling.md, on the quickstart's text: the first three budgets are swept over learning rates,
and one of them over sizes at the same FLOPs; laws are fitted; the largest budget is trained once, with the learning
rate that the law gives; all are fitted again. Fixed before the run: budgets, learning rates and sizes below, the loss
(15% hidden), and the bars: losses span at least 0.5 nat, and the largest budget's loss is predicted from the others
within 5%. Where losses do not span that much, the report says that there is no law to fit.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, write_result
from experiments.quickstart_seeds import run_module
from lingua import paper
from lingua.errors import UserError
from lingua.stool import records, sweep

BATCH = {"bert": 1024, "crossbert": 2048}  # view tokens: 16 rows of 64
# The last step is validated and saved in any case.
WORDS = [
    "validation.every=1000000",
    "checkpoint.dump.every=2000",
    "checkpoint.dump.keep=1",
    "logging.tensorboard=false",
]


@dataclass
class ScalingArgs:
    """Plan, sweep, collect, fit and plot."""

    out: str = "???"  # JSON file to write
    # At half of these a CrossBERT does not get going with the first (its loss stays within 0.3 nat of a unigram's).
    budgets: list[float] = field(default_factory=lambda: [2e12, 6.4e12, 2e13])  # FLOPs, each with every learning rate
    largest: float = 6.4e13  # FLOPs, with the learning rate of the law. About an hour of one CPU in all.
    lr: float = 1.5e-3
    lr_factors: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    ratio: float = 3.0  # D/F: far under the paper's 20, as so few FLOPs would leave no model worth the name
    ratios: list[float] = field(default_factory=lambda: [0.75, 12.0])  # other sizes, at the second budget
    head_dim: int = 16
    runs: str = "runs/scaling"  # sweeps, one for each family; finished runs are not repeated
    bases: dict[str, str] = field(
        default_factory=lambda: {f: f"apps/{f}/configs/quickstart.yaml" for f in paper.FAMILIES}
    )
    loss: str = "valid/english/loss@0.15"
    train: list[str] = field(default_factory=list)  # more key=value for every training, for a smaller try

    def __post_init__(self) -> None:
        if len(self.budgets) < 3 or self.largest <= max(self.budgets):
            raise UserError(f"budgets={self.budgets}, largest={self.largest}: expected three budgets, and a larger one")


def main(args: ScalingArgs) -> None:
    """Run everything and write the result."""
    home = Path(args.runs)
    rates = [f"lr={args.lr}", f"lr_factors={args.lr_factors}"]
    first = [f"budgets={args.budgets}", f"ratio={args.ratio}", *rates]
    sizes = [f"budgets={args.budgets[1:2]}", f"ratios={args.ratios}", *rates]
    last = [f"budgets=[{args.largest}]", f"laws={home}/first/fits.json", f"ratio={args.ratio}"]
    swept = launch(args, "lr", first)
    fit(args, swept, "first")
    # Apart: the best of several sizes at one budget would bend laws through the only one of the others.
    fit(args, [*swept, *launch(args, "sizes", sizes)], "sizes")
    swept += launch(args, "largest", last)
    fit(args, swept, "all")
    figures = [f"table={home}/all.csv", f"fits={home}/all/fits.json", f"out={home}/figures"]
    run_module("apps.plots.figures", *figures, f"loss={args.loss}")
    found, of_sizes = (json.loads((home / name / "fits.json").read_text()) for name in ("all", "sizes"))
    isoflop = {family: known["isoflop"] for family, known in of_sizes["families"].items()}
    result = {"budgets": [*args.budgets, args.largest], **found, "sizes": isoflop, "bars": bars(found)}
    write_result(args.out, {**result, **environment("torch", "numpy")})


def launch(args: ScalingArgs, name: str, words: list[str]) -> list[str]:
    """A sweep of each family, one run after another on this machine; returns their folders when all have ended."""
    folders = []
    for family in paper.FAMILIES:
        base, folder = args.bases[family], f"{args.runs}/{family}_{name}"
        points = f"{folder}.yaml"
        fixed = [f"head_dim={args.head_dim}", f"batch_tokens={BATCH[family]}", "gpus=1"]
        run_module("apps.scaling.sweep", f"family={family}", f"base={base}", *fixed, *words, f"out={points}")
        job = [f"script=apps.{family}.train", f"config={base}", f"dump_dir={folder}", f"sweep.file={points}"]
        job += ["launcher=local", "ngpu=0", "cpus=1", "max_parallel=1"]
        run_module("lingua.stool", *job, "--", "flops=null", *WORDS, *args.train)
        wait(Path(folder))
        folders.append(folder)
    return folders


def wait(folder: Path) -> None:
    """Until every run of a sweep has ended, however it did; what failed is named by what follows."""
    while any(records.summary(folder / line["name"])["state"] not in records.ENDED for line in sweep.runs(folder)):
        time.sleep(2)


def fit(args: ScalingArgs, swept: list[str], name: str) -> None:
    """Collect the sweeps and fit laws to them."""
    table = f"{args.runs}/{name}.csv"
    run_module("apps.scaling.collect", f"runs=[{','.join(swept)}]", f"out={table}")
    run_module("apps.scaling.fit", f"table={table}", f"loss={args.loss}", f"out={args.runs}/{name}")


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was fixed before the run, for each family."""
    result = []
    for family in paper.FAMILIES:
        law = found["families"].get(family, {"laws": {"loss": {"none": "no run is left"}}})["laws"]["loss"]
        error = abs(law["largest"]["error"]) if "law" in law else math.inf
        spans = {
            "name": f"{family}: losses span 0.5 nat over four budgets",
            "met": "law" in law,
            "why": law.get("none"),
        }
        name = f"{family}: largest budget's loss, error of its prediction"
        result += [spans, {"name": name, "value": error, "bound": 0.05, "met": error <= 0.05}]
    return result


if __name__ == "__main__":
    command(ScalingArgs, main, "python -m experiments.scaling")
