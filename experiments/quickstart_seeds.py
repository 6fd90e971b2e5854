"""Does the quickstart's result hold over seeds? Trains and probes both models with each seed, as it does.

    bash setup/quickstart.sh && python -m experiments.quickstart_seeds out=docs/results/quickstart_seeds.json

Fixed before the run: the probe is setup/quickstart_pos.yaml with the ``honest`` score (ridge penalty chosen on
held-out training rows), and the bars, for every seed by itself, are those of ``BARS``. The configs were tuned on
seeds 0 to 5, which are therefore not among the seeds here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, write_result
from lingua.checkpoint import resolve
from lingua.errors import UserError
from lingua.metrics import read_metrics

PROBE = "setup/quickstart_pos.yaml"
# Differences of accuracies of last layers, in points, that every seed must reach.
BARS = {"crossbert above bert": 1.0, "bert above untrained": 5.0, "crossbert above untrained": 5.0}


@dataclass
class SeedsArgs:
    """Train and probe the quickstart's models with several seeds."""

    out: str = "???"  # JSON file to write
    seeds: list[int] = field(default_factory=lambda: [6, 7, 8])  # of initial weights and masks
    runs: str = "runs/quickstart_seeds"  # run folders; finished ones are not repeated


def main(args: SeedsArgs) -> None:
    """Run everything and write the result."""
    if not Path("data/quickstart/shards").is_dir():
        raise UserError("data/quickstart/shards: not there; run bash setup/quickstart.sh first, from the repository")
    seeds = {}
    for seed in args.seeds:
        run = {app: Path(args.runs) / str(seed) / app for app in ("bert", "crossbert")}
        for app, folder in run.items():
            run_module(
                f"apps.{app}.train", f"config=apps/{app}/configs/quickstart.yaml", f"dump_dir={folder}", f"seed={seed}"
            )
            run_module(f"apps.{app}.eval", f"config={PROBE}", f"ckpt={folder}")
        run_module("apps.bert.eval", f"config={PROBE}", f"ckpt={run['bert']}", "random_init=true")
        seeds[seed] = {
            "untrained": {"accuracy": accuracies(run["bert"] / "eval/untrained")},
            **{app: _summary(folder) for app, folder in run.items()},
        }
    write_result(args.out, {"seeds": seeds, "bars": _bars(seeds), **environment("torch", "numpy", "sentencepiece")})


def run_module(name: str, *words: str) -> None:
    """``python -m NAME WORDS``. Raises UserError if it fails."""
    if subprocess.run([sys.executable, "-m", name, *words]).returncode:
        raise UserError(f"python -m {name} {' '.join(words)} failed; its message is above")


def accuracies(folder: Path) -> list[float]:
    """Honest accuracy of each layer, in per cent, the embedding first."""
    layers = json.loads((folder / "results.json").read_text())["tasks"]["pos"]["layers"]
    return [round(100 * layer["ridge"]["honest"]["accuracy"], 2) for layer in layers.values()]


def _summary(run: Path) -> dict[str, Any]:
    records = read_metrics(run / "metrics.jsonl")
    last = [record for record in records if "loss" in record][-1]
    validation = next(record for record in reversed(records) if "valid/english/loss@0.5" in record)
    return {
        "accuracy": accuracies(run / "eval" / resolve(run).name),
        "validation": {key.partition("@")[2]: value for key, value in validation.items() if "@" in key},
        **{key: last[key] for key in ("step", "flops", "tokens", "data_tokens")},
    }


def _bars(seeds: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for name, bound in BARS.items():
        above, _, below = name.split()
        differences = [s[above]["accuracy"][-1] - s[below]["accuracy"][-1] for s in seeds.values()]
        value = round(min(differences), 2)
        bars.append({"name": f"{name}, last layer, worst seed", "value": value, "bound": bound, "met": value >= bound})
    return bars


if __name__ == "__main__":
    command(SeedsArgs, main, "python -m experiments.quickstart_seeds")
