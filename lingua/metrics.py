"""Metrics of a run: ``metrics.jsonl``, TensorBoard, and what a person sees while it runs."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any, TextIO

from lingua.errors import UserError

log = logging.getLogger(__name__)


class _Console(logging.StreamHandler):
    """Writes to what ``sys.stdout`` is at the moment: under a progress bar, lines then go above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def start_logging(folder: Path, rank: int = 0) -> None:
    """Send log records to ``folder/train.log`` (appended) and to the console; other ranks' to ``folder/logs``."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    path = folder / "train.log"
    if rank:
        path = folder / "logs" / f"rank_{rank:05d}.log"
        path.parent.mkdir(exist_ok=True)
    else:
        console = _Console()
        console.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(console)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root.addHandler(file)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a ``metrics.jsonl``; numbers that were not finite are None. A last line cut off by a kill is
    left out.

    Raises:
        UserError: another line is not JSON, or not a record with a ``step``.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            if number == len(lines):  # no newline behind it: the write was cut off
                break
            raise UserError(f"{path}, line {number}: not a JSON record: {_start(line)}") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f'{path}, line {number}: expected a record such as {{"step": 10, ...}}: {_start(line)}')
        records.append(record)
    return records


def _start(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace"))


def _line(record: dict[str, Any]) -> str:
    """A record as JSON, which has no NaN and no infinity: null stands for them."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class Metrics:
    """Appends records to ``metrics.jsonl`` and TensorBoard.

    Args:
        folder: run folder.
        step: step the run resumes from: later records, left by a run that was killed, are removed.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        path = folder / "metrics.jsonl"
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(map(_line, kept)))
        partial.replace(path)
        self._file = path.open("a")
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(folder / "tb", purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; ``step`` is required. A number that is not finite is written as null."""
        self._file.write(_line(record))
        self._file.flush()
        if self._tensorboard:
            for key, value in record.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(key, value, record["step"])

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


class Console:
    """A progress bar on a terminal, a plain line a record otherwise."""

    def __init__(self, name: str, steps: int, done: int) -> None:
        self.steps, self._progress = steps, None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),  # all fits into 80 characters
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, TextColumn("{task.fields[said]}"))
            self._progress.start()
            self._task = self._progress.add_task(name, total=steps, completed=done, said="")

    def step(self, step: int) -> None:
        """Move the bar."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def say(self, record: dict[str, Any]) -> None:
        """Show a record's main figures."""
        said = (
            f"loss {record['loss']:.4f}  grad {record['grad_norm']:.2f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if "data_tokens_per_second" in record:
            said += f" ({record['data_tokens_per_second']:,.0f} of text)"
        if record["skipped_steps"]:
            said += f"  {record['skipped_steps']} non-finite steps skipped"
        if self._progress:
            short = f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tokens/s"
            self._progress.update(self._task, said=short)
            log_file_only(f"step {record['step']}/{self.steps}  {said}")
        else:
            log.info("step %d/%d  %s", record["step"], self.steps, said)

    def close(self) -> None:
        """Leave the bar where it is."""
        if self._progress:
            self._progress.stop()


def log_file_only(message: str) -> None:
    """Write to ``train.log`` without disturbing the bar."""
    record = log.makeRecord(log.name, logging.INFO, __file__, 0, message, (), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
