"""Frozen probes: what a linear map or the nearest neighbours read out of features, in closed form.

Three scores, each under its own name. ``paper``: at most 10,000 training rows, and the best setting of the grid
on the evaluation set, as the paper does; it is therefore optimistic. ``honest``: the same rows, the setting
chosen on a part of them that is held out. ``full``: chosen like that, from all training rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingua.errors import UserError, check_fields
from lingua.evaluation.attentive import AttentiveArgs, TokenStates, attentive_predictions
from lingua.evaluation.knn import nearest
from lingua.evaluation.ridge import RidgePath
from lingua.evaluation.samples import held_out, sample_rows, sample_sizes
from lingua.evaluation.scores import METRICS, all_metrics, kind_of

SCORES = ("paper", "honest", "full")


@dataclass
class ProbeArgs:
    """Grids and choices of the probes."""

    kinds: list[str] = field(default_factory=lambda: ["ridge", "knn"])  # of ridge, knn, attentive
    lambda_min: float = 1.0  # smallest ridge penalty
    lambda_max: float = 1e4  # largest ridge penalty
    lambdas: int = 9  # number of penalties, log-spaced
    intercept: bool = False  # fit a ridge intercept; off is the paper's eq. 3
    standardize: bool = False  # scale features to mean 0, variance 1 before ridge; off is the paper's eq. 3
    neighbours: list[int] = field(default_factory=lambda: [1, 3, 10, 30])  # k of the kNN probe
    distances: list[str] = field(default_factory=lambda: ["l2", "cosine"])  # of the kNN probe
    held_out: float = 0.2  # fraction of the training rows that chooses the setting of the honest and full scores
    seed: int = 0  # of the held-out rows
    max_samples: int = 10_000  # training rows of the paper and honest scores, the largest sample size
    samples: int = 5  # number of sample sizes, log-spaced from 1 to max_samples; 1: only the largest
    sample_seeds: list[int] = field(default_factory=lambda: [0])  # of the samples; the first one's are the scores'
    full: bool = True  # also fit on all training rows, where there are more than max_samples
    attentive: AttentiveArgs = field(default_factory=AttentiveArgs)

    def __post_init__(self) -> None:
        known = bool(self.distances) and set(self.distances) <= {"l2", "cosine"}
        kinds = bool(self.kinds) and set(self.kinds) <= set(PROBES)
        checks = {
            "kinds": (
                kinds and len(set(self.kinds)) == len(self.kinds),
                f"some of {', '.join(PROBES)}, each once",
            ),
            "lambda_min": (self.lambda_min > 0, "a penalty above 0"),
            "lambda_max": (
                self.lambda_min <= self.lambda_max < np.inf,
                f"a finite penalty of at least lambda_min={self.lambda_min}",
            ),
            "lambdas": (self.lambdas >= 1, "at least 1"),
            "neighbours": (bool(self.neighbours) and min(self.neighbours) >= 1, "numbers from 1"),
            "distances": (known, "some of l2, cosine"),
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "max_samples": (self.max_samples >= 2, "at least 2"),
            "samples": (self.samples >= 1, "at least 1"),
            "sample_seeds": (bool(self.sample_seeds), "at least one seed"),
        }
        check_fields("probe", self, checks)

    def penalties(self) -> list[float]:
        """The ridge penalties, log-spaced from ``lambda_min`` to ``lambda_max``."""
        return np.geomspace(self.lambda_min, self.lambda_max, self.lambdas).tolist()


Features = Tensor | TokenStates
# A probe fits training rows and yields (setting, predictions for other rows) over its grid.
Predictions = Iterator[tuple[dict[str, Any], np.ndarray]]


def probe(
    train_x_ND: np.ndarray | TokenStates,
    train_y_N: np.ndarray,
    test_x_MD: np.ndarray | TokenStates,
    test_y_M: np.ndarray,
    args: ProbeArgs,
    metric: str,
    groups_N: np.ndarray | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Fit every probe of ``args.kinds`` and score it on the test rows.

    Args:
        train_x_ND, test_x_MD: features, of any float type; for the attentive probe the states of all tokens.
        train_y_N, test_y_M: class numbers from 0 (integers) or regression targets (floats).
        metric: the primary metric, which chooses the setting: one of :data:`lingua.evaluation.scores.METRICS`
            for this kind.
        groups_N: integer per training row; rows of one group (the words of a sentence) are sampled and held out
            together. Default: every row for itself.
        device: where the linear algebra runs, in float64.

    Returns:
        For each probe ``paper``, ``honest`` and ``full``: the setting chosen, every metric on the test rows, and
        for the latter two ``held_out_score``, what chose it (``full`` is None if ``args.full`` is off). ``grid``:
        every setting with its metrics, on the rows of ``paper``. ``samples``: for each sample size and seed the
        number of rows and both scores, None where there are too few rows for them.

    Raises:
        UserError: NaN or infinite features or targets, lengths that differ, too few training rows.
    """
    if isinstance(train_x_ND, np.ndarray) and isinstance(test_x_MD, np.ndarray):
        check_finite(train_x_ND, "features of the training rows")
        check_finite(test_x_MD, "features of the test rows")
    for name, x, y in (("training", train_x_ND, train_y_N), ("test", test_x_MD, test_y_M)):
        if len(x) != len(y) or len(y) == 0:
            raise UserError(f"{name} rows: {len(x)} rows of features and {len(y)} targets; expected as many, and some")
        check_finite(y, f"targets of the {name} rows")
    groups_N = np.arange(len(train_y_N)) if groups_N is None else groups_N
    train, test = (x if isinstance(x, TokenStates) else torch.as_tensor(x).to(device) for x in (train_x_ND, test_x_MD))
    fit = _Fit(train, train_y_N, groups_N, test, test_y_M, args, metric, device)
    return {name: _scores(fit, name) for name in args.kinds}


@dataclass
class _Fit:
    """Everything a probe is fitted and scored on."""

    x_ND: Features
    y_N: np.ndarray
    groups_N: np.ndarray
    test_x_MD: Features
    test_y_M: np.ndarray
    args: ProbeArgs
    metric: str
    device: str

    def grid(self, name: str, rows: np.ndarray) -> list[dict[str, Any]]:
        """Every setting with its metrics on the test rows, fitted on ``rows``."""
        kind = kind_of(self.y_N, self.test_y_M)
        predictions = PROBES[name](self.x_ND[rows], self.y_N[rows], self.test_x_MD, self.args, self.device)
        return [{**setting, **all_metrics(self.test_y_M, predicted, kind)} for setting, predicted in predictions]

    def honest(self, name: str, rows: np.ndarray, grid: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The entry of ``grid`` whose setting is best on the rows among ``rows`` that are held out, None if the
        others are too few for every setting."""
        held = held_out(self.groups_N[rows], self.args.held_out, self.args.seed)
        fitted, chooses = rows[~held], rows[held]
        score = METRICS[kind_of(self.y_N, self.test_y_M)][self.metric]
        predictions = PROBES[name](self.x_ND[fitted], self.y_N[fitted], self.x_ND[chooses], self.args, self.device)
        scored = [(setting, score(self.y_N[chooses], predicted)) for setting, predicted in predictions]
        if not scored:
            return None
        setting, held_out_score = max(scored, key=lambda entry: entry[1])  # the first of equals
        entry = next(entry for entry in grid if setting.items() <= entry.items())
        return {**entry, "held_out_score": held_out_score}

    def best(self, grid: list[dict[str, Any]]) -> dict[str, Any] | None:
        return max(grid, key=lambda entry: entry[self.metric], default=None)


def _scores(fit: _Fit, name: str) -> dict[str, Any]:
    """The three scores of one probe, and its samples."""
    args, everything = fit.args, np.arange(len(fit.y_N))
    rows = sample_rows(fit.groups_N, args.max_samples, args.sample_seeds[0])
    grid = fit.grid(name, rows)
    paper, honest = fit.best(grid), fit.honest(name, rows, grid)
    if honest is None:
        raise UserError(
            f"probe.neighbours={args.neighbours}: none is within the {len(rows)} training rows less those held out"
        )
    samples = []
    for size in sample_sizes(args.max_samples, args.samples)[:-1]:
        for seed in args.sample_seeds if size < len(rows) else ():
            few = sample_rows(fit.groups_N, size, seed)
            few_grid = fit.grid(name, few)
            enough = few_grid and len(np.unique(fit.groups_N[few])) > 1
            samples.append(
                {
                    "size": size,
                    "seed": seed,
                    "rows": len(few),
                    "paper": fit.best(few_grid),
                    "honest": fit.honest(name, few, few_grid) if enough else None,
                }
            )
    samples.append(
        {
            "size": args.max_samples,
            "seed": args.sample_seeds[0],
            "rows": len(rows),
            "paper": paper,
            "honest": honest,
        }
    )
    full = None
    if args.full:
        full = honest if len(rows) == len(everything) else fit.honest(name, everything, fit.grid(name, everything))
    return {"paper": paper, "honest": honest, "full": full, "grid": grid, "samples": samples}


def majority(train_y_N: np.ndarray, test_y_M: np.ndarray) -> dict[str, float]:
    """Metrics of the constant prediction: the commonest training class, or the training mean."""
    kind = kind_of(train_y_N, test_y_M)
    constant = train_y_N.mean() if kind == "regression" else np.bincount(train_y_N).argmax()
    return all_metrics(test_y_M, np.full(len(test_y_M), constant), kind)


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise UserError naming the first row of ``values`` that holds a NaN or an infinity."""
    finite_N = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite_N.all():
        first, count = int(np.argmin(finite_N)), int((~finite_N).sum())
        raise UserError(
            f"{what}: NaN or infinity in {count} of {len(values)} rows, the first is row {first}: the "
            "checkpoint or the data is broken, or the numbers overflow"
        )


def ridge_predictions(x_ND: Tensor, y_N: np.ndarray, x_MD: Tensor, args: ProbeArgs, device: str = "cpu") -> Predictions:
    """Ridge on one-hot targets and the argmax (classes), or on the targets as they are (regression)."""
    classification = np.issubdtype(y_N.dtype, np.integer)
    # Only classes that occur: the all-zero column of another would win wherever all true ones are negative.
    classes_C, class_N = np.unique(y_N, return_inverse=True)
    y_NC = np.eye(len(classes_C))[class_N] if classification else y_N[:, None]
    path = RidgePath(x_ND, torch.from_numpy(y_NC), args.intercept, args.standardize)
    penalties = args.penalties()
    for penalty, predicted_MC in zip(penalties, path.predict(x_MD, penalties), strict=True):
        if classification:
            yield {"lambda": penalty}, classes_C[predicted_MC.argmax(1).cpu().numpy()]
        else:
            yield {"lambda": penalty}, predicted_MC[:, 0].cpu().numpy()


def knn_predictions(x_ND: Tensor, y_N: np.ndarray, x_MD: Tensor, args: ProbeArgs, device: str = "cpu") -> Predictions:
    """The majority among the k nearest (the lowest class of equals), or their mean target (regression).

    A ``k`` above the number of training rows has no answer and is left out of the grid.
    """
    ks = [k for k in sorted(set(args.neighbours)) if k <= len(x_ND)]
    for distance in args.distances if ks else ():
        nearest_MK = y_N[nearest(x_ND, x_MD, ks[-1], distance).cpu().numpy()]
        for k in ks:
            if np.issubdtype(y_N.dtype, np.integer):
                yield {"k": k, "distance": distance}, _most_frequent(nearest_MK[:, :k])
            else:
                yield {"k": k, "distance": distance}, nearest_MK[:, :k].mean(1)


def _most_frequent(labels_MK: np.ndarray) -> np.ndarray:
    """The commonest label of each row, the lowest of equals."""
    # Counted one class at a time against the best so far: no [M, classes] table.
    best_M, votes_M = np.zeros(len(labels_MK), dtype=labels_MK.dtype), np.zeros(len(labels_MK), dtype=int)
    for label in np.unique(labels_MK):
        count_M = (labels_MK == label).sum(1)
        best_M, votes_M = np.where(count_M > votes_M, label, best_M), np.maximum(count_M, votes_M)
    return best_M


def _attentive(x: TokenStates, y_N: np.ndarray, test_x: TokenStates, args: ProbeArgs, device: str) -> Predictions:
    return attentive_predictions(x, y_N, test_x, args.attentive, args.seed, device)


PROBES: dict[str, Callable[..., Predictions]] = {
    "ridge": ridge_predictions,
    "knn": knn_predictions,
    "attentive": _attentive,
}
