"""Samples are seeded, nested, and of whole groups."""

from __future__ import annotations

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.evaluation.samples import held_out, sample_rows, sample_sizes, whole_groups


def test_sizes_are_log_spaced() -> None:
    assert sample_sizes(10_000, 5) == [1, 10, 100, 1000, 10_000]
    assert sample_sizes(10_000, 1) == [10_000]
    assert sample_sizes(4, 9) == [1, 2, 3, 4]


def test_rows_are_nested_seeded_and_ascending() -> None:
    groups = np.arange(1000)
    small, large = (sample_rows(groups, most, 7) for most in (10, 100))
    assert (len(small), len(large)) == (10, 100)
    assert set(small) < set(large)
    assert (np.diff(large) > 0).all()
    assert set(small) != set(sample_rows(groups, 10, 8))
    assert sample_rows(groups, 5000, 7).tolist() == groups.tolist()


def test_groups_stay_whole() -> None:
    groups = np.repeat([4, 2, 9, 7], [3, 5, 2, 4])
    rows = sample_rows(groups, 7, 0)
    assert 0 < len(rows) <= 7
    for name in set(groups[rows]):
        assert (groups[rows] == name).sum() == (groups == name).sum()
    assert len(sample_rows(groups, 1, 0)) >= 2  # at least one group
    assert whole_groups([3, 5], -1, 0).tolist() == [0, 1]


def test_held_out_takes_whole_groups_and_leaves_some() -> None:
    groups = np.repeat(np.arange(10), 7)
    held = held_out(groups, 0.2, seed=0)
    assert held.sum() == 14
    assert len(set(groups[held]) & set(groups[~held])) == 0
    assert held_out(np.array([4, 9]), 0.99, seed=0).sum() == 1
    assert (held_out(groups, 0.2, seed=0) == held).all()
    assert (held_out(groups, 0.2, seed=1) != held).any()
    with pytest.raises(UserError, match="at least 2"):
        held_out(np.array([3, 3]), 0.2, seed=0)
