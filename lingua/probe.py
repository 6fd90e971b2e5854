"""Frozen probes: what a linear map or the nearest neighbours read out of features, in closed form.

Two scores, each under its own name: ``paper`` takes the best setting of the grid on the evaluation set,
as the paper does, and is therefore optimistic; ``honest`` chooses the setting on held-out training rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.hashing import permutation
from lingua.scores import METRICS, all_metrics


@dataclass
class ProbeArgs:
    """Grids and choices of the probes."""

    kinds: list[str] = field(default_factory=lambda: ["ridge", "knn"])  # of ridge, knn
    lambda_min: float = 1.0  # smallest ridge penalty
    lambda_max: float = 1e4  # largest ridge penalty
    lambdas: int = 9  # number of penalties, log-spaced
    intercept: bool = False  # fit a ridge intercept; off is the paper's eq. 3
    standardize: bool = False  # scale features to mean 0, variance 1 before ridge; off is the paper's eq. 3
    neighbours: list[int] = field(default_factory=lambda: [1, 3, 10, 30])  # k of the kNN probe
    distances: list[str] = field(default_factory=lambda: ["l2", "cosine"])  # of the kNN probe
    held_out: float = 0.2  # fraction of the training rows that chooses the setting of the honest score
    seed: int = 0  # of the held-out rows

    def __post_init__(self) -> None:
        def require(ok: bool, key: str, expected: str) -> None:
            if not ok:
                raise UserError(f"probe.{key}={getattr(self, key)}: expected {expected}")

        require(bool(self.kinds) and set(self.kinds) <= set(PROBES), "kinds", f"some of {', '.join(PROBES)}")
        require(self.lambda_min > 0, "lambda_min", "a penalty above 0")
        require(self.lambda_max >= self.lambda_min, "lambda_max", f"at least lambda_min={self.lambda_min}")
        require(self.lambdas >= 1, "lambdas", "at least 1")
        require(bool(self.neighbours) and min(self.neighbours) >= 1, "neighbours", "numbers from 1")
        known = bool(self.distances) and set(self.distances) <= {"l2", "cosine"}
        require(known, "distances", "some of l2, cosine")
        require(0 < self.held_out < 1, "held_out", "a fraction between 0 and 1")

    def penalties(self) -> list[float]:
        """The ridge penalties, log-spaced from ``lambda_min`` to ``lambda_max``."""
        return np.geomspace(self.lambda_min, self.lambda_max, self.lambdas).tolist()


# A probe fits training rows and yields (setting, predictions for other rows) over its grid.
Predictions = Iterator[tuple[dict[str, Any], np.ndarray]]


def probe(
    train_x_ND: np.ndarray,
    train_y_N: np.ndarray,
    test_x_MD: np.ndarray,
    test_y_M: np.ndarray,
    args: ProbeArgs,
    metric: str,
    groups_N: np.ndarray | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Fit every probe of ``args.kinds`` and score it on the test rows.

    Args:
        train_x_ND, test_x_MD: features.
        train_y_N, test_y_M: class numbers from 0 (integers) or regression targets (floats).
        metric: the primary metric, which chooses the setting: one of ``lingua.scores.METRICS`` for this kind.
        groups_N: integer per training row; rows of one group (the words of a sentence) are held out together.
            Default: every row for itself.
        device: where the linear algebra runs, in float64.

    Returns:
        For each probe ``grid`` (a list of setting and every metric on the test rows), ``paper`` and
        ``honest`` (the entry of the grid each chooses; the latter with ``held_out_score``, what chose it).

    Raises:
        UserError: NaN or infinite features or targets, lengths that differ, too few training rows.
    """
    check_finite(train_x_ND, "features of the training rows")
    check_finite(test_x_MD, "features of the test rows")
    for name, x, y in (("training", train_x_ND, train_y_N), ("test", test_x_MD, test_y_M)):
        if len(x) != len(y) or len(y) == 0:
            raise UserError(f"{name} rows: {len(x)} rows of features and {len(y)} targets; expected as many, and some")
        check_finite(y, f"targets of the {name} rows")
    kind = "classification" if np.issubdtype(train_y_N.dtype, np.integer) else "regression"
    groups_N = np.arange(len(train_y_N)) if groups_N is None else groups_N
    held_N = held_out(groups_N, args.held_out, args.seed)
    train, test = (torch.as_tensor(x, dtype=torch.float64, device=device) for x in (train_x_ND, test_x_MD))
    held = torch.from_numpy(held_N).to(device)

    results: dict[str, Any] = {}
    for name in args.kinds:
        predict = PROBES[name]
        chosen = [
            (setting, METRICS[kind][metric](train_y_N[held_N], predicted))
            for setting, predicted in predict(train[~held], train_y_N[~held_N], train[held], args)
        ]
        grid = [
            {**setting, **all_metrics(test_y_M, predicted, kind)}
            for setting, predicted in predict(train, train_y_N, test, args)
        ]
        setting, held_out_score = max(chosen, key=lambda entry: entry[1])  # the first of equals
        honest = next(entry for entry in grid if setting.items() <= entry.items())
        results[name] = {
            "paper": max(grid, key=lambda entry: entry[metric]),
            "honest": {**honest, "held_out_score": held_out_score},
            "grid": grid,
        }
    return results


def majority(train_y_N: np.ndarray, test_y_M: np.ndarray) -> dict[str, float]:
    """Metrics of the constant prediction: the commonest training class, or the training mean."""
    if np.issubdtype(train_y_N.dtype, np.integer):
        return all_metrics(test_y_M, np.full(len(test_y_M), np.bincount(train_y_N).argmax()), "classification")
    return all_metrics(test_y_M, np.full(len(test_y_M), train_y_N.mean()), "regression")


def held_out(groups_N: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Boolean mask of the training rows to hold out: whole groups, at least one and not all of them."""
    names, group_N = np.unique(groups_N, return_inverse=True)
    if len(names) < 2:
        raise UserError(
            f"{len(names)} training row or sentence: the honest score holds some out, so it takes at least 2"
        )
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    return np.isin(group_N, permutation(len(names), seed)[:count])


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise UserError naming the first row of ``values`` that holds a NaN or an infinity."""
    finite_N = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite_N.all():
        first, count = int(np.argmin(finite_N)), int((~finite_N).sum())
        raise UserError(
            f"{what}: NaN or infinity in {count} of {len(values)} rows, the first is row {first}: the "
            "checkpoint or the data is broken, or the numbers overflow"
        )


class RidgePath:
    """Ridge regression for any penalty from one eigendecomposition, in float64.

    ``W = (X^T X + lambda I)^-1 X^T Y`` (the paper's eq. 3), equal to scikit-learn's ``Ridge(alpha=lambda)``
    with ``fit_intercept=intercept``, behind its ``StandardScaler`` if ``standardize``. Of ``X^T X`` and
    ``X X^T`` the smaller is decomposed.
    """

    def __init__(self, x_ND: Tensor, y_NC: Tensor, intercept: bool = False, standardize: bool = False) -> None:
        n, d = x_ND.shape
        self.shift_D, self.scale_D = x_ND.new_zeros(d), x_ND.new_ones(d)
        self.offset_C = y_NC.mean(0) if intercept else y_NC.new_zeros(y_NC.shape[1])
        if intercept or standardize:
            self.shift_D = x_ND.mean(0)
        if standardize:
            constant_D = x_ND.amax(0) == x_ND.amin(0)  # their computed deviation is rounding, not scale
            self.scale_D = x_ND.std(0, correction=0).masked_fill(constant_D, 1.0)
        x_ND, y_NC = (x_ND - self.shift_D) / self.scale_D, y_NC - self.offset_C
        if n >= d:  # R = D
            eigenvalues_R, self.basis_DR = torch.linalg.eigh(x_ND.T @ x_ND)
            self.target_RC = self.basis_DR.T @ (x_ND.T @ y_NC)
        else:  # R = N: (X^T X + lambda)^-1 X^T = X^T (X X^T + lambda)^-1
            eigenvalues_R, vectors_NR = torch.linalg.eigh(x_ND @ x_ND.T)
            self.basis_DR = x_ND.T @ vectors_NR
            self.target_RC = vectors_NR.T @ y_NC
        self.eigenvalues_R = eigenvalues_R.clamp(min=0)  # rounding makes small ones negative

    def predict(self, x_MD: Tensor, penalties: list[float]) -> Iterator[Tensor]:
        """Yield the prediction [M, C] of each penalty (above 0)."""
        x_MR = ((x_MD - self.shift_D) / self.scale_D) @ self.basis_DR
        for penalty in penalties:
            yield x_MR @ (self.target_RC / (self.eigenvalues_R + penalty)[:, None]) + self.offset_C


def ridge_predictions(x_ND: Tensor, y_N: np.ndarray, x_MD: Tensor, args: ProbeArgs) -> Predictions:
    """Ridge on one-hot targets and the argmax (classes), or on the targets as they are (regression)."""
    classification = np.issubdtype(y_N.dtype, np.integer)
    # Only classes that occur: the all-zero column of another would win wherever all true ones are negative.
    classes_C, class_N = np.unique(y_N, return_inverse=True)
    y_NC = np.eye(len(classes_C))[class_N] if classification else y_N[:, None]
    path = RidgePath(x_ND, torch.from_numpy(y_NC).to(x_ND), args.intercept, args.standardize)
    penalties = args.penalties()
    for penalty, predicted_MC in zip(penalties, path.predict(x_MD, penalties), strict=True):
        if classification:
            yield {"lambda": penalty}, classes_C[predicted_MC.argmax(1).cpu().numpy()]
        else:
            yield {"lambda": penalty}, predicted_MC[:, 0].cpu().numpy()


def knn_predictions(x_ND: Tensor, y_N: np.ndarray, x_MD: Tensor, args: ProbeArgs) -> Predictions:
    """The majority among the k nearest (the lowest class of equals), or their mean target (regression).

    A ``k`` above the number of training rows has no answer and is left out of the grid.
    """
    ks = [k for k in sorted(set(args.neighbours)) if k <= len(x_ND)]
    if not ks:
        raise UserError(f"probe.neighbours={args.neighbours}: none is within the {len(x_ND)} training rows")
    for distance in args.distances:
        nearest_MK = y_N[nearest(x_ND, x_MD, ks[-1], distance).cpu().numpy()]
        for k in ks:
            if np.issubdtype(y_N.dtype, np.integer):
                # Votes are counted one class at a time against the best so far: no [M, classes] table.
                best_M, votes_M = (
                    np.zeros(len(nearest_MK), dtype=y_N.dtype),
                    np.zeros(len(nearest_MK), dtype=int),
                )
                for label in np.unique(nearest_MK[:, :k]):
                    count_M = (nearest_MK[:, :k] == label).sum(1)
                    best_M, votes_M = np.where(count_M > votes_M, label, best_M), np.maximum(count_M, votes_M)
                yield {"k": k, "distance": distance}, best_M
            else:
                yield {"k": k, "distance": distance}, nearest_MK[:, :k].mean(1)


def nearest(x_ND: Tensor, x_MD: Tensor, k: int, distance: str, chunk_numbers: int = 1 << 20) -> Tensor:
    """Indices [M, k] of the nearest of ``x_ND`` for each row of ``x_MD``, nearest first, lower index on ties.

    ``distance`` is ``l2`` or ``cosine``; a zero vector is at cosine distance 1 from all, as in scikit-learn.
    At most ``chunk_numbers`` distances (and at least one row of them) are in memory at a time.
    """
    if distance == "cosine":
        x_ND, x_MD = (x / x.norm(dim=1, keepdim=True).clamp(min=1e-300) for x in (x_ND, x_MD))
        norms_N = x_ND.new_zeros(len(x_ND))
    else:
        center_D = x_ND.mean(0)  # leaves distances as they are, and keeps |a|^2 - 2ab small
        x_ND, x_MD = x_ND - center_D, x_MD - center_D
        norms_N = x_ND.square().sum(1)
    found = []
    for chunk_BD in x_MD.split(max(1, chunk_numbers // len(x_ND))):
        far_BN = torch.addmm(norms_N[None], chunk_BD, x_ND.T, alpha=-2.0)  # |a - b|^2 less the constant |b|^2
        value_BK, index_BK = far_BN.topk(k, largest=False)
        # topk breaks ties as it likes. Where they cross k, take all that are nearer and the first of the tied.
        kth_B1 = value_BK.amax(1, keepdim=True)
        crossing_B = (far_BN <= kth_B1).sum(1) > k
        if crossing_B.any():
            far, kth = far_BN[crossing_B], kth_B1[crossing_B]
            rank_N = torch.arange(len(x_ND), device=far.device)
            rank = torch.where(far == kth, rank_N, torch.where(far < kth, -1, len(x_ND)))
            index_BK[crossing_B] = rank.topk(k, largest=False).indices
        index_BK = index_BK.sort(1).values  # then by distance, equal distances staying in this order
        index_BK = index_BK.gather(1, far_BN.gather(1, index_BK).sort(dim=1, stable=True).indices)
        found.append(index_BK)
    return torch.cat(found)


PROBES: dict[str, Callable[[Tensor, np.ndarray, Tensor, ProbeArgs], Predictions]] = {
    "ridge": ridge_predictions,
    "knn": knn_predictions,
}
