"""Which rows a sample of labelled data takes: seeded, nested, and whole groups (the words of a sentence) at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingua.errors import UserError
from lingua.hashing import permutation


def whole_groups(sizes: Sequence[int], most: int, seed: int) -> np.ndarray:
    """Numbers, ascending, of the groups that stand first in a seeded order, up to the first that would pass ``most``.

    Args:
        sizes: rows of each group.
        most: rows in all; -1 takes every group. At least one group is taken.
    """
    if most == -1:
        return np.arange(len(sizes))
    order = permutation(len(sizes), seed)
    within = np.cumsum(np.asarray(sizes)[order]) <= most
    return np.sort(order[: max(1, int(within.sum()))])


def sample_rows(groups_N: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Indices, ascending, of at most ``most`` rows, as :func:`whole_groups` takes them."""
    _, group_N, sizes = np.unique(groups_N, return_inverse=True, return_counts=True)
    return np.flatnonzero(np.isin(group_N, whole_groups(sizes, most, seed)))


def sample_sizes(most: int, count: int) -> list[int]:
    """``count`` sizes log-spaced from 1 to ``most``, rounded, without repeats; ``[most]`` for a count of 1."""
    return np.unique(np.geomspace(1, most, count).round().astype(int)).tolist() if count > 1 else [most]


def held_out(groups_N: np.ndarray, fraction: float, seed: int, classes_N: np.ndarray | None = None) -> np.ndarray:
    """Boolean mask of the training rows to hold out: whole groups, at least one and not all of them.

    Args:
        classes_N: numbers of classes, of which none is held out whole: groups that would do so are passed over for the
            next ones by lot, and if there are too few of these, less is held out.
    """
    names, group_N = np.unique(groups_N, return_inverse=True)
    if len(names) < 2:
        raise UserError(
            f"{len(names)} training row or sentence: the honest score holds some out, so it takes at least 2"
        )
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    order = permutation(len(names), seed)
    if classes_N is not None:
        order = _sparing(order, group_N, classes_N, count)
    return np.isin(group_N, order[:count])


def _sparing(order: np.ndarray, group_N: np.ndarray, classes_N: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` groups that leave a group of each of their classes; the first of all if none does."""
    width = int(classes_N.max()) + 1
    group_P, class_P = np.divmod(np.unique(group_N * width + classes_N), width)  # each class of a group once
    bounds = np.searchsorted(group_P, np.arange(len(order) + 1))
    left = np.bincount(class_P)  # groups of each class that are not held out
    taken: list[int] = []
    for group in order:
        if len(taken) == count:
            break
        own = class_P[bounds[group] : bounds[group + 1]]
        if (left[own] > 1).all():
            left[own] -= 1
            taken.append(group)
    return np.array(taken or order[:1])
