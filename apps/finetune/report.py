"""A grid's table: the learning rate that the dev rows choose for each task, and the mean over its seeds.

    python -m apps.finetune.report runs=runs/x_glue

writes RUNS/results.json and RUNS/results.md. No seed is left out in silence: the first mean is over all of them, those
that diverged as they are scored, and a second one without them stands beside it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.finetune.train import CONFIG, FREE, RESULT
from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.glue import GLUE
from lingua.evaluation.results import markdown_table, writable_folder, write_whole
from lingua.evaluation.scores import interval

EIGHT = [name for name, task in GLUE.items() if task.average]


@dataclass
class ReportArgs:
    """Collect the results of fine-tunings."""

    runs: str = "???"  # folder of the runs, of apps.finetune.grid or a sweep of lingua.stool
    out: str | None = None  # folder of results.json and results.md; none: that of the runs


def report(args: ReportArgs) -> dict[str, Any]:
    """Write and print the table. Raises UserError if there is no result."""
    folder = Path(args.runs)
    results = {path.parent: _read(path) for path in sorted(folder.rglob(RESULT))}
    # What the launcher has begun may have failed before it wrote a config of its own.
    begun = {path.parent.parent if path.parent.name == "stool" else path.parent for path in folder.rglob(CONFIG)}
    unfinished = sorted(str(run) for run in begun if not (run / RESULT).is_file())
    if not results:
        raise UserError(f"{folder}: no {RESULT} in it: expected the folder of apps.finetune.grid or of a sweep")
    groups: dict[str, dict[float, dict[Path, dict[str, Any]]]] = {}
    for path, result in results.items():
        groups.setdefault(_setting(result), {}).setdefault(result["lr"], {})[path] = result
    rows = [_row(by_rate, folder) for by_rate in groups.values()]
    _name(rows)
    rows.sort(key=lambda row: (EIGHT.index(row["task"]) if row["task"] in EIGHT else len(EIGHT), row["name"]))
    found = {"rows": rows, "glue_means": _glue_means(rows), "unfinished": unfinished}
    table = results_table(found)
    out = writable_folder(args.out or folder)
    write_whole(out / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    write_whole(out / "results.md", table.encode())
    print(f"\n{table}\nwritten to {out}/", flush=True)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}): remove it, and its run is done again") from None
    if not isinstance(result, dict) or not {"task", "lr", "seed", "scores", "config"} <= result.keys():
        raise UserError(f"{path}: is not of apps.finetune: give a folder of fine-tunings alone")
    return result


def _setting(result: dict[str, Any]) -> str:
    """Everything of a run but learning rate and seed."""
    config = {
        key: value for key, value in result["config"].items() if key not in ("seed", "tasks", "keep_weights", *FREE)
    }
    config |= {"optim": {**config["optim"], "lr": None}, "own": result["config"]["tasks"].get(result["task"])}
    return json.dumps(config, sort_keys=True)


def _row(by_rate: dict[float, dict[Path, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """One task in one setting, at the learning rate whose mean dev score over seeds is highest."""
    any_result = next(iter(next(iter(by_rate.values())).values()))
    metrics = any_result["metrics"]
    metric = metrics[0]

    def dev(results: dict[Path, dict[str, Any]]) -> float:
        # A seed without a finite dev score counts as the worst that any score can be.
        return statistics.mean(result["dev"][metric] if result["dev"] else -1.0 for result in results.values())

    rate = max(sorted(by_rate), key=lambda rate: dev(by_rate[rate]))
    chosen = dict(sorted(by_rate[rate].items(), key=lambda item: (item[1]["seed"], str(item[0]))))
    healthy = [result for result in chosen.values() if not result["diverged"]]
    every = [name for name in any_result["scores"] if all(name in result["scores"] for result in chosen.values())]
    best = max(chosen, key=lambda path: chosen[path]["dev"][metric] if chosen[path]["dev"] else -1.0)
    return {
        "task": any_result["task"],
        "init": any_result["init"] and any_result["init"]["task"],
        "metric": metric,
        "shown": [f"{part}{name}" for part in ("", "mismatched_") for name in metrics if f"{part}{name}" in every],
        "chosen_on": any_result["chosen_on"],
        "lr": rate,
        "lrs": {str(rate): {"seeds": len(runs), "dev": dev(runs)} for rate, runs in sorted(by_rate.items())},
        "seeds": [result["seed"] for result in chosen.values()],
        "all_seeds": {name: interval([result["scores"][name] for result in chosen.values()]) for name in every},
        "without_diverged": {name: interval([run["scores"][name] for run in healthy]) for name in every if healthy},
        "diverged": {str(result["seed"]): result["diverged"] for result in chosen.values() if result["diverged"]},
        "baselines": any_result["baselines"],
        "best_run_on_dev": str(best.relative_to(folder)),
        "config": any_result["config"],
    }  # fmt: skip


def _name(rows: list[dict[str, Any]]) -> None:
    """A name for each row: its task, where it was initialized from, and what tells it from others of the task."""
    for row in rows:
        flat = {id(other): _flat(_own(other)) for other in rows if other["task"] == row["task"]}
        own = flat[id(row)]
        differing = sorted(
            key
            for key in own
            if not key.startswith(("init", "optim.lr", "seed"))
            and any(other.get(key) != own[key] for other in flat.values())
        )
        more = ", ".join(f"{key}={own[key]}" for key in differing)
        origin = f" (from {row['init']})" if row["init"] else ""
        row["name"] = f"{row['task']}{origin}" + (f", {more}" if more else "")


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """A row's config, of the tasks' files its own alone."""
    config = {key: value for key, value in row["config"].items() if key != "tasks"}
    task = row["config"]["tasks"].get(row["task"])
    return config if task is None else {**config, "tasks": {row["task"]: task}}


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix: config}
    return {k: v for key, part in config.items() for k, v in _flat(part, f"{prefix}.{key}" if prefix else key).items()}


def _glue_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain means of the primary scores of GLUE's eight tasks over all seeds: without any that was initialized from
    another task, and with those that were, where there are such. None of eight that are not each there once."""
    plain = {task: [row for row in rows if row["task"] == task and not row["init"]] for task in EIGHT}
    moved = {task: [row for row in rows if row["task"] == task and row["init"]] for task in EIGHT}
    choices = [plain] + ([{task: moved[task] or plain[task] for task in EIGHT}] if any(moved.values()) else [])
    means = []
    for choice in choices:
        eight = [row for found in choice.values() for row in found]
        if all(len(found) == 1 for found in choice.values()):
            mean = statistics.mean(row["all_seeds"][row["metric"]]["mean"] for row in eight)
            origins = sorted({row["init"] for row in eight if row["init"]})
            initialized = {origin: [row["task"] for row in eight if row["init"] == origin] for origin in origins}
            diverged = sum(len(row["diverged"]) for row in eight)
            means.append({"mean": mean, "initialized_from": initialized, "diverged_seeds": diverged})
    return means


def results_table(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    header = ["task", "metric", "lr", "seeds", "all seeds", "without diverged", "diverged seeds", "majority"]
    lines, notes = [], []
    for row in found["rows"]:
        for name in row["shown"]:
            without, majority = row["without_diverged"], row["baselines"]["majority"].get(name)
            lines.append(
                [
                    row["name"],
                    name,
                    f"{row['lr']:g}",
                    str(len(row["seeds"])),
                    _shown(row["all_seeds"][name]),
                    _shown(without[name]) if without else "none left",
                    ", ".join(row["diverged"]) or "-",
                    "" if majority is None else f"{100 * majority:.1f}",
                ]
            )
        notes += [f"- {row['name']}, seed {seed}: diverged, {why}" for seed, why in row["diverged"].items()]
        notes += [
            f"- {row['name']}, {name}: {row['metric']} {100 * scores[row['metric']]:.1f}"
            for name, scores in row["baselines"].items()
            if name != "majority"
        ]
    chosen_on = sorted({row["chosen_on"] for row in found["rows"]})
    text = [
        "Scores x 100 on the evaluation rows: mean over seeds ± half of its 95% interval (Student's t). Step and "
        f"learning rate are chosen on {', '.join(chosen_on)}. `all seeds` holds those that diverged, the "
        "non-finite ones at the score of `majority`, which always says the same.\n",
        markdown_table(header, lines),
    ]
    for mean in found["glue_means"]:
        moved = [f"{', '.join(tasks)} initialized from {origin}" for origin, tasks in mean["initialized_from"].items()]
        diverged = [f"{mean['diverged_seeds']} seeds diverged"] if mean["diverged_seeds"] else []
        told = "; ".join(moved + diverged)
        text.append(f"GLUE, mean of 8, all seeds: {100 * mean['mean']:.1f}" + (f" ({told})" if told else "") + "\n")
    if found["unfinished"]:
        notes.append(f"- not finished, and not in the table: {', '.join(found['unfinished'])}")
    return "\n".join(text) + ("\n" + "\n".join(notes) + "\n" if notes else "")


def _shown(score: dict[str, float | None]) -> str:
    spread = "" if score["plus_minus"] is None else f" ± {100 * score['plus_minus']:.1f}"
    return f"{100 * score['mean']:.1f}{spread}"


if __name__ == "__main__":
    cli(ReportArgs, report, "python -m apps.finetune.report")
