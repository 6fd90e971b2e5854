"""Evaluation of a run while it trains: every checkpoint it has and will have, and the curve of scores (Figure 6)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingua.args import read_yaml, to_dict
from lingua.checkpoint import checkpoints_folder, complete_checkpoints
from lingua.errors import UserError
from lingua.evaluation.results import (
    COLORS,
    LINES,
    RESULTS,
    draw_panels,
    kinds_of,
    markdown_table,
    score_of,
    shown_scores,
    writable_folder,
    write_whole,
)

if TYPE_CHECKING:
    from lingua.evaluation.evaluate import Evaluation

POLL_SECONDS = 20.0
NOT_OF_THE_SCORES = ("ckpt", "watch", "watch_minutes", "out", "features", "keep_features", "batch_tokens", "device")


def watch(evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate each checkpoint once, oldest first, until the run's last step, or until none has come for
    ``watch_minutes``; after each, write ``curve.md`` and ``curve.png`` in the folder of the results.

    A checkpoint whose results are there already, with the same settings, is not evaluated again. One that retention
    removes before its turn is passed over and named.

    Returns:
        the last checkpoint's results.

    Raises:
        UserError: no checkpoint came in time.
    """
    world, args = evaluation.world, evaluation.args
    root, last_news = checkpoints_folder(evaluation.run), time.monotonic()
    folder = writable_folder(evaluation.out("0").parent)
    evaluated: dict[str, dict[str, Any]] = {}
    while True:
        found = world.from_first([p for p in complete_checkpoints(root) if p.name not in evaluated])
        for checkpoint in found:
            results = world.from_first(_done(evaluation, checkpoint))
            try:
                results = results or evaluation.of_checkpoint(checkpoint)
            except UserError:
                if checkpoint.is_dir():
                    raise
                print(f"{checkpoint} was removed before it could be evaluated: keep more with checkpoint.dump.keep")
                continue
            evaluated[checkpoint.name] = results
            if world.is_first:
                write_curve([evaluated[name] for name in sorted(evaluated)], folder)
            last_news = time.monotonic()
        over = time.monotonic() - last_news > 60 * args.watch_minutes
        if world.from_first(over or _is_last(evaluation.run, max(evaluated, default="0"))):
            break
        if not found:
            time.sleep(POLL_SECONDS)
    if not evaluated:
        raise UserError(f"{root}: no complete checkpoint came in {args.watch_minutes:g} minutes")
    return evaluated[max(evaluated)]


def _done(evaluation: Evaluation, checkpoint: Path) -> dict[str, Any] | None:
    """Results that are there already, if their settings and data are these."""
    path = evaluation.out(checkpoint.name) / RESULTS
    try:
        results = json.loads(path.read_text())
        told = {name: [task[split]["files"] for split in ("train", "test")] for name, task in results["tasks"].items()}
        config = results["config"]
    except (OSError, ValueError, KeyError):
        return None
    wanted = json.loads(json.dumps(to_dict(evaluation.args)))
    same = all(config.get(key) == value for key, value in wanted.items() if key not in NOT_OF_THE_SCORES)
    same_data = told == {task.name: [task.train.files, task.test.files] for task in evaluation.tasks()}
    return results if same and same_data else None


def _is_last(run: Path, step: str) -> bool:
    """Whether the run ends at ``step``, as far as its config tells (a length in FLOPs does not)."""
    if not (run / "config.yaml").is_file():  # it has not begun yet
        return False
    config = read_yaml(run / "config.yaml")
    steps = config.get("steps")
    if steps is None and config.get("tokens") and config.get("batch_tokens"):
        steps = max(1, round(config["tokens"] / config["batch_tokens"]))
    return steps is not None and int(step) >= steps


def write_curve(evaluated: list[dict[str, Any]], folder: Path) -> None:
    """``curve.md`` and ``curve.png``: scores of the last layer against tokens (or steps), and their mean over tasks
    (GLUE's over its eight)."""
    last = evaluated[-1]
    layer, tasks = last["layers"][-1], list(last["tasks"])
    unit = "step" if any(results["tokens"] is None for results in evaluated) else "tokens"
    x = [float(results["step" if unit == "step" else "tokens"]) for results in evaluated]
    mean = "mean of 8" if last["glue_average"] else "mean"
    text, panels = [f"Layer {layer}, scores x 100, primary metrics.\n"], {name: [] for name in (mean, *tasks)}
    for place, kind in enumerate(kinds_of(last)):
        for score in shown_scores(last):
            if (kind, score) == ("attentive", "full"):
                continue
            by_task = {name: [score_of(r, name, layer, kind, score) for r in evaluated] for name in tasks}
            by_task[mean] = [sum(values) / len(tasks) for values in zip(*by_task.values(), strict=True)]
            if last["glue_average"]:  # which leaves mismatched MNLI out
                by_task[mean] = [100 * r["glue_average"][str(layer)][kind][score] for r in evaluated]
            for name, values in by_task.items():
                style = {"color": COLORS[place], "linestyle": LINES[score], "marker": "o"}
                panels[name].append((f"{kind}, {score}", x, values, style))
            rows = [
                [f"{results['step']:,}", f"{at:.3g}", *(f"{by_task[name][i]:.1f}" for name in panels)]
                for i, (results, at) in enumerate(zip(evaluated, x, strict=True))
            ]
            text += [f"{kind}, `{score}`\n", markdown_table(["at step", unit, *panels], rows)]
    write_whole(folder / "curve.png", draw_panels(panels, f"{unit} of training", "linear"))
    write_whole(folder / "curve.md", "\n".join(text).encode())
