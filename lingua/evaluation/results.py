"""What an evaluation leaves behind: files written whole, Markdown tables, pictures."""

from __future__ import annotations

import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.evaluation.probe import SCORES
from lingua.files import write_atomically

RESULTS = "results.json"
UNTRAINED = "untrained"
MEANING = {
    "paper": "the best of the grid on the evaluation rows, as the paper reports",
    "honest": "the setting chosen on held-out training rows",
    "full": "chosen like honest, from all training rows",
}
# Okabe and Ito's colours, which colour-blind readers tell apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = {"paper": "-", "honest": "--", "full": ":"}


def write_results(results: dict[str, Any], out: Path) -> str:
    """Write ``results.json``, ``results.md``, ``layers.png`` and ``samples.png``; returns the table."""
    table = results_table(results)
    write_whole(out / "layers.png", draw_layers(results))
    write_whole(out / "samples.png", draw_samples(results))
    write_whole(out / "results.md", table.encode())
    write_whole(out / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    return table


def score_of(results: dict[str, Any], task: str, layer: int | str, kind: str, score: str, metric: str = "") -> float:
    """One score x 100; the task's primary metric unless another is named."""
    found = results["tasks"][task]
    return 100 * found["layers"][str(layer)][kind][score][metric or found["metric"]]


def shown_scores(results: dict[str, Any]) -> list[str]:
    """``paper`` and ``honest``, and ``full`` where it was asked for and some task has rows that they leave out."""
    probe = results["config"]["probe"]
    more = any(task["train"]["rows"] > probe["max_samples"] for task in results["tasks"].values())
    return [score for score in SCORES if score != "full" or (probe["full"] and more)]


def kinds_of(results: dict[str, Any]) -> list[str]:
    """The probes that were asked for."""
    return results["config"]["probe"]["kinds"]


def results_table(results: dict[str, Any]) -> str:
    """The scores of an evaluation as Markdown: a table for each probe and score, a line a layer."""
    if results["step"] is None:
        origin = "from Hugging Face"
    else:
        state = "untrained weights" if results["random_init"] else f"step {results['step']:,}"
        origin = f"{state}, {results['checkpoint']}"
    text = [f"{results['model']}, {origin}. Scores x 100.\n"]
    columns = [(name, metric) for name, task in results["tasks"].items() for metric in task["metrics"]]
    header = ["layer", *(f"{name} {metric}" for name, metric in columns)]
    majorities = [f"{100 * results['tasks'][name]['majority'][metric]:.1f}" for name, metric in columns]
    averages = results["glue_average"]
    for kind in kinds_of(results):
        for score in shown_scores(results):
            if kind == "attentive" and score == "full":
                continue
            rows = []
            for layer in results["layers"]:
                cells = [f"{score_of(results, name, layer, kind, score, metric):.1f}" for name, metric in columns]
                mean = [] if averages is None else [f"{100 * averages[str(layer)][kind][score]:.1f}"]
                rows.append([str(layer), *cells, *mean])
            mean_of_eight = [] if averages is None else ["mean of 8"]
            rows.append(["majority", *majorities, *("" for _ in mean_of_eight)])
            text.append(f"{kind}, `{score}`: {MEANING[score]}.\n")
            text.append(markdown_table([*header, *mean_of_eight], rows))
    return "\n".join(text)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right, padded for reading as text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *others])} |\n"

    rule = [":" + "-" * (widths[0] - 1)] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return line(header) + line(rule) + "".join(map(line, rows))


Line = tuple[str, list[float], list[float], dict[str, Any]]  # label, x, y, style


def draw_layers(results: dict[str, Any]) -> bytes:
    """PNG: each task's scores against the layer, a line for each probe and score."""
    panels: dict[str, list[Line]] = {}
    for name, task in results["tasks"].items():
        panels[f"{name} ({task['metric']})"] = [
            (
                f"{kind}, {score}",
                [float(layer) for layer in results["layers"]],
                [score_of(results, name, layer, kind, score) for layer in results["layers"]],
                {"color": COLORS[place], "linestyle": LINES[score], "marker": "o"},
            )
            for place, kind in enumerate(kinds_of(results))
            for score in shown_scores(results)
            if (kind, score) != ("attentive", "full")
        ]
    return draw_panels(panels, "layer (0: embedding)", "linear")


def draw_samples(results: dict[str, Any]) -> bytes:
    """PNG: each task's scores at the last layer evaluated against training rows; means over the samples' seeds."""
    layer = str(results["layers"][-1])
    panels: dict[str, list[Line]] = {}
    for name, task in results["tasks"].items():
        lines = []
        for place, kind in enumerate(kinds_of(results)):
            for score in ("paper", "honest"):
                points: dict[int, list[tuple[float, float]]] = {}
                for sample in task["layers"][layer][kind]["samples"]:
                    if sample[score] is not None:
                        at = points.setdefault(sample["size"], [])
                        at.append((sample["rows"], 100 * sample[score][task["metric"]]))
                means = [[sum(values) / len(values) for values in zip(*at, strict=True)] for at in points.values()]
                x, y = ([mean[i] for mean in means] for i in (0, 1))
                style = {"color": COLORS[place], "linestyle": LINES[score], "marker": "o"}
                lines.append((f"{kind}, {score}", x, y, style))
        panels[f"{name} ({task['metric']}), layer {layer}"] = lines
    return draw_panels(panels, "training rows", "log")


def draw_panels(panels: dict[str, list[Line]], x_label: str, x_scale: str) -> bytes:
    """PNG: a panel for each title, three in a row, with one legend below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure, axes = plt.subplots(down, across, figsize=(4.6 * across, 3.4 * down), squeeze=False, layout="constrained")
    for (title, lines), panel in zip(panels.items(), axes.flat, strict=False):
        for label, x, y, style in lines:
            panel.plot(x, y, label=label, markersize=3, linewidth=1.4, **style)
        panel.set(title=title, xlabel=x_label, ylabel="score x 100", xscale=x_scale)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    for panel in list(axes.flat)[len(panels) :]:
        panel.remove()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    return buffer.getvalue()


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
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
