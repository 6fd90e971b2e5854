"""Traces of chosen training steps: ``profiling.steps=[20] profiling.length=2``.

Each trace is a file of ``RUN/profile/``, ``step0000000020_rank0.json.gz``, for https://ui.perfetto.dev or
``chrome://tracing``; on CUDA a snapshot of memory goes beside it, ``step0000000020_rank0.pickle``, for
https://pytorch.org/memory_viz. Let compilation and warm-up pass first: steps are counted from the beginning of the
run, and the first ones of a process are slow.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lingua.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class ProfilingArgs:
    """torch.profiler traces of chosen steps; off unless steps are named."""

    steps: list[int] = field(default_factory=list)  # first step of each trace; empty: off
    length: int = 1  # steps in a trace
    memory: bool = True  # on CUDA also a snapshot of the memory allocator
    shapes: bool = False  # record the shapes of operators' inputs
    stacks: bool = False  # record where in the source operators were called (slow)
    all_ranks: bool = False  # a trace of every rank, not of rank 0 only

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"profiling.length={self.length}: expected at least 1")
        ordered = sorted(self.steps)
        if ordered and ordered[0] < 1:
            raise UserError(f"profiling.steps={self.steps}: steps count from 1")
        for one, other in itertools.pairwise(ordered):
            if other < one + self.length:
                raise UserError(
                    f"profiling.steps={self.steps} with profiling.length={self.length}: the traces from steps {one} "
                    f"and {other} overlap"
                )


class Profiler:
    """Profiles the chosen steps of a run.

    Args:
        folder: run folder; traces go to ``profile/`` in it.
        steps: optimizer steps of the whole run.
        rank: of this process.

    Raises:
        UserError: a trace that would end behind the run.
    """

    def __init__(self, args: ProfilingArgs, folder: Path, device: torch.device, steps: int, rank: int = 0) -> None:
        late = [step for step in args.steps if step + args.length - 1 > steps]
        if late:
            raise UserError(
                f"profiling.steps={late} with profiling.length={args.length}: the run ends with step {steps}"
            )
        self.args, self.folder, self.device, self.rank = args, folder / "profile", device, rank
        self._first = frozenset(args.steps) if rank == 0 or args.all_ranks else frozenset()
        self._profile: torch.profiler.profile | None = None
        self._start = 0  # first step of the trace being made

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """Context around a whole optimizer step."""
        if self._profile is None and step not in self._first:
            return contextlib.nullcontext()
        return self._profiled(step)

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        if self._profile is None:
            self._begin(step)
        try:
            with torch.profiler.record_function(f"step {step}"):
                yield
        except BaseException:
            self._end(write=False)
            raise
        if step == self._start + self.args.length - 1:
            self._end(write=True)

    def _begin(self, step: int) -> None:
        self._start = step
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self.args.memory:
                torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        self._profile = torch.profiler.profile(
            activities=activities, record_shapes=self.args.shapes, with_stack=self.args.stacks
        )
        self._profile.start()

    def _end(self, write: bool) -> None:
        """Stop, and unless the step failed, write what was seen."""
        profile, self._profile = self._profile, None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was launched belongs to the trace
        profile.stop()
        snapshot = self.device.type == "cuda" and self.args.memory
        path = self.folder / f"step{self._start:010d}_rank{self.rank}.json.gz"
        try:
            if write:
                self.folder.mkdir(exist_ok=True)
                partial = path.with_name("partial_" + path.name)  # torch compresses if the name ends in .gz
                profile.export_chrome_trace(str(partial))
                partial.replace(path)
                if snapshot:
                    torch.cuda.memory._dump_snapshot(str(path.with_name(path.name.replace(".json.gz", ".pickle"))))
                log.info("profile of steps %d to %d: %s", self._start, self._start + self.args.length - 1, path)
        except OSError as error:
            raise UserError(f"{path}: cannot write the profile: {error.strerror or error}") from None
        finally:
            if snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """End a trace that the run did not complete, without writing it."""
        if self._profile is not None:
            log.warning("the run ended before the trace that began with step %d: it is not written", self._start)
            self._end(write=False)
