"""Scores of predictions, equal to scikit-learn's and SciPy's, which training and evaluation do not need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

# Student's t for 95% intervals, by degrees of freedom from 1; beyond, the last is a little wide.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def accuracy(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """Fraction of equal labels."""
    return float(np.mean(target_M == predicted_M))


def _confusion(target_M: np.ndarray, predicted_M: np.ndarray) -> np.ndarray:
    """Counts [true, predicted] over the classes that occur in either."""
    classes, code = np.unique(np.concatenate([target_M, predicted_M]), return_inverse=True)
    true_M, guess_M = code[: len(target_M)], code[len(target_M) :]
    c = len(classes)
    return np.bincount(true_M * c + guess_M, minlength=c * c).reshape(c, c).astype(np.float64)


def macro_f1(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """Mean over classes (that occur in either) of 2 TP / (2 TP + FP + FN)."""
    counts = _confusion(target_M, predicted_M)
    return float(np.mean(2 * np.diag(counts) / (counts.sum(0) + counts.sum(1))))


def f1(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of class 1, the positive one of two; 0 where there is no such class to find."""
    positive, found = target_M == 1, predicted_M == 1
    total = positive.sum() + found.sum()
    return float(2 * (positive & found).sum() / total) if total else 0.0


def matthews(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """Matthews' correlation, for any number of classes (Gorodkin 2004); 0 where it is undefined."""
    counts = _confusion(target_M, predicted_M)
    true, guess, n = counts.sum(1), counts.sum(0), counts.sum()
    scale = np.sqrt((n**2 - guess @ guess) * (n**2 - true @ true))
    return float((np.trace(counts) * n - true @ guess) / scale) if scale > 0 else 0.0


def pearson(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """Linear correlation; 0 where it is undefined (a constant side)."""
    if np.ptp(target_M) == 0 or np.ptp(predicted_M) == 0:
        return 0.0
    a_M, b_M = (values - values.mean() for values in (target_M, predicted_M))
    return float(a_M @ b_M / np.sqrt((a_M @ a_M) * (b_M @ b_M)))


def spearman(target_M: np.ndarray, predicted_M: np.ndarray) -> float:
    """Rank correlation, equal values sharing their mean rank; 0 where it is undefined (a constant side)."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, code, count = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[code]

    return pearson(ranks(target_M), ranks(predicted_M))


Metric = Callable[[np.ndarray, np.ndarray], float]
_CLASSES: dict[str, Metric] = {"accuracy": accuracy, "macro_f1": macro_f1, "matthews": matthews}
METRICS: dict[str, dict[str, Metric]] = {
    "classification": _CLASSES,
    "binary": {**_CLASSES, "f1": f1},  # classification with the classes 0 and 1
    "regression": {"spearman": spearman, "pearson": pearson},
}


def kind_of(*targets: np.ndarray) -> str:
    """The kind in ``METRICS`` of targets: class numbers are integers, ``binary`` if none is above 1."""
    if not all(np.issubdtype(y.dtype, np.integer) for y in targets):
        return "regression"
    return "binary" if all(y.max() <= 1 for y in targets) else "classification"


def all_metrics(target_M: np.ndarray, predicted_M: np.ndarray, kind: str) -> dict[str, float]:
    """Every metric of ``kind``, by name."""
    return {name: function(target_M, predicted_M) for name, function in METRICS[kind].items()}


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """``mean``, and ``plus_minus``, half the width of its 95% interval by Student's t (None of a single value)."""
    if len(values) < 2:
        return {"mean": values[0], "plus_minus": None}
    t = T_95[min(len(values) - 1, len(T_95)) - 1]
    return {"mean": statistics.mean(values), "plus_minus": t * statistics.stdev(values) / math.sqrt(len(values))}
