"""MTEB's two averages over whatever tasks have a score, and the tables of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingua.evaluation.results import RESULTS, markdown_table, write_whole
from lingua.paper import MTEB

NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Averages:
    """Means of main scores, NaN where there is none.

    ``mean_task_type`` is the mean over the types of their means, ``mean_task`` the mean over tasks: ``MeanTaskType``
    and ``MeanTask`` of the paper's Tables 3, 7 and 8 (:mod:`lingua.paper` names the places that print otherwise).
    """

    by_type: dict[str, float]
    scored: dict[str, int]  # tasks with a score, by type
    asked: dict[str, int]  # tasks of the benchmark, by type
    mean_task_type: float
    mean_task: float

    @property
    def complete(self) -> bool:
        """Whether every task has a score: only then are these the benchmark's averages."""
        return self.scored == self.asked


def averages(task_types: Mapping[str, str], scores: Mapping[str, float]) -> Averages:
    """Both averages.

    Args:
        task_types: type of every task of the benchmark, by name.
        scores: main score of those that have one.
    """
    nan = float("nan")
    types = sorted(set(task_types.values()), key=lambda kind: (_place(kind), kind))
    members = {kind: [name for name, of in task_types.items() if of == kind] for kind in types}
    found = {kind: [scores[name] for name in names if name in scores] for kind, names in members.items()}
    by_type = {kind: sum(values) / len(values) if values else nan for kind, values in found.items()}
    means = [by_type[kind] for kind, values in found.items() if values]
    everything = [value for values in found.values() for value in values]
    return Averages(
        by_type,
        {kind: len(values) for kind, values in found.items()},
        {kind: len(names) for kind, names in members.items()},
        sum(means) / len(means) if means else nan,
        sum(everything) / len(everything) if everything else nan,
    )


def _place(kind: str) -> int:
    """In the order of the paper's tables; types beyond these follow."""
    return MTEB.index(kind) if kind in MTEB else len(MTEB)


def write_mteb_results(results: dict[str, Any], out: Path) -> str:
    """Add the averages to ``results``, write ``results.json`` and ``results.md``, and return the table.

    The benchmark's averages are None unless every task of it has a score; ``subset`` then has those of the scored
    tasks, with their number.
    """
    scores = {name: task["score"] for name, task in results["tasks"].items()}
    found = averages(results["task_types"], scores)
    numbers = {"mean_task_type": found.mean_task_type, "mean_task": found.mean_task}
    scored_types = [kind for kind in found.by_type if found.scored[kind]]
    results |= {
        "by_type": {
            kind: {"score": found.by_type[kind], "tasks": found.scored[kind], "of": found.asked[kind]}
            for kind in scored_types
        },
        "complete": found.complete,
        **(numbers if found.complete else dict.fromkeys(numbers)),
        "subset": None if found.complete or not scores else {**numbers, "tasks": len(scores)},
    }
    table = mteb_table(results, found)
    write_whole(out / "results.md", table.encode())
    write_whole(out / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    return table


def mteb_table(results: dict[str, Any], found: Averages) -> str:
    """Markdown: a table by type with both averages, one of all tasks, and what has no score and why."""
    n_scored, n_asked = sum(found.scored.values()), sum(found.asked.values())
    n_types, types = sum(n > 0 for n in found.scored.values()), len(found.asked)
    text = [f"{results['model']['name']}, {results['benchmark']}, mteb {results['versions']['mteb']}. Scores x 100.\n"]
    if not found.complete:
        text.append(f"**{n_scored} of {n_asked} tasks: the means below are not the benchmark's averages.**\n")
    of = ("MeanTaskType", "MeanTask")
    if not found.complete:
        of = (f"mean of {n_types} of {types} types", f"mean of {n_scored} of {n_asked} tasks")
    rows = [
        [kind, f"{n} of {found.asked[kind]}" if n < found.asked[kind] else str(n), _shown(found.by_type[kind], n)]
        for kind, n in found.scored.items()
    ]
    rows += [
        [of[0], "", _shown(found.mean_task_type, n_scored)],
        [of[1], "", _shown(found.mean_task, n_scored)],
    ]
    text.append(markdown_table(["type", "tasks", "score"], rows))
    rows = [
        [name, results["task_types"][name], task["metric"], _shown(task["score"], 1), f"{task['seconds']:.0f}"]
        for name, task in results["tasks"].items()
    ]
    text.append(markdown_table(["task", "type", "metric", "score", "seconds"], rows))
    reasons = {name: reason for name, reason in results["missing"].items() if reason != NOT_ASKED}
    if reasons:
        text.append("Without a score:\n")
        text.append("".join(f"- {name}: {reason}\n" for name, reason in reasons.items()))
    others = [name for name, reason in results["missing"].items() if reason == NOT_ASKED]
    if others:
        text.append(f"Not asked for: {', '.join(others)}.\n")
    return "\n".join(text)


def _shown(score: float, n: int) -> str:
    return f"{100 * score:.1f}" if n else "-"
