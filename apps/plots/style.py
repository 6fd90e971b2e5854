"""How every figure looks and is written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from lingua.evaluation.results import COLORS, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILY_COLORS = {"bert": COLORS[0], "crossbert": COLORS[1]}  # the same in every figure
FAMILY_NAMES = {"bert": "BERT", "crossbert": "CrossBERT"}


def panels(count: int, across: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    across = min(across, count)
    down = -(-count // across)
    figure, axes = plt.subplots(down, across, figsize=(4.8 * across, 3.9 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.remove()
    for axis in axes.flat[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, which="both")
        axis.set_axisbelow(True)
    return figure, list(axes.flat[:count])


def empty(axis: Axes, why: str) -> None:
    """A panel without data says so."""
    axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes, color="0.4", wrap=True)
    axis.set(xticks=[], yticks=[])


def legend(axis: Axes, columns: int = 2) -> None:
    """Under the axes, where it covers no data."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, frameon=False, fontsize=8.5)


def save(figure: Figure, stem: Path) -> None:
    """PNG and SVG, of the same bytes whenever the data are the same."""
    import matplotlib
    from matplotlib import pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "fixed", "svg.fonttype": "none"}):
        for form, options in {"png": {"dpi": 150}, "svg": {"metadata": {"Date": None}}}.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, **options)
            write_whole(stem.with_suffix(f".{form}"), buffer.getvalue())
    plt.close(figure)
