"""Frozen evaluation of a run: features of the layers asked for, probes on every task, results in files.

The apps' ``eval.py`` are entries to this, each with its own model class.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lingua.args import build, to_dict
from lingua.checkpoint import read_state, resolve
from lingua.errors import UserError
from lingua.features import TextEncoder, load_encoder
from lingua.probe import ProbeArgs, majority, probe
from lingua.tasks import Split, Task, TaskArgs, load_task

RESULTS = "results.json"
UNTRAINED = "untrained"


@dataclass
class EvalArgs:
    """Probe a frozen encoder layer by layer; writes results.json and results.md and prints the table."""

    ckpt: str = "???"  # run folder (its newest complete checkpoint) or checkpoint folder
    tasks: dict[str, TaskArgs] = field(default_factory=dict)  # what to probe for, under names of your own
    layers: Any = "all"  # all, a number or a list; 0 is the embedding, negative numbers count from the last
    random_init: bool = False  # the run's weights before its first step instead: the untrained baseline
    out: str | None = None  # folder of the results; none: RUN/eval/STEP, or RUN/eval/untrained
    pooling: str = "mean"  # of a text's tokens, special ones included: mean | first | max
    final_norm: bool = True  # apply the encoder's final norm to every layer but the embedding
    max_length: int | None = None  # most tokens of a sequence; none: the row length of the training data
    batch_tokens: int = 16_384  # most tokens in a forward pass, padding included
    device: str | None = None  # none: the GPU if there is one
    probe: ProbeArgs = field(default_factory=ProbeArgs)

    def __post_init__(self) -> None:
        layers = self.layers if isinstance(self.layers, list) else [self.layers]
        integers = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
        if self.layers != "all" and not (layers and integers):
            raise UserError(f"layers={self.layers}: expected all, a number or a list such as [0,4,-1]")
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens={self.batch_tokens}: expected at least 1")
        if not self.tasks:
            raise UserError("no tasks: give at least tasks.NAME.train=FILE and tasks.NAME.test=FILE")


def evaluate(args: EvalArgs, model_class: type[nn.Module], model_args: type) -> dict[str, Any]:
    """Probe one checkpoint on every task, write and print the results, and return them.

    Args:
        model_class, model_args: the app's model and its config dataclass, for its parameter counts.

    Raises:
        UserError: a run of another app, and whatever the checkpoint, tasks, features and probes refuse.
    """
    folder = resolve(args.ckpt)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    out = writable_folder(args.out or run / "eval" / (UNTRAINED if args.random_init else folder.name))
    tasks = [load_task(name, task_args) for name, task_args in args.tasks.items()]  # bad data before long work
    encoder = load_encoder(folder, args.random_init, args.max_length, args.device)
    results = {
        "checkpoint": str(folder),
        "step": read_state(folder)["step"],
        "random_init": args.random_init,
        "training_seed": encoder.config["seed"],
        "model": model_class.__name__,
        "parameters": _parameter_counts(folder, encoder.config["model"], model_class, model_args),
        "layers": _layers(args.layers, encoder.n_layers),
        "max_length": encoder.max_length,
        "config": to_dict(args),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "tasks": {},
    }
    for task in tasks:
        results["tasks"][task.name] = _probe_task(task, encoder, results["layers"], args)
    table = results_table(results)
    write_whole(out / "results.md", table.encode())
    write_whole(out / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    print(f"\n{table}\nwritten to {out}/")
    return results


def _parameter_counts(
    folder: Path, config: dict[str, Any], model_class: type[nn.Module], model_args: type
) -> dict[str, int]:
    known = {f.name for f in dataclasses.fields(model_args)}
    if set(config) != known:
        raise UserError(
            f"{folder} is not a run of {model_class.__name__}: its model has {', '.join(sorted(set(config) ^ known))} "
            "against this app's config; use the eval of the app that trained it"
        )
    with torch.device("meta"):
        return model_class(build(model_args, (f"{folder}/config.yaml", config))).parameter_counts()


def _layers(asked: Any, n_layers: int) -> list[int]:
    if asked == "all":
        return list(range(n_layers + 1))
    layers = asked if isinstance(asked, list) else [asked]
    for layer in layers:
        if not -n_layers - 1 <= layer <= n_layers:
            raise UserError(f"layers={asked}: the encoder has layers 0 (embedding) to {n_layers}")
    return sorted({layer % (n_layers + 1) for layer in layers})


def _probe_task(task: Task, encoder: TextEncoder, layers: list[int], args: EvalArgs) -> dict[str, Any]:
    """Features of both splits and the probes of every layer."""
    began, encoder.truncated = time.perf_counter(), 0
    (train_x, train_y, groups_N), (test_x, test_y, _) = (
        _features(split, encoder, layers, args) for split in (task.train, task.test)
    )
    encoded = time.perf_counter()
    metric = task.args.metric
    by_layer = {
        str(layer): probe(train_x[i], train_y, test_x[i], test_y, args.probe, metric, groups_N, encoder.device)
        for i, layer in enumerate(layers)
    }
    print(
        f"{task.name}: {len(train_y):,} rows to train, {len(test_y):,} to test; {encoder.truncated} sequences cut at "
        f"{encoder.max_length} tokens; features {encoded - began:.1f} s, probes {time.perf_counter() - encoded:.1f} s"
    )
    return {
        "kind": task.args.kind,
        "metric": metric,
        "classes": len(task.classes),
        "classes_only_in_test": sorted(set(task.test.labels) - set(task.train.labels)) if task.classes else [],
        "train": _describe(task.train, len(train_y)),
        "test": _describe(task.test, len(test_y)),
        "truncated_sequences": encoder.truncated,
        "majority": majority(train_y, test_y),
        "layers": by_layer,
    }


def _features(
    split: Split, encoder: TextEncoder, layers: list[int], args: EvalArgs
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features [L, N, D], targets [N], groups [N]) of the rows that have features."""
    if split.sentences:
        x, kept = encoder.encode_words(split.sentences, layers, args.batch_tokens, args.final_norm)
        return x, split.y[kept], split.groups[kept]
    x = encoder.encode(split.texts, layers, split.pairs, args.pooling, args.batch_tokens, args.final_norm)
    return x, split.y, split.groups


def _describe(split: Split, rows: int) -> dict[str, Any]:
    return {
        "path": split.path,
        "sha256": split.sha256,
        "rows_in_file": split.rows_in_file,
        "rows": rows,
        "rows_beyond_max_length": len(split.labels) - rows,
    }


def results_table(results: dict[str, Any]) -> str:
    """The scores of :func:`evaluate` as Markdown: a line a layer, the two scores of each probe and task."""
    columns = [
        (name, kind, score)
        for name in results["tasks"]
        for kind in results["config"]["probe"]["kinds"]
        for score in ("paper", "honest")
    ]

    def cell(layer: int, name: str, kind: str, score: str) -> str:
        task = results["tasks"][name]
        return f"{100 * task['layers'][str(layer)][kind][score][task['metric']]:.1f}"

    header = ["layer"] + [f"{name} {kind} {results['tasks'][name]['metric']}, {score}" for name, kind, score in columns]
    rows = [[str(layer)] + [cell(layer, *column) for column in columns] for layer in results["layers"]]
    majorities = [
        f"{100 * results['tasks'][name]['majority'][results['tasks'][name]['metric']]:.1f}" for name, *_ in columns
    ]
    state = "untrained weights" if results["random_init"] else f"step {results['step']:,}"
    return (
        f"{results['model']}, {state}, {results['checkpoint']}. Scores x 100. `paper`: the best of the grid on the "
        "evaluation rows, as the paper reports; `honest`: the setting chosen on held-out training rows.\n\n"
        + markdown_table(header, [*rows, ["majority", *majorities]])
    )


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right, padded for reading as text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *others])} |\n"

    rule = [":" + "-" * (widths[0] - 1)] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return line(header) + line(rule) + "".join(map(line, rows))


def writable_folder(path: str | Path) -> Path:
    """The folder, made if it is not there. Raises UserError if it cannot be written."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; give another out=FOLDER") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or what was there before. Raises UserError."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
