"""Power laws: those of the paper, those fitted to runs, and what they say about a model for a budget.

A law is ``y = constant * x ** exponent``; x is a budget C in training FLOPs unless said otherwise. Fits are lines in
log space with Huber's loss, so that one run that went wrong does not turn them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from lingua import paper
from lingua.errors import UserError

HUBER = 1.345  # residuals beyond this many standard deviations count less; 95% as efficient as plain least squares
MOST_WIDTH = 16384  # of the encoders that are planned
RATIO = 20.0  # the paper's D/F: view tokens over training FLOPs per view token, for every model of its suites


@dataclass
class PowerLaw:
    """``constant * x ** exponent``."""

    constant: float
    exponent: float

    def __call__(self, x: float) -> float:
        return self.constant * x**self.exponent


# Batch (view tokens a step) and peak learning rate against the budget, as the paper prints them.
BATCH_LAWS = {"bert": PowerLaw(17.38, 0.24), "crossbert": PowerLaw(1e4, 0.092)}
LR_LAWS = {"bert": PowerLaw(69.18, -0.24), "crossbert": PowerLaw(564.6, -0.279)}
SECOND_CROSSBERT_LR = PowerLaw(646.0, -0.279)  # its other constant, near what ids 7 and 8 were trained with


class Lines(NamedTuple):
    """Lines fitted to one or many sets of points; arrays of the leading shape of y."""

    slope: np.ndarray
    intercept: np.ndarray  # at the mean of x
    error: np.ndarray  # standard error of the slope


def huber_lines(x_N: np.ndarray, y_BN: np.ndarray, rounds: int = 30) -> Lines:
    """Straight lines by iteratively reweighted least squares with Huber's loss.

    The scale is that of the residuals' median, found anew in each round.

    Args:
        x_N: places, not all the same.
        y_BN: values at these, any leading shape.
    """
    n = len(x_N)
    u_N = x_N - x_N.mean()
    weight_BN = np.ones_like(y_BN)
    for _ in range(rounds):
        total = weight_BN.sum(-1)
        u0, y0 = (weight_BN * u_N).sum(-1) / total, (weight_BN * y_BN).sum(-1) / total
        du_BN, dy_BN = u_N - u0[..., None], y_BN - y0[..., None]
        slope = (weight_BN * du_BN * dy_BN).sum(-1) / (weight_BN * du_BN**2).sum(-1)
        left_BN = dy_BN - slope[..., None] * du_BN
        scale = np.maximum(np.median(np.abs(left_BN), -1) / 0.6745 * math.sqrt(n / max(1, n - 2)), 1e-12)
        weight_BN = np.minimum(1.0, HUBER * scale[..., None] / np.maximum(np.abs(left_BN), 1e-300))
    clipped = weight_BN * left_BN
    inside = np.maximum((weight_BN == 1.0).mean(-1), 1 / n)
    variance = (clipped**2).sum(-1) / max(1, n - 2) / inside**2
    return Lines(slope, y0 - slope * u0, np.sqrt(variance / (u_N**2).sum()))


@dataclass
class Fit:
    """A law and how well it is known."""

    law: PowerLaw
    low: float | None  # 95% interval of the exponent, None with fewer than four points
    high: float | None
    points: int
    spread: float  # largest deviation of a point from the law, relative

    def off(self, x: float, y: float) -> float:
        """How far a value is from the law, relative to the law."""
        return y / self.law(x) - 1


def fit_power_law(x: list[float], y: list[float], resamples: int = 999, seed: int = 0) -> Fit:
    """Robust line through ``(log x, log y)``.

    The interval is a bootstrap-t: residuals, widened by their leverages, are drawn anew, and each refit's distance to
    the fit is measured in its own standard errors; small samples then get the wide intervals they deserve.

    Raises:
        UserError: fewer than two different x, or a value that has no logarithm.
    """
    if len(x) != len(y) or len(set(x)) < 2:
        raise UserError(f"a power law needs values at two budgets at least, found {len(set(x))}")
    if not all(0 < value < math.inf for value in (*x, *y)):
        raise UserError("a power law needs finite values above 0")
    log_x, log_y = np.log(np.array(x, float)), np.log(np.array(y, float))
    line = huber_lines(log_x, log_y)
    slope = float(line.slope)
    law = PowerLaw(float(math.exp(line.intercept - slope * log_x.mean())), slope)
    spread = max(abs(b / law(a) - 1) for a, b in zip(x, y, strict=True))
    low, high = interval(log_x, log_y, line, resamples, seed) if len(x) >= 4 else (None, None)
    return Fit(law, low, high, len(x), spread)


def interval(x_N: np.ndarray, y_N: np.ndarray, line: Lines, resamples: int, seed: int) -> tuple[float, float]:
    """95% interval of the slope of ``line``; see :func:`fit_power_law`."""
    u_N = x_N - x_N.mean()
    fitted_N = line.intercept + line.slope * u_N
    leverage_N = 1 / len(x_N) + u_N**2 / (u_N**2).sum()
    left_N = (y_N - fitted_N) / np.sqrt(np.maximum(1 - leverage_N, 1e-6))
    drawn = np.random.default_rng(seed).integers(len(x_N), size=(resamples, len(x_N)))
    again = huber_lines(x_N, fitted_N + (left_N - left_N.mean())[drawn])
    studentized = (again.slope - line.slope) / np.maximum(again.error, 1e-12)
    most, least = np.quantile(studentized, [0.975, 0.025])
    return float(line.slope - most * line.error), float(line.slope - least * line.error)


class Parabola(NamedTuple):
    """A parabola of loss against the logarithm of x, and its lowest point."""

    best: float | None  # x of the lowest point; None where it lies outside of the runs, or there is none
    loss: float | None  # the loss there
    why: str  # what there is to say if ``best`` is None
    coefficients: tuple[float, float, float] | None = None  # of (ln x)^2, ln x, 1


def parabola(x: list[float], loss: list[float]) -> Parabola:
    """Least squares of runs of one budget (IsoFLOP, Hoffmann et al. 2022)."""
    if len(set(x)) < 3:
        return Parabola(None, None, f"{len(set(x))} sizes, and a parabola needs three")
    a, b, c = map(float, np.polyfit(np.log(x), loss, 2))
    if a <= 0:
        return Parabola(None, None, "the losses have no minimum", (a, b, c))
    lowest = -b / (2 * a)
    best = math.exp(lowest)
    if not min(x) <= best <= max(x):
        return Parabola(None, None, f"the minimum, near {best:.3g}, lies outside of what was run", (a, b, c))
    return Parabola(best, c + b * lowest + a * lowest**2, "", (a, b, c))


@dataclass(frozen=True)
class Shape:
    """An encoder and, for a CrossBERT, its predictor of the same width."""

    dim: int
    n_layers: int
    n_heads: int
    pred_layers: int | None = None

    def config(self) -> dict:
        """As the section ``model`` of a config."""
        own = {"dim": self.dim, "n_layers": self.n_layers, "n_heads": self.n_heads}
        return own | ({} if self.pred_layers is None else {"predictor": {"n_layers": self.pred_layers}})


@cache
def depth_law(family: str) -> Fit:
    """Blocks against width, fitted on the paper's suite of that family; ``spread`` is its largest error."""
    name = {"bert": "", "crossbert": "enc_"}[family]
    layers = {"bert": "n_layers", "crossbert": "enc_layers"}[family]
    rows = paper.suite(family)
    return fit_power_law([row[f"{name}dim"] for row in rows], [row[layers] for row in rows])


def head_size(dim: int) -> int:
    """64 up to a width of 1,024, 128 beyond (Tables 10 and 11)."""
    return 64 if dim <= 1024 else 128


def predictor_layers(n_layers: int) -> int:
    """A quarter of the encoder's, rounded down (every row of Table 11)."""
    return max(1, n_layers // 4)


def shape_of(family: str, dim: int, head_dim: int | None = None, n_layers: int | None = None) -> Shape:
    """The shape of a width by the rules.

    Args:
        head_dim: instead of :func:`head_size`.
        n_layers: instead of :func:`depth_law`.
    """
    if n_layers is None:
        n_layers = max(1, round(depth_law(family).law(dim)))
    heads = dim // (head_dim or head_size(dim))
    return Shape(dim, n_layers, heads, predictor_layers(n_layers) if family == "crossbert" else None)


def widths(head_dim: int | None = None, most: int = MOST_WIDTH) -> list[int]:
    """Every width that splits into whole heads."""
    step = head_dim or 64
    return [dim for dim in range(step, most + 1, step) if dim % (head_dim or head_size(dim)) == 0]
