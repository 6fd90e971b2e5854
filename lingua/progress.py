"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 30.0  # between plain lines


class Progress:
    """Counts units of work and, beside them, anything whose rate is worth showing.

    Args:
        title: what is going on.
        total: units in all, None if unknown.
        rate: name of the things counted by ``advance(count=...)``, shown per second.
        stream: where to write; standard error if None.
    """

    def __init__(self, title: str, total: int | None, rate: str, stream: Any = None) -> None:
        self.title, self.total, self.rate = title, total, rate
        self._stream = sys.stderr if stream is None else stream
        self._done = self._count = 0
        self._begun = self._said = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(file=self._stream))
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
        print(self._line(), file=self._stream, flush=True)

    def advance(self, units: int, count: int = 0) -> None:
        self._done += units
        self._count += count
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=f"{self.title} {self._speed()}")
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(self._line(), file=self._stream, flush=True)

    def _speed(self) -> str:
        return f"{self._count / max(time.monotonic() - self._begun, 1e-9):,.0f} {self.rate}/s"

    def _line(self) -> str:
        share = f"{100 * self._done / self.total:.0f} %, " if self.total else ""
        seconds = time.monotonic() - self._begun
        return f"{self.title}: {share}{self._count:,} {self.rate}, {self._speed()}, {seconds:.0f} s"
