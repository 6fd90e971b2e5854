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


def held_out(groups_N: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Boolean mask of the training rows to hold out: whole groups, at least one and not all of them."""
    names, group_N = np.unique(groups_N, return_inverse=True)
    if len(names) < 2:
        raise UserError(
            f"{len(names)} training row or sentence: the honest score holds some out, so it takes at least 2"
        )
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    return np.isin(group_N, permutation(len(names), seed)[:count])
