"""Questions to SLURM and orders to it, each bounded in time."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterable

from submitit.slurm.slurm import read_job_id

TIMEOUT_S = 10.0
# What it calls a job that is there and may run.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_FED")
ACTIVE = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING", "PREEMPTED")


class SchedulerError(Exception):
    """The scheduler is not installed, does not answer, or refuses; the message is its own."""


def call(command: list[str]) -> str:
    """Run a SLURM client and return what it printed.

    Raises:
        SchedulerError: not found, no answer in time, or a non-zero exit status.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SchedulerError(f"{command[0]} not found") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{' '.join(command)}: no answer in {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise SchedulerError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout


def states(jobs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """``(state, reason)`` of each job that the scheduler knows, such as ``("PENDING", "Resources")``.

    ``squeue`` is asked first: it has jobs that ended in the last minutes, too, and the reason of those that wait.
    The others are looked up in the accounting, where there is one.

    Raises:
        SchedulerError: neither answers.
    """
    wanted, found, failures = set(jobs), {}, []
    if not wanted:
        return found
    # All of the user's jobs: asked by number, a number that has gone is an error.
    command = ["squeue", "-r", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%T|%r"]
    try:
        for line in call(command).splitlines():
            job, state, reason = line.split("|", 2)
            if job in wanted:
                found[job] = (state, "" if reason == "None" else reason)
    except SchedulerError as error:
        failures.append(str(error))
    left = wanted - found.keys()
    if left:
        numbers = sorted({job.split("_")[0] for job in left})
        try:
            for line in call(["sacct", "-X", "-P", "-n", "-o", "JobID,State", "-j", ",".join(numbers)]).splitlines():
                ids, state = line.split("|", 1)
                for job in _expand(ids):
                    if job in left:
                        found[job] = (state.split()[0], "")  # "CANCELLED by 1000"
        except SchedulerError as error:
            failures.append(str(error))
    if len(failures) == 2:
        raise SchedulerError("; ".join(failures))
    return found


def _expand(ids: str) -> list[str]:
    """``17_[0-2,5%2]`` as the jobs it stands for."""
    jobs = []
    for main, *numbers in read_job_id(ids):
        if not numbers:
            jobs.append(main)
        else:
            jobs += [f"{main}_{i}" for i in range(int(numbers[0]), int(numbers[-1]) + 1)]
    return jobs


def requeue(job: str, tries: int = 5, wait_s: float = 10.0) -> None:
    """Put a running job back into the queue; a controller that is away for a moment is asked again.

    Raises:
        SchedulerError: refused, or no answer at any try.
    """
    for attempt in range(tries):
        try:
            call(["scontrol", "requeue", job])
            return
        except SchedulerError:
            if attempt == tries - 1:
                raise
            time.sleep(wait_s)


def job_state(job: str) -> str | None:
    """State of a job by ``scontrol``, such as RUNNING; None if it cannot be asked."""
    try:
        words = call(["scontrol", "-o", "show", "job", job]).split()
    except SchedulerError:
        return None
    return next((word.removeprefix("JobState=") for word in words if word.startswith("JobState=")), None)


def cancel(jobs: list[str]) -> None:
    """``scancel``. Raises SchedulerError."""
    call(["scancel", *jobs])


def alive(pid: int, host: str) -> bool | None:
    """Whether a local job's process runs; None if it is on another machine."""
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
