"""Figures 1, 3, 4, 5, 6 and 7 from our runs, the paper's values beside them where it prints any.

    python -m apps.plots.figures table=runs/sweep.csv fits=runs/laws/fits.json runs='{BERT: runs/bert}' out=runs/figures

Writes ``figureN.png`` and ``.svg``, and ``figures.md``. Figures 5 (validation losses) and 6 (scores along training)
show what those of the paper do; what the others show is our reading of its tables: 1 scores against compute, 3 scores
by layer, 4 scores against labelled rows, 7 batch and learning rate against compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.plots.style import FAMILY_COLORS, FAMILY_NAMES, empty, legend, panels, save
from lingua import paper
from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.results import COLORS, RESULTS, score_of, writable_folder, write_whole
from lingua.run_folder import read_results
from lingua.run_table import number as number_of
from lingua.run_table import read_table, why_not
from lingua.scaling import BATCH_LAWS, LR_LAWS, PowerLaw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    1: "Scores of frozen encoders against training compute",
    3: "Scores by layer, frozen",
    4: "Scores against labelled rows, last layer, frozen",
    5: "Validation loss against training compute",
    6: "Scores along training, last layer, frozen",
    7: "Batch and learning rate against training compute",
}
NO_TABLE = "no runs: give table=\n(python -m apps.scaling.collect)"
NO_RUNS = "no runs: give runs={NAME: FOLDER}"
Row = dict[str, Any]


@dataclass
class FiguresArgs:
    """Draw figures. What has no data is drawn empty and says so."""

    out: str = "???"  # folder
    figures: list[int] = field(default_factory=lambda: list(TITLES))
    table: str | None = None  # runs of many budgets, by apps.scaling.collect: figures 1, 5, 7
    fits: str | None = None  # fits.json of apps.scaling.fit: its laws as lines
    runs: dict[str, str] = field(default_factory=dict)  # run folders with evaluations, by label: figures 3, 4, 6
    score: str = "honest"  # of probes: honest or paper
    probe: str = "ridge"
    # Column of the table for figure 1, such as score/pos/ridge/honest; none: that of fits, or the first score.
    column: str | None = None
    loss: str | None = None  # columns of the table for figure 5 end with what follows its @; none: that of fits, or 0.5

    def __post_init__(self) -> None:
        unknown = sorted(set(self.figures) - set(TITLES))
        if unknown:
            raise UserError(f"figures={unknown}: expected some of {', '.join(map(str, TITLES))}")
        if self.score not in ("paper", "honest"):
            raise UserError(f"score={self.score}: expected paper or honest")


class Data:
    """What the figures are drawn from."""

    def __init__(self, args: FiguresArgs) -> None:
        self.args = args
        rows = read_table(args.table) if args.table is not None else []
        reasons = [why_not(row, "budget", "lr", "batch_tokens") for row in rows]
        self.rows = [row for row, why in zip(rows, reasons, strict=True) if why is None]
        self.left_out = [f"{row['run']}: {why}" for row, why in zip(rows, reasons, strict=True) if why is not None]
        for name in filter(None, (args.column, args.loss)):
            if rows and name not in rows[0]:
                raise UserError(f"{args.table}: no column {name}; it has {', '.join(rows[0])}")
        self.fits: dict[str, Any] = {}
        self.fitted: dict[str, str | None] = {"loss": None, "score": None}  # columns that the laws are of
        if args.fits is not None:
            try:
                found = json.loads(Path(args.fits).read_text())
                self.fits, self.fitted = found["families"], {name: found.get(name) for name in self.fitted}
            except (OSError, ValueError, KeyError, TypeError):
                raise UserError(f"fits={args.fits}: not there, or not written by python -m apps.scaling.fit") from None
        self.results = {name: evaluations(Path(folder)) for name, folder in args.runs.items()}
        self.left_out += [f"{name}: no evaluation in {args.runs[name]}" for name, r in self.results.items() if not r]
        tasks = [task for results in self.newest().values() for task in results["tasks"].values()]
        probes = {probe: None for task in tasks for layer in task["layers"].values() for probe in layer}
        if probes and args.probe not in probes:
            raise UserError(f"probe={args.probe}: none of the runs has it; they have {', '.join(probes)}")

    def newest(self) -> dict[str, dict[str, Any]]:
        """The newest evaluation of each run."""
        return {name: found[-1] for name, found in self.results.items() if found}

    def tasks(self) -> list[str]:
        """Tasks of any run's newest evaluation, in their order."""
        return list(dict.fromkeys(task for results in self.newest().values() for task in results["tasks"]))

    def law(self, family: str, name: str) -> PowerLaw | None:
        """A fitted law, if there is one."""
        found = self.fits.get(family, {}).get("laws", {}).get(name, {}).get("law")
        return None if found is None else PowerLaw(**found)

    def best(self, family: str, column: str, sign: int = 1) -> list[tuple[float, float]]:
        """(budget, lowest value of a column among runs of this budget); highest with ``sign=-1``."""
        budgets: dict[str, tuple[float, float]] = {}
        for row in self.rows:
            value = number_of(row, column)
            if row["family"] != family or value is None:
                continue
            key = f"{math.log(row['budget']):.1f}"
            if key not in budgets or sign * value < sign * budgets[key][1]:
                budgets[key] = (row["budget"], value)
        return sorted(budgets.values())


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """A run's evaluations by step, without those of untrained weights. Raises UserError if the folder is missing."""
    if not folder.is_dir():
        raise UserError(f"runs: {folder} is not there")
    found = [read_results(path) for path in sorted((folder / "eval").glob(f"*/{RESULTS}"))]
    return sorted((r for r in found if not r["random_init"] and r["step"] is not None), key=lambda r: r["step"])


def figures(args: FiguresArgs) -> None:
    """Draw and write them all."""
    out, data = writable_folder(args.out), Data(args)
    draw: dict[int, Callable[[Data, Path], str]] = {
        1: scores_by_compute, 3: scores_by_layer, 4: scores_by_rows, 5: losses, 6: scores_by_step, 7: hyper_parameters,
    }  # fmt: skip
    text = ["# Figures\n"]
    for number in args.figures:
        note = draw[number](data, out / f"figure{number}")
        text.append(f"## Figure {number}: {TITLES[number]}\n\n![{TITLES[number]}](figure{number}.png)\n\n{note}\n")
    if data.left_out:
        text.append("Not in the figures:\n\n" + "".join(f"- {line}\n" for line in data.left_out))
    write_whole(out / "figures.md", "\n".join(text).encode())
    print(f"written to {out}: figures.md, and {', '.join(f'figure{n}' for n in args.figures)} as PNG and SVG")
    for line in data.left_out:
        print(f"not in the figures: {line}")


def scores_by_compute(data: Data, stem: Path) -> str:
    """Figure 1."""
    scores = sorted({name for row in data.rows for name in row if name.startswith("score/")})
    column = data.args.column or data.fitted["score"]
    column = column or next((name for name in scores if name.endswith(data.args.score)), None)
    figure, (ours, theirs) = panels(2)
    _families(ours, data, column, -1)
    if column is not None:
        for family, color in FAMILY_COLORS.items():
            law = data.law(family, "100 - score") if column == data.fitted["score"] else None
            points = data.best(family, column, -1)
            if law is not None and points:
                x = _between(points)
                ours.plot(x, [100 - law(c) for c in x], color=color, linestyle="--", linewidth=1)
    ours.set(title="ours", ylabel=column or "score x 100")
    for family, color in FAMILY_COLORS.items():
        points = papers_scores(family)
        theirs.plot(*zip(*points, strict=True), "o-", color=color, label=FAMILY_NAMES[family])
    theirs.set(
        title="paper, Tables 3 and 9", xlabel="training FLOPs", ylabel="GLUE, linear probe, mean of 8", xscale="log"
    )
    for axis in (ours, theirs):
        legend(axis)
    save(figure, stem)
    return "The best run of each budget; dashed, the law of what is missing to 100. The paper's are two models each."


def papers_scores(family: str) -> list[tuple[float, float]]:
    """(FLOPs, GLUE average of the linear probe) of the paper's single-scale model and of its 1B model."""
    single = {"bert": "BERT-239M", "crossbert": "CrossBERT-279M"}[family]
    large = {"bert": "BERT-1B*", "crossbert": "CrossBERT-1B"}[family]  # BERT-1.21B's mean in Table 1 is that of 1B*
    found = {(r.table, r.model): r.value for r in paper.results() if r.setting == "linear_probe" and r.column == "Avg"}
    return [(SINGLE_SCALE_FLOPS[family], found[3, single]), (paper.suite(family)[7]["flops"], found[9, large])]


# 130,000 steps of 393,216 tokens of the models of section 4.1, by their own FLOPs per token (the paper's count).
_BLOCK = 4 * 768**2 + 3 * 768 * 2048
_A_BLOCK = 6 * _BLOCK + 12 * 768 * 512
SINGLE_SCALE_FLOPS = {"bert": 28 * _A_BLOCK * 130_000 * 393_216, "crossbert": 34 / 2 * _A_BLOCK * 130_000 * 393_216}


def scores_by_layer(data: Data, stem: Path) -> str:
    """Figure 3."""
    tasks = data.tasks()
    figure, axes = panels(max(1, len(tasks)) + 1)
    for task, axis in zip(tasks, axes, strict=False):
        for place, (name, results) in enumerate(data.newest().items()):
            points = [(layer, _score(data, results, task, layer)) for layer in results["layers"]]
            known = [(layer, value) for layer, value in points if value is not None]
            if known:
                axis.plot(*zip(*known, strict=True), "o-", color=COLORS[place % len(COLORS)], markersize=3, label=name)
        axis.set(title=task, xlabel="layer (0: embedding)", ylabel="score x 100")
        axis.locator_params(axis="x", integer=True)
    if not tasks:
        empty(axes[0], NO_RUNS)
        axes[0].set_title("ours")
    _papers_layers(axes[-1])
    for axis in axes:
        legend(axis)
    save(figure, stem)
    return f"Ours: {data.args.probe} probe, `{data.args.score}` score, newest evaluation of each run."


def _papers_layers(axis: Axes) -> None:
    """Table 1, whose columns count from the end."""
    columns = ("last-3", "last-2", "last-1", "last")
    for place, model in enumerate(("BERT-239M", "BERT-1.21B")):
        values = {r.column: r.value for r in paper.results() if r.table == 1 and r.model == model}
        axis.plot(columns, [values[c] for c in columns], "o-", color=COLORS[place], label=model)
        axis.axhline(values["layer20"], color=COLORS[place], linestyle=":", linewidth=1, label=f"{model}, layer 20")
    axis.set(title="paper, Table 1: GLUE, linear probe", ylabel="mean of 8", xlabel="layer")


def scores_by_rows(data: Data, stem: Path) -> str:
    """Figure 4."""
    tasks = data.tasks()
    figure, axes = panels(max(1, len(tasks)))
    for task, axis in zip(tasks, axes, strict=False):
        for place, (name, results) in enumerate(data.newest().items()):
            points = _samples(data, results, task)
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=COLORS[place % len(COLORS)], markersize=3, label=name)
        axis.set(title=task, xlabel="labelled rows", ylabel="score x 100", xscale="log")
        legend(axis)
    if not tasks:
        empty(axes[0], NO_RUNS)
    save(figure, stem)
    return "Means over the seeds of the samples. The paper prints no values of it."


def _samples(data: Data, results: dict[str, Any], task: str) -> list[tuple[float, float]]:
    """(rows, mean score over seeds) at the last layer."""
    found = results["tasks"].get(task)
    if found is None:
        return []
    probe = found["layers"][str(results["layers"][-1])].get(data.args.probe, {})
    by_size: dict[int, list[tuple[float, float]]] = {}
    for sample in probe.get("samples", []):
        if sample[data.args.score] is not None:
            score = 100 * sample[data.args.score][found["metric"]]
            by_size.setdefault(sample["size"], []).append((sample["rows"], score))
    return [tuple(sum(v) / len(v) for v in zip(*points, strict=True)) for points in by_size.values()]  # type: ignore[misc]


def losses(data: Data, stem: Path) -> str:
    """Figure 5."""
    ratio = (data.args.loss or data.fitted["loss"] or "@0.5").rpartition("@")[2]
    columns = sorted({c for row in data.rows for c in row if c.startswith("valid/") and c.endswith(f"/loss@{ratio}")})
    figure, axes = panels(max(1, len(columns)))
    for column, axis in zip(columns or [None], axes, strict=True):
        _families(axis, data, column, 1)
        for family, color in FAMILY_COLORS.items():
            law = data.law(family, "loss") if column == data.fitted["loss"] else None
            points = data.best(family, column, 1) if column else []
            if law is not None and points:
                x = _between(points)
                label = f"{law.constant:.3g} C^{law.exponent:.3f}"
                axis.plot(x, [law(c) for c in x], color=color, linestyle="--", linewidth=1, label=label)
        axis.set(title=column.split("/")[1] if column else "", ylabel=f"loss, {ratio} hidden (nats per token)")
        legend(axis)
    save(figure, stem)
    return "Every run, faint, and the lowest of each budget; dashed, the fitted law. The paper prints no values of it."


def scores_by_step(data: Data, stem: Path) -> str:
    """Figure 6."""
    tasks = data.tasks()
    figure, axes = panels(max(1, len(tasks)))
    for task, axis in zip(tasks, axes, strict=False):
        for place, (name, found) in enumerate(data.results.items()):
            points = [(r["step"], _score(data, r, task, r["layers"][-1])) for r in found]
            known = [(step, value) for step, value in points if value is not None]
            if known:
                axis.plot(*zip(*known, strict=True), "o-", color=COLORS[place % len(COLORS)], markersize=3, label=name)
        axis.set(title=task, xlabel="step", ylabel="score x 100")
        axis.locator_params(axis="x", nbins=5, integer=True)  # more labels of long runs would touch each other
        axis.xaxis.set_major_formatter("{x:,.0f}")
        legend(axis)
    if not tasks:
        empty(axes[0], NO_RUNS)
    save(figure, stem)
    return "Each evaluated checkpoint (`watch=true`). The paper averages ten tasks that it does not name."


def hyper_parameters(data: Data, stem: Path) -> str:
    """Figure 7."""
    figure, axes = panels(4, across=2)
    for row, (column, laws, label) in enumerate(
        (("batch_tokens", BATCH_LAWS, "batch (view tokens)"), ("lr", LR_LAWS, "peak learning rate"))
    ):
        ours, theirs = axes[2 * row : 2 * row + 2]
        _swept(ours, data, column)
        ours.set(title="ours", ylabel=label)
        for family, color in FAMILY_COLORS.items():
            points = [(model["flops"], model[column]) for model in paper.suite(family)]
            theirs.plot(*zip(*points, strict=True), "o", color=color, label=FAMILY_NAMES[family])
            law, x = laws[family], _between(points)
            name = f"{law.constant:.4g} C^{law.exponent:.3f}"
            theirs.plot(x, [law(c) for c in x], "--", color=color, linewidth=1, label=name)
        theirs.set(title="paper, Tables 10 and 11, and its laws", xlabel="training FLOPs", xscale="log", yscale="log")
        for axis in (ours, theirs):
            legend(axis)
    save(figure, stem)
    return "Ours: every run, faint; what the best runs of a budget had, full; dashed, the law through these."


def _swept(axis: Axes, data: Data, column: str) -> None:
    """All our runs' values of a hyper-parameter, those that entered the law, and the law."""
    drawn = False
    for family, color in FAMILY_COLORS.items():
        every = [(row["budget"], row[column]) for row in data.rows if row["family"] == family]
        if every:
            axis.plot(*zip(*every, strict=True), "o", color=color, alpha=0.25, markersize=4)
            drawn = True
        known = data.fits.get(family, {}).get("laws", {}).get(column, {})
        best = [(point["flops"], point["value"]) for point in known.get("points", [])]
        if best:
            axis.plot(*zip(*best, strict=True), "o", color=color, label=FAMILY_NAMES[family])
        law = data.law(family, column)
        if law is not None:
            x = _between(best)
            name = f"{law.constant:.4g} C^{law.exponent:.3f}"
            axis.plot(x, [law(c) for c in x], "--", color=color, linewidth=1, label=name)
    if drawn:
        axis.set(yscale="log")
        _compute_axis(axis)
    else:
        empty(axis, NO_TABLE)


def _families(axis: Axes, data: Data, column: str | None, sign: int) -> None:
    """All runs of each family, faint, and the best of each budget."""
    drawn = False
    for family, color in FAMILY_COLORS.items() if column else ():
        points = data.best(family, column, sign)  # type: ignore[arg-type]
        every = [
            (r["budget"], y) for r in data.rows if r["family"] == family and (y := number_of(r, column)) is not None
        ]  # type: ignore[arg-type]
        if points:
            axis.plot(*zip(*every, strict=True), "o", color=color, alpha=0.25, markersize=4)
            axis.plot(*zip(*points, strict=True), "o-", color=color, linewidth=1, label=FAMILY_NAMES[family])
            drawn = True
    if drawn:
        _compute_axis(axis)
    else:
        empty(axis, NO_TABLE if not data.rows else "no run has such a value")


def _compute_axis(axis: Axes) -> None:
    """Logarithmic, over a factor of ten at least, so that one budget is one place."""
    axis.set(xlabel="training FLOPs", xscale="log")
    low, high = axis.get_xlim()
    wider = max(1.0, math.sqrt(10 * low / high))
    axis.set_xlim(low / wider, high * wider)
    axis.xaxis.set_minor_formatter("")  # labels between decades would run into each other


def _between(points: list[tuple[float, float]]) -> list[float]:
    """From the least to the largest x, in equal factors."""
    low, high = (math.log(limit([x for x, _ in points])) for limit in (min, max))
    return [math.exp(low + (high - low) * i / 50) for i in range(51)]


def _score(data: Data, results: dict[str, Any], task: str, layer: int) -> float | None:
    found = results["tasks"].get(task)
    if found is None or data.args.probe not in found["layers"].get(str(layer), {}):
        return None
    return score_of(results, task, layer, data.args.probe, data.args.score)


if __name__ == "__main__":
    cli(FiguresArgs, figures, "python -m apps.plots.figures")
