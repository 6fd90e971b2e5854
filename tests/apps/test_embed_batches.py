"""Which rows and negatives a step takes, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from apps.embed.batches import Batches, held_out, spread_duplicates


def test_a_negative_that_a_row_lacks_is_never_drawn_while_it_has_others() -> None:
    """Rows with three, two, one and no negatives of three, of which two are drawn."""
    rows = np.array([[10 * row, 10 * row + 1] + [10 * row + 2 + k for k in range(3)] for row in range(4)], np.int32)
    for row, there in enumerate((3, 2, 1, 0)):
        rows[row, 2 + there :] = -1
    batches = Batches(SimpleNamespace(rows=rows, negatives=3), np.arange(4), 4, 2, False, seed=0)
    for step in range(1, 9):  # an epoch each, with a lot of its own
        for query, _, *drawn in batches.numbers(step).tolist():
            there = 3 - query // 10
            assert sum(number >= 0 for number in drawn) == min(2, there)
            assert len(set(drawn) - {-1}) == min(2, there)
            assert all(query + 2 <= number < query + 2 + there for number in drawn if number >= 0)


def test_rows_that_wait_keep_their_order() -> None:
    """The first three share a query, so that one goes into each batch."""
    rows = np.array([[0, 1], [0, 2], [0, 3], [4, 5], [6, 7], [8, 9]], np.int32)
    assert spread_duplicates(np.arange(6), rows, 2).tolist() == [0, 3, 1, 4, 2, 5]


def test_queries_are_held_out_by_lot_and_not_by_place() -> None:
    rows = np.stack((np.arange(1000), np.arange(1000, 2000)), axis=1).astype(np.int32)
    drawn = np.flatnonzero(held_out(rows, 200))
    assert len(drawn) == 200
    quarters = np.bincount(drawn // 250, minlength=4)
    assert quarters.min() > 25, quarters  # 50 each by chance, with a deviation of 5.5
    assert len(set(np.diff(drawn).tolist())) > 5  # and not every fifth
