import os
import signal

import pytest

from lingua.errors import UserError
from lingua.preparation.workers import run_in_order


def slow_first(base, item):
    if item == 0:
        signal.sigtimedwait([], 0.3)
    return base**item, os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers):
    """Though the first takes longest."""
    results = list(run_in_order(slow_first, int, (2,), iter(range(20)), workers))
    assert [value for value, _ in results] == [2**i for i in range(20)]
    pids = {pid for _, pid in results}
    assert pids == {os.getpid()} if workers == 1 else (len(pids) == 2 and os.getpid() not in pids)


def test_items_are_taken_only_a_few_ahead():
    """So that reading does not run away from tokenizing."""
    taken = []

    def items():
        for i in range(50):
            taken.append(i)
            yield i

    results = run_in_order(slow_first, int, (2,), items(), 2)
    next(results)
    assert len(taken) <= 6
    results.close()


def test_an_error_in_a_worker_is_that_error():
    with pytest.raises(UserError, match="item 3"):
        list(run_in_order(fails_at, int, (3,), range(9), 2))


def fails_at(bad, item):
    if item == bad:
        raise UserError(f"item {item}")
    return item
