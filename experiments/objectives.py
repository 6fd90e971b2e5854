"""BERT, ELECTRA, CLM then MLM, and CrossBERT with its ablations at the same FLOPs, over seeds, probed frozen.

    bash setup/quickstart.sh && python -m experiments.objectives out=docs/results/objectives.json

Fixed before the run: the runs (experiments/objectives.yaml), the probe (setup/quickstart_pos.yaml) with the ``honest``
score, and what is compared: accuracies of the last layer and of the best layer by mean over seeds, each run's
difference to ``bert`` seed by seed, with 95% intervals of Student's t. A run whose loss at 15% masked is not lower
than that of a unigram model by 0.1 nats is marked ``stayed at unigram``, whatever its probe says.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, write_result
from experiments.quickstart_seeds import PROBE, accuracies, run_module
from lingua.args import read_yaml
from lingua.checkpoint import resolve
from lingua.errors import UserError
from lingua.evaluation.scores import interval
from lingua.metrics import read_metrics
from lingua.run_folder import unigram_losses

RUNS = "experiments/objectives.yaml"
DATA = Path("data/quickstart")
MARGIN = 0.1  # nats below a unigram model's loss


@dataclass
class ObjectivesArgs:
    """Train and probe every run of experiments/objectives.yaml with several seeds."""

    out: str = "???"  # JSON file to write
    seeds: list[int] = field(default_factory=lambda: [10, 11, 12])  # of initial weights and masks
    # As the paper counts. About 8 CPU hours for the 24 runs, by the speeds of a short try on a busy CPU.
    flops: float = 7.0e13
    runs: str = "runs/objectives"  # run folders; finished ones are not repeated
    train: list[str] = field(default_factory=list)  # more key=value for every training, for a smaller try
    probe: list[str] = field(default_factory=list)  # and for every probe

    def __post_init__(self) -> None:
        check_seeds(self.seeds)


def main(args: ObjectivesArgs) -> None:
    """Run everything and write the result."""
    if not (DATA / "shards").is_dir():
        raise UserError(f"{DATA}/shards: not there; run bash setup/quickstart.sh first, from the repository")
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in args.seeds:
        for name, options in read_yaml(RUNS).items():
            folder = Path(args.runs) / str(seed) / name
            run_module(f"apps.{options['app']}.train", *train_words(options, folder, seed, args.flops), *args.train)
            run_module(f"apps.{options['app']}.eval", f"config={PROBE}", f"ckpt={folder}", *args.probe)
            found.setdefault(name, []).append(summary(folder))
        untrained = Path(args.runs) / str(seed) / "bert"
        run_module("apps.bert.eval", f"config={PROBE}", f"ckpt={untrained}", "random_init=true", *args.probe)
        found.setdefault("untrained", []).append({"accuracy": accuracies(untrained / "eval/untrained")})
    unigram = unigram_losses(read_yaml("apps/bert/configs/quickstart.yaml"))["english"]
    for run in (run for runs in found.values() for run in runs if "loss" in run):
        run["stayed at unigram"] = not run["loss"] < unigram - MARGIN
    result = {"flops": args.flops, "seeds": args.seeds, "unigram": unigram, "runs": found, "compared": compare(found)}
    write_result(args.out, {**result, **environment("torch", "numpy", "sentencepiece")})


def train_words(options: dict[str, Any], folder: Path, seed: int, flops: float) -> list[str]:
    """The command line of one run."""
    given = {key: str(value).lower() for key, value in options.items() if key != "app"}
    given |= {"dump_dir": str(folder), "seed": str(seed), "flops": str(flops)}
    return [
        f"config=apps/{options['app']}/configs/quickstart.yaml",
        *(f"{key}={value}" for key, value in given.items()),
    ]


def summary(folder: Path) -> dict[str, Any]:
    """What is kept of a finished run. ``loss`` is that of masked tokens; of an ELECTRA, its generator's."""
    records = read_metrics(folder / "metrics.jsonl")
    last = [record for record in records if "loss" in record][-1]
    validation = [record for record in records if any(key.startswith("valid/") for key in record)][-1]
    loss = validation.get("valid/english/loss@0.15", validation.get("valid/english/generator_loss@0.15"))
    return {
        "accuracy": accuracies(folder / "eval" / resolve(folder).name),
        "loss": math.nan if loss is None else loss,  # null: it was not finite
        "validation": {key: value for key, value in validation.items() if key.startswith("valid/")},
        **{key: last[key] for key in ("step", "flops", "tokens", "data_tokens")},
    }


def rounded_interval(values: list[float]) -> dict[str, float | None]:
    """:func:`lingua.evaluation.scores.interval`, to two places."""
    return {name: None if value is None else round(value, 2) for name, value in interval(values).items()}


def check_seeds(seeds: list[int]) -> None:
    """Raise UserError unless an interval can be told."""
    if len(seeds) < 2 or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds={seeds}: expected 2 or more, all different")


def compare(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """For each run: last layer, best layer by mean over seeds, and the difference of last layers to ``bert``."""
    result = {}
    for name, runs in found.items():
        layers = list(zip(*(run["accuracy"] for run in runs), strict=True))
        best = max(range(len(layers)), key=lambda layer: statistics.mean(layers[layer]))
        differences = [
            run["accuracy"][-1] - bert["accuracy"][-1] for run, bert in zip(runs, found["bert"], strict=True)
        ]
        result[name] = {
            "last": rounded_interval(list(layers[-1])),
            "best": {"layer": best, **rounded_interval(list(layers[best]))},
            "last above bert": rounded_interval(differences),
        }
    return result


if __name__ == "__main__":
    command(ObjectivesArgs, main, "python -m experiments.objectives")
