"""Signals that ask a run to stop: agreed on by all ranks, at an optimizer step, with everything saved."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from types import FrameType

import torch
import torch.distributed as dist

from lingua.distributed import World

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Interrupt:
    """Catches signals from ``open`` to ``close``.

    A signal may reach one rank only, at any moment. Every step, the hosts agree on the latest one by a small
    collective on the CPU that runs beside the step, so no device is ever waited for.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._caught = 0
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        self.agreed: signal.Signals | None = None  # what every rank knows of

    def open(self) -> None:
        """Begin to catch."""
        self._old_handlers = {signum: signal.signal(signum, self._catch) for signum in SIGNALS}

    def close(self) -> None:
        """Give the signals back to who had them before."""
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        if self._caught and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._caught = signum
        name = signal.Signals(signum).name
        log.info("%s: saving after this step, then stopping (Ctrl-C again stops at once)", name)

    def begin_vote(self) -> None:
        """Ask all ranks, at the beginning of a step, whether one of them has caught a signal."""
        if self._world.size > 1:
            caught = torch.tensor([self._caught])
            work = dist.all_reduce(caught, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
            self._vote = (caught, work)

    def end_vote(self) -> None:
        """Take the answer, at the end of the step. Alone, a signal counts at once."""
        caught = self._caught
        if self._vote is not None:
            tensor, work = self._vote
            work.wait()
            caught, self._vote = int(tensor), None
        if caught and self.agreed is None:
            self.agreed = signal.Signals(caught)


def requeue() -> None:
    """Ask SLURM to start this job again. A scheduler that refuses is named in the log; the run is saved anyhow."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        log.warning("distributed.requeue: not below SLURM, so nothing is requeued")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        said = (done.stderr or done.stdout).strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    log.warning("job %s could not be requeued: %s", job, said) if said else log.info("job %s is requeued", job)
