"""A small encoder fine-tuned, against its own frozen probe and against what knows no context, over seeds.

    bash setup/quickstart.sh && python -m experiments.finetuning out=docs/results/finetuning.json

Fixed before the run: the encoders (the quickstart's CrossBERT and BERT), the tasks (fresh or rotten of film reviews;
the part of speech of Brown's words), their rows, the grid (experiments/finetuning.yaml), accuracy on the evaluation
rows at the learning rate that held-out training rows choose, and what it is compared with: the ``honest`` ridge probe
of the last and of the best layer, the majority class, and for words the commonest tag of each. The bar, for every seed
by itself: above the last layer's probe. About 30 CPU minutes after the quickstart, by the speed of a short try.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.finetune.report import ReportArgs, report
from benchmarks.common import command, environment, write_result
from experiments.quickstart_seeds import run_module
from lingua.checkpoint import resolve
from lingua.errors import UserError

LABELLED = "data/quickstart/raw/labelled"
TASKS = {
    "reviews": {"train": "rotten_tomatoes_train", "test": "rotten_tomatoes_test", "kind": "classification"},
    "pos": {"train": "brown_pos_train", "test": "brown_pos_test", "kind": "tokens", "max_train_rows": 80_000,
            "max_test_rows": 20_000},
}  # fmt: skip


@dataclass
class FinetuningArgs:
    """Fine-tune and probe the quickstart's encoders on two tasks."""

    out: str = "???"  # JSON file to write
    runs: str = "runs/finetuning"  # folders of the fine-tunings; finished ones are not repeated
    encoders: str = "runs/quickstart"  # folder of the pretraining runs
    apps: list[str] = field(default_factory=lambda: ["crossbert", "bert"])  # of them, those to fine-tune
    finetune: list[str] = field(default_factory=list)  # more key=value for every fine-tuning, for a smaller try
    rows: int = -1  # most training and evaluation rows of each task, for a smaller try; -1: as fixed


def main(args: FinetuningArgs) -> None:
    """Run everything and write the result."""
    if not Path(LABELLED).is_dir():
        raise UserError(f"{LABELLED}: not there; run bash setup/quickstart.sh first, from the repository")
    found = {}
    for app in args.apps:
        encoder, runs = Path(args.encoders) / app, Path(args.runs) / app
        words = [f"ckpt={encoder}", *task_words(args.rows)]
        run_module(
            "apps.finetune.grid", "sweep=experiments/finetuning.yaml", f"dump_dir={runs}", *words, "epochs=3",
            "batch_rows=32", *args.finetune,
        )  # fmt: skip
        probes = runs / "probe"
        run_module(
            f"apps.{app}.eval",
            *words,
            f"out={probes}",
            "probe.kinds=[ridge]",
            "probe.full=false",
            "keep_features=false",
        )
        rows = {row["task"]: row for row in report(ReportArgs(str(runs)))["rows"]}
        probed = json.loads((probes / "results.json").read_text())["tasks"]
        found[app] = {"step": int(resolve(encoder).name)} | {
            task: compared(rows[task], probed[task], runs) for task in TASKS
        }
    write_result(args.out, {"encoders": found, **environment("torch", "numpy", "sentencepiece")})


def task_words(most: int) -> list[str]:
    """The tasks as words of a command line, with at most so many rows."""
    words = []
    for name, fields in TASKS.items():
        fields = fields | {key: f"{LABELLED}/{fields[key]}.jsonl" for key in ("train", "test")}
        if most != -1:
            fields |= {"max_train_rows": most, "max_test_rows": most}
        words += [f"tasks.{name}.{key}={value}" for key, value in fields.items()]
    return words


def compared(row: dict[str, Any], probed: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Accuracies in per cent of one task: fine-tuned by seed, probed, and without context."""
    results = [json.loads(path.read_text()) for path in runs.glob("*/result.json")]
    chosen = [r for r in results if r["task"] == row["task"] and r["lr"] == row["lr"]]
    by_seed = {r["seed"]: percent(r["scores"]["accuracy"]) for r in sorted(chosen, key=lambda r: r["seed"])}
    layers = [percent(layer["ridge"]["honest"]["accuracy"]) for layer in probed["layers"].values()]
    return {
        "lr": row["lr"],
        "fine-tuned": by_seed,
        "mean": {name: value and percent(value) for name, value in row["all_seeds"]["accuracy"].items()},
        "diverged": row["diverged"],
        "probe, last layer": layers[-1],
        "probe, best layer on the evaluation rows": max(layers),
        "without context": {name: percent(scores["accuracy"]) for name, scores in row["baselines"].items()},
        "every seed above the last layer's probe": min(by_seed.values()) > layers[-1],
    }


def percent(share: float) -> float:
    """A share in per cent, to two places."""
    return round(100 * share, 2)


if __name__ == "__main__":
    command(FinetuningArgs, main, "python -m experiments.finetuning")
