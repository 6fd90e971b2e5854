"""Writing checkpoints: asynchronously, one at a time, and nothing of one that fails."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from lingua.checkpoint import STATE_VERSION, Optimizers, remove_old
from lingua.errors import UserError
from lingua.storage import Writer, remove_folder, storage_failure

log = logging.getLogger(__name__)


@dataclass
class DumpArgs:
    """When checkpoints are written and how many stay."""

    every: int = 1000  # steps between checkpoints; the last step always has one
    keep: int = -1  # newest checkpoints to keep; -1 keeps all
    keep_every: int = 0  # keep those at multiples of this many steps for good; 0: none

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"checkpoint.dump.every={self.every}: expected at least 1")
        if self.keep == 0 or self.keep < -1:
            raise UserError(f"checkpoint.dump.keep={self.keep}: expected -1 (all) or at least 1")
        if self.keep_every < 0:
            raise UserError(f"checkpoint.dump.keep_every={self.keep_every}: expected 0 (none) or a number of steps")


@dataclass
class CheckpointArgs:
    """Checkpointing."""

    dump: DumpArgs = field(default_factory=DumpArgs)
    path: str | None = None  # where checkpoints go, anywhere fsspec reaches (s3://...); none: dump_dir/checkpoints
    asynchronous: bool = True  # copy to CPU memory, then write beside the training; at most one at a time


class Checkpointer:
    """Writes the checkpoints of one run; see :mod:`lingua.storage` for what is on the disk.

    Args:
        root: folder of the checkpoints.
        group: process group of its own (collectives of a save in the background would mix with the training's);
            None alone.
        completed: called on the first rank, from the thread that writes, with each checkpoint that is whole.
    """

    def __init__(
        self,
        root: Path,
        args: CheckpointArgs,
        group: dist.ProcessGroup | None = None,
        completed: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.root, self.args, self._group, self._on_complete = root, args, group, completed
        self._pending: tuple[Path, Future] | None = None
        self.seconds = 0.0  # that the training has waited for it
        # Keeps its buffers from save to save; on a GPU they are pinned.
        self._stager = DefaultStager(StagingOptions(torch.cuda.is_available(), False, False, False))

    def save(self, step: int, model: nn.Module, optimizer: Optimizers, state: dict[str, Any], config_yaml: str) -> None:
        """Begin to write the checkpoint of ``step``; it counts only once ``COMPLETE`` is there.

        Raises:
            UserError: this save, or the one before it, could not be written. What was written of it is removed;
                earlier checkpoints are untouched.
        """
        self.wait()
        with self._waiting():
            folder = self.root / f"{step:010d}"
            texts = {
                "state.json": json.dumps({"version": STATE_VERSION, **state}, indent=1),
                "config.yaml": config_yaml,
            }
            options = {
                "storage_writer": Writer(folder, texts, lambda: self._completed(folder)),
                "process_group": self._group,
                "no_dist": self._group is None,
            }
            model_state, optimizer_state = get_state_dict(model, optimizer)
            tensors = {"model": model_state, "optimizer": optimizer_state}
            if self.args.asynchronous:
                future = dcp.async_save(tensors, async_stager=self._stager, **options)
            else:
                future = _run(lambda: dcp.save(tensors, **options))
        self._pending = (folder, future)
        if not self.args.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises UserError if it could not be."""
        if self._pending is None:
            return
        folder, future = self._pending
        with self._waiting():
            # Nothing of BaseException is caught by concurrent.futures' own result() on the way.
            error = future.exception()
        self._pending = None
        if error is None:
            return
        cause = _write_failure(folder, error)
        if cause is None:
            raise error
        if self._group is None or dist.get_rank() == 0:
            with contextlib.suppress(Exception):  # the disk is ill
                remove_folder(folder)
        raise UserError(
            f"cannot write checkpoint {folder}: {cause}. Make room there, or give another dump_dir or checkpoint.path; "
            "earlier checkpoints are intact and the same command goes on from the newest"
        ) from error

    def check(self) -> None:
        """Raise UserError if a save that is over has failed; does not wait."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def take_seconds(self) -> float:
        """Seconds that the training has waited since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Let go of the buffers; does not wait."""
        if self._pending is None:
            self._stager.close()

    def _completed(self, folder: Path) -> None:
        try:
            remove_old(self.root, self.args.dump.keep, self.args.dump.keep_every, int(folder.name))
        except Exception as error:  # the new checkpoint is whole all the same
            log.warning("old checkpoints in %s could not be removed: %s", self.root, error)
        self._on_complete(folder)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def _run(function: Callable[[], Any]) -> Future:
    """The outcome of a call, as a future."""
    future: Future = Future()
    try:
        future.set_result(function())
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        future.set_exception(error)
    return future


def save(folder: Path, model: nn.Module, optimizer: Optimizers, state: dict[str, Any], config_yaml: str) -> None:
    """Write one checkpoint ``folder`` from this process alone, and wait for it."""
    writer = Checkpointer(folder.parent, CheckpointArgs(asynchronous=False))
    writer.save(int(folder.name), model, optimizer, state, config_yaml)


def _write_failure(folder: Path, error: BaseException) -> str | None:
    """What the disk had against it, if that is what ``error`` is about; DCP wraps the errors of each rank."""
    if isinstance(error, CheckpointException):
        causes = (_write_failure(folder, failure) for failure, _ in error.failures.values())
        return next(filter(None, causes), None)
    return storage_failure(folder, error)
