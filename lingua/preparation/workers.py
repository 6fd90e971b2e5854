"""The same function over many items, in this process or in others, with results in the order of the items."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lingua.errors import UserError


def run_in_order(
    function: Callable[[Any, Any], Any], make_shared: Callable[..., Any], args: tuple, items: Iterable, workers: int
) -> Iterator[Any]:
    """Yield ``function(shared, item)`` for each item, a few items ahead; ``shared = make_shared(*args)`` is made
    once in each process. One worker is this process.

    Raises:
        UserError: a worker process died.
    """
    if workers == 1:
        shared = make_shared(*args)
        yield from (function(shared, item) for item in items)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(function, make_shared, args),
    )
    waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process died (killed, perhaps for want of memory); try fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_of_this_worker: tuple[Callable[[Any, Any], Any], Any]


def _start(function: Callable[[Any, Any], Any], make_shared: Callable[..., Any], args: tuple) -> None:
    global _of_this_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _of_this_worker = (function, make_shared(*args))


def _exit_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    function, shared = _of_this_worker
    return function(shared, item)
