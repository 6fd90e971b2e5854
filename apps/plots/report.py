"""One table and one picture of a few runs: ``python -m apps.plots.report runs=[runs/bert,runs/crossbert] out=runs/x``.

Writes ``report.md`` and ``report.png`` from the runs' ``metrics.jsonl`` and ``eval/*/results.json``. What is
missing, unfinished or not probed is shown as such.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.results import COLORS, RESULTS, UNTRAINED, markdown_table, writable_folder, write_whole
from lingua.run_folder import Summary, read_results, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "-"
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.")


@dataclass
class ReportArgs:
    """Compare runs: validation losses, speeds, FLOPs, and probe scores of each layer."""

    runs: list[str] = field(default_factory=list)  # run folders, in the order to show them
    # results of the untrained encoder: their folder, or the run folder they belong to; none: the first run's
    baseline: str | None = None
    out: str = "???"  # folder for report.md and report.png
    score: str = "honest"  # probe score in the picture: honest | paper; the table has both

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no runs: give runs=[runs/a,runs/b]")
        if self.score not in ("honest", "paper"):
            raise UserError(f"score={self.score}: expected honest or paper")


def report(args: ReportArgs) -> str:
    """Write ``report.md`` and ``report.png`` and return the table, which is also printed.

    Raises:
        UserError: no run folder exists, a damaged results or metrics file, or ``out`` cannot be written.
    """
    names = names_of(args.runs)
    runs = [summarize(Path(run), name) for run, name in zip(args.runs, names, strict=True)]
    if all(run.state == "missing" for run in runs):
        raise UserError(f"none of the run folders exists: {', '.join(args.runs)}")
    out = writable_folder(args.out)
    columns = [untrained(args.baseline or args.runs[0]), *runs]
    table = markdown_table(["", *(column.name for column in columns)], rows_of(columns))
    notes = [note for column in columns for note in column.notes]
    text = (
        "# Report\n\n"
        f"{table}\n"
        "Tokens count every view of a row, text tokens every row once; rates are the median over the run. Losses are "
        "in nats per hidden token, on the same hidden tokens for every run. FLOPs are the paper's count for training. "
        "Probe scores are x 100: `paper`, the best of the grid on the evaluation rows, / `honest`, the setting chosen "
        "on held-out training rows.\n\n"
        + "".join(f"- {note}\n" for note in notes)
        + "\n![Loss curves and probe scores](report.png)\n"
    )
    write_whole(out / "report.png", draw(columns, args.score))
    write_whole(out / "report.md", text.encode())
    print(table + "".join(f"{note}\n" for note in notes) + f"written to {out}/report.md and {out}/report.png")
    return table


def names_of(runs: list[str]) -> list[str]:
    """What to call run folders: the ends of their paths, where these differ."""
    names = [Path(run).name for run in runs]
    return names if len(set(names)) == len(names) else runs


def untrained(folder: str) -> Summary:
    """The untrained encoder's results, in ``folder`` or in the run folder ``folder``."""
    for path in (Path(folder) / RESULTS, Path(folder) / "eval" / UNTRAINED / RESULTS):
        if path.is_file():
            return Summary(UNTRAINED, NONE, results=read_results(path))
    note = f"{UNTRAINED}: no results in {folder}; python -m apps.APP.eval random_init=true makes them"
    return Summary(UNTRAINED, "missing", notes=[note])


def rows_of(columns: list[Summary]) -> list[list[str]]:
    """The table's lines: a name and a cell for each column."""

    def line(name: str, cell: Any) -> list[str]:
        return [name, *(cell(column) for column in columns)]

    def number(value: float | None, form: str) -> str:
        return NONE if value is None else format(value, form)

    rows = [
        line("state", lambda c: c.state),
        line("steps", lambda c: number(c.last("step"), ",")),
        line("training FLOPs", lambda c: number(c.last("flops"), ".3g")),
        line("tokens", lambda c: number(c.last("tokens"), ",")),
        line("text tokens", lambda c: number(c.last("data_tokens"), ",")),
        line("tokens/s", lambda c: number(c.median("tokens_per_second"), ",.0f")),
        line("text tokens/s", lambda c: number(c.median("data_tokens_per_second"), ",.0f")),
    ]
    for name, ratio in validation_keys(columns):
        key = f"valid/{name}/loss@{ratio}"
        rows.append(line(f"validation loss, {name}, {ratio} hidden", lambda c, key=key: number(c.last(key), ".3f")))
    for task, kind, metric in probes_of(columns):
        layers = sorted({layer for column in columns for layer in scores_of(column, task, kind, "paper")})
        for layer in layers:

            def cell(column: Summary, layer: int = layer, task: str = task, kind: str = kind) -> str:
                both = [scores_of(column, task, kind, score).get(layer) for score in ("paper", "honest")]
                return NONE if both[0] is None else " / ".join(f"{score:.1f}" for score in both)

            rows.append(line(f"{task}, {kind} {metric}, layer {layer}", cell))
        rows.append(line(f"{task}, majority", lambda c, task=task: number(majority_of(c, task), ".1f")))
    return rows


def validation_keys(columns: list[Summary]) -> list[tuple[str, str]]:
    """(set, hidden ratio) of every validation loss that any run has."""
    keys = {key for column in columns for record in column.records for key in record if key.startswith("valid/")}
    keys = {key for key in keys if "/loss@" in key}
    return sorted(tuple(key.removeprefix("valid/").rsplit("/loss@", 1)) for key in keys)


def probes_of(columns: list[Summary]) -> list[tuple[str, str, str]]:
    """(task, probe, primary metric) of every evaluation, in their order."""
    found: dict[tuple[str, str, str], None] = {}
    for column in columns:
        for name, task in (column.results or {"tasks": {}})["tasks"].items():
            for kind in next(iter(task["layers"].values())):
                found[name, kind, task["metric"]] = None
    return list(found)


def scores_of(column: Summary, task: str, kind: str, score: str) -> dict[int, float]:
    """Score x 100 by layer; empty where it was not measured."""
    found = (column.results or {"tasks": {}})["tasks"].get(task)
    if found is None:
        return {}
    layers = {int(layer): probes[kind] for layer, probes in found["layers"].items() if kind in probes}
    return {layer: 100 * probe[score][found["metric"]] for layer, probe in layers.items()}


def majority_of(column: Summary, task: str) -> float | None:
    """Score x 100 of the majority class, or None."""
    found = (column.results or {"tasks": {}})["tasks"].get(task)
    return None if found is None else 100 * found["majority"][found["metric"]]


def draw(columns: list[Summary], score: str) -> bytes:
    """The picture as PNG: a panel for each validation set, a panel for each task and probe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    keys = validation_keys(columns)
    sets, probes = list(dict.fromkeys(name for name, _ in keys)) or [None], probes_of(columns)
    count = len(sets) + len(probes)
    across = min(count, 2)
    down = math.ceil(count / across)
    figure, axes = plt.subplots(down, across, figsize=(5.2 * across, 4.2 * down), squeeze=False, layout="constrained")
    panels: list[Axes] = list(axes.flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
    for name, panel in zip(sets, panels, strict=False):
        _draw_losses(panel, columns, name, [ratio for key, ratio in keys if key == name])
    for (task, kind, metric), panel in zip(probes, panels[len(sets) :], strict=False):
        for place, column in enumerate(columns):
            by_layer = sorted(scores_of(column, task, kind, score).items())
            if by_layer:
                panel.plot(*zip(*by_layer, strict=True), label=_label(column), **_style(place))
        majority = next((value for c in columns if (value := majority_of(c, task)) is not None), None)
        if majority is not None:
            panel.axhline(majority, color="black", linestyle=":", linewidth=1.2, label="majority")
        panel.set(xlabel="layer (0: embedding)", ylabel=f"{metric} x 100", title=f"{task}: {kind} probe, {score} score")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in panels[count:]:
        panel.remove()
    for panel in panels[:count]:  # under the axes, where it covers no data
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    plt.close(figure)
    return buffer.getvalue()


def _draw_losses(panel: Axes, columns: list[Summary], name: str | None, ratios: list[str]) -> None:
    """Loss against FLOPs: validation on set ``name``, or in training where no run has any validation."""
    curves = []
    for place, column in enumerate(columns):
        for line, ratio in enumerate(ratios or [None]):
            key = "loss" if ratio is None else f"valid/{name}/loss@{ratio}"
            points = [(record["step"], record[key]) for record in column.records if record.get(key) is not None]
            per_step = column.flops_per_step()
            if points and per_step:
                label = _label(column) + ("" if ratio is None else f", {ratio} hidden")
                curves.append(([(step * per_step, loss) for step, loss in points], label, place, line))
    largest = max((points[-1][0] for points, *_ in curves), default=0.0)
    exponent = math.floor(math.log10(largest)) if largest else 0
    for points, label, place, line in curves:
        style = _style(place) | {"linestyle": LINES[line % len(LINES)], "markersize": 3 if len(points) < 40 else 0}
        panel.plot([x / 10**exponent for x, _ in points], [y for _, y in points], label=label, **style)
    title = "training loss, each run at its own hidden ratio" if name is None else f"validation loss, {name}"
    panel.set(
        xlabel=f"training FLOPs ($\\times 10^{{{exponent}}}$)", ylabel="loss (nats per hidden token)", title=title
    )
    if not curves:
        panel.text(0.5, 0.5, "no step logged", ha="center", va="center", transform=panel.transAxes)


def _style(place: int) -> dict[str, Any]:
    """Line style of the column at ``place``; 0 is the untrained encoder."""
    color = "#777777" if place == 0 else COLORS[(place - 1) % len(COLORS)]
    return {"color": color, "marker": MARKERS[place % len(MARKERS)], "markersize": 5, "linewidth": 1.6}


def _label(column: Summary) -> str:
    return column.name if column.state in ("done", NONE) else f"{column.name} ({column.state})"


if __name__ == "__main__":
    cli(ReportArgs, report, "python -m apps.plots.report")
