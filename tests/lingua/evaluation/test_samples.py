"""Samples are seeded, nested, and of whole groups."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

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


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_no_class_is_held_out_whole(fraction: float) -> None:
    """As in scikit-learn's stratified splits, training keeps every class."""
    classes = np.repeat([0, 1, 2, 3], [60, 30, 5, 2])
    for seed in range(40):
        held = held_out(np.arange(97), fraction, seed, classes)
        size = round(fraction * 97)
        kept, _ = train_test_split(classes, test_size=size, random_state=seed, stratify=classes)
        assert (set(classes[~held]), held.sum()) == (set(kept), size)
        plain = held_out(np.arange(97), fraction, seed)
        if set(classes[~plain]) == set(classes):  # then the lot decides alone
            assert (held == plain).all()


def test_a_class_of_one_row_or_sentence_is_trained_on() -> None:
    words = np.repeat(np.arange(10), 3)
    tags = np.tile([0, 0, 1], 10)
    for rare in range(10):
        tags_N = np.where((words == rare) & (tags == 1), 2, tags)
        assert all(set(tags_N[~held_out(words, 0.5, seed, tags_N)]) == {0, 1, 2} for seed in range(10))
    assert held_out(np.arange(3), 0.5, 0, np.arange(3)).sum() == 1  # nothing can be spared, and something has to be
