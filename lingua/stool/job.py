"""What runs on the first node of a job: it starts the ranks, waits, writes down how they ended, and requeues.

Training itself never talks to the scheduler: it saves and exits with 128 + the signal's number, and whether the job
goes on is decided here.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from submitit import JobEnvironment

from lingua.stool import evaluation, records, scheduler, sweep
from lingua.stool.ranks import Ranks, script_command

USER_ERROR = 2  # exit status of lingua.args.cli
# What training exits with once it has saved, and dies of before it has begun to catch signals.
STOPPED = {128 + signum: signum.name for signum in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)}

# What SLURM writes into this process's log when it ends it: "*** JOB 3 ON n0 CANCELLED AT 2026-01-31T12:00:00 DUE TO
# TIME LIMIT ***"; after scancel no cause is given.
ENDING = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE TO ([A-Z ]+) )?\*\*\*")


def decide(code: int, restart: int, args: dict[str, Any], cancelled: bool) -> tuple[str, str]:
    """State of a run whose ranks have ended, and why.

    Args:
        code: exit status of the ranks.
        restart: how often this job has started again.
        cancelled: whether somebody asked for its end.
    """
    if code == 0:
        return records.FINISHED, "finished"
    if code in STOPPED:
        reason = f"stopped by {STOPPED[code]}"
        if cancelled or code == 128 + signal.SIGINT:
            return records.CANCELLED, reason
    else:
        reason = "user error" if code == USER_ERROR else f"exit status {code}"
        if code > 128:
            reason = f"killed by signal {code - 128}"
        if cancelled:
            return records.CANCELLED, reason
        if code == USER_ERROR or not args["requeue_on_crash"]:
            return records.FAILED, reason
    if restart >= args["max_restarts"]:
        return records.FAILED, f"{reason}; no restart left of max_restarts={args['max_restarts']}"
    return records.REQUEUED, reason


class Job:
    """One job of one run.

    Args:
        run: folder of the run, with ``stool/launch.json``.
        job: its number.
    """

    def __init__(self, run: Path, job: str) -> None:
        self.run, self.job = run, job
        self.launch = records.read_launch(run)
        self.args = self.launch["args"]
        self.on_slurm = self.args["launcher"] == "slurm"
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", 0)) if self.on_slurm else 0
        self.ranks: Ranks | None = None
        self._early: int | None = None  # signal that came before there were ranks
        # Where in this process's log this start begins.
        self._log_start = JobEnvironment().paths.stdout.stat().st_size if self.on_slurm else 0

    def __call__(self) -> int:
        """Run to the end of this job, or of this start of it; returns the exit status."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(signum, self._on_signal)
        os.chdir(self.launch["cwd"])
        while True:
            state, code = self._one_start()
            if state != records.REQUEUED:
                return code
            if self.on_slurm:
                return code  # the scheduler ends and starts this process
            self.restart += 1

    def _one_start(self) -> tuple[str, int]:
        logs = records.home(self.run) / "logs" / f"{self.job}_{self.restart}"
        nodes = JobEnvironment().hostnames if self.on_slurm else [socket.gethostname()]
        records.append(
            self.run, "start", job=self.job, restart=self.restart, host=socket.gethostname(), pid=os.getpid(),
            nodes=list(nodes), logs=str(logs),
        )  # fmt: skip
        if records.was_cancelled(self.run, self.job):
            return self._end(records.CANCELLED, 128 + signal.SIGTERM, "cancelled before it started", None)
        if self.restart > self.args["max_restarts"]:
            return self._end(records.FAILED, 1, f"no restart left of max_restarts={self.args['max_restarts']}", None)
        words = [self.args["script"], f"config={records.home(self.run)}/config.yaml", *self.launch["words"]]
        self.ranks = Ranks(script_command(self.launch, words), self.launch, logs)
        if self._early is not None:
            self.ranks.signal(self._early)
        code = self.ranks.wait(self._serve)
        self._serve()
        state, reason = decide(code, self.restart, self.args, records.was_cancelled(self.run, self.job))
        failure = self.ranks.failure(code) if code not in STOPPED else None
        ending = self._ending() if state == records.REQUEUED and self.on_slurm else None
        if ending == "CANCELLED":
            state = records.CANCELLED  # by scancel: to requeue it would bring it back
        self._end(state, code, f"{reason}; {ending}" if ending else reason, failure)  # requeueing ends this process
        if state == records.REQUEUED and self.on_slurm and ending != "JOB REQUEUE":
            try:
                scheduler.requeue(self.job, tries=1 if ending else 5)
            except scheduler.SchedulerError as error:
                if ending != "PREEMPTION":  # after which the scheduler may requeue by itself
                    return self._end(records.FAILED, code, f"{reason}; could not be requeued: {error}", failure)
        return state, code

    def _ending(self) -> str | None:
        """Why the scheduler is ending this start of the job, such as TIME LIMIT or CANCELLED; None if it is not.

        Its state is COMPLETING then, whatever the cause, which only the message of SLURM's own process tells.
        """
        state = scheduler.job_state(self.job)
        if state == "RUNNING":
            return None
        with JobEnvironment().paths.stdout.open("rb") as file:
            file.seek(self._log_start)
            found = ENDING.search(file.read().decode("utf-8", "replace"))
        if found:
            return found[1] or "CANCELLED"
        return None if state is None else "CANCELLED"

    def _serve(self) -> None:
        """Launch the evaluations that training has asked for."""
        if self.args["eval"]["script"]:
            evaluation.serve(self.run, self.launch)

    def _end(self, state: str, code: int, reason: str, failure: dict[str, Any] | None) -> tuple[str, int]:
        records.append(
            self.run, "end", job=self.job, restart=self.restart, state=state, exit=code, reason=reason,
            failure=failure,
        )  # fmt: skip
        print(f"{self.run}: {state.lower()}: {reason}", flush=True)
        if self.launch["sweep"]:
            sweep.refresh(Path(self.launch["sweep"]))
        return state, code

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self.ranks is None:
            self._early = signum
        else:
            self.ranks.signal(signum)


def run_job(run: str) -> None:
    """What submitit calls in a SLURM job."""
    code = Job(Path(run), JobEnvironment().job_id)()
    if code:
        raise SystemExit(code)  # no result for submitit, and the job's state says the number


def local_job(pid: int, number: int) -> str:
    """Number of a job in the background of this machine."""
    return f"local{pid}_{number}"


def run_queue(max_parallel: int, folders: list[str]) -> None:
    """Run folders one after another, ``max_parallel`` of them at the same time, each in a process of its own."""
    running: list[subprocess.Popen] = []
    waiting = list(enumerate(folders))
    while waiting or running:
        while waiting and len(running) < max_parallel:
            number, folder = waiting.pop(0)
            command = [sys.executable, "-u", "-m", "lingua.stool.job", folder, local_job(os.getpid(), number)]
            running.append(subprocess.Popen(command))
        time.sleep(0.2)
        running = [process for process in running if process.poll() is None]


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        run_queue(int(sys.argv[1]), sys.argv[2:])
    else:
        raise SystemExit(Job(Path(sys.argv[1]), sys.argv[2])())
