"""Starting the ranks of a run, by srun or as processes of this machine, and saying which of them failed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit import JobEnvironment

from lingua.stool import records

# "srun: error: n1: task 3: Killed", "srun: error: n0: tasks 0-1: Exited with exit code 2"
SRUN_FAILURE = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
LAUNCH_FAILED = "launch failed: "  # srun: error: task 0 launch failed: Slurmd could not connect IO
FOLLOWER = "stopping, because of"  # lingua.watchdog, on a rank that ends because of another
POLL_S = 0.5


class Ranks:
    """The running training processes of one start.

    Args:
        command: of one rank.
        launch: what the run was launched with.
        logs: folder for a file of output for each rank.
    """

    def __init__(self, command: list[str], launch: dict[str, Any], logs: Path) -> None:
        self.args, self.logs = launch["args"], logs
        self.on_slurm = self.args["launcher"] == "slurm"
        logs.mkdir(parents=True, exist_ok=True)
        variables = dict(os.environ)
        if self.args["cpus"]:
            variables.setdefault("OMP_NUM_THREADS", str(self.args["cpus"]))
        # This process runs on the node of rank 0, so that a port that is free here is free there.
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        if self.on_slurm:
            variables["MASTER_ADDR"] = JobEnvironment().hostnames[0]
            with (logs / "srun.log").open("ab") as file:
                self.processes = [subprocess.Popen([*self._srun(), *command], env=variables, stderr=file)]
        else:
            self.processes = self._local(command, variables)

    def _srun(self) -> list[str]:
        # Without --kill-on-bad-exit: a rank that has saved and exits by its signal must not end one that still writes.
        words = ["srun", "--kill-on-bad-exit=0", f"--wait={self.args['straggler_s']}", "--unbuffered"]
        words += ["--open-mode=append", f"--output={self.logs}/rank_%5t.out"]
        if self.args["cpus"]:
            words.append(f"--cpus-per-task={self.args['cpus']}")
        return words + self.args["srun"]

    def _local(self, command: list[str], variables: dict[str, str]) -> list[subprocess.Popen]:
        world = self.args["tasks_per_node"] or max(1, self.args["ngpu"])
        processes = []
        for rank in range(world):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            with rank_log(self.logs, rank).open("ab") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=variables | {key: str(value) for key, value in own.items()},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        return processes

    def signal(self, signum: int) -> None:
        """Pass a signal on. Under SLURM the ranks have got theirs from the scheduler."""
        if not self.on_slurm:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signum)

    def wait(self, poll: Callable[[], None]) -> int:
        """Exit status of the whole: 0, or that of the first rank that ended badly (128 + a signal's number).

        ``poll`` is called every moment.
        """
        deadline = None
        first_bad = 0
        while any(process.poll() is None for process in self.processes):
            ended = [p.returncode for p in self.processes if p.returncode is not None]
            if ended and not first_bad:
                first_bad = next(filter(None, ended), 0)
            if ended and deadline is None:
                deadline = time.monotonic() + self.args["straggler_s"]
            if deadline is not None and time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            poll()
            time.sleep(POLL_S)
        code = first_bad or next(filter(None, (p.returncode for p in self.processes)), 0)
        if code == 0 and any(LAUNCH_FAILED in line for line in records.tail(self.logs / "srun.log")):
            return 1  # srun says 0 where a rank was never started
        return 128 - code if code < 0 else code

    def failure(self, code: int) -> dict[str, Any] | None:
        """Which rank ended badly first, where, how, and the last line it printed."""
        if code == 0:
            return None
        ended = self._ended_badly()
        if not ended:
            line = records.last_line(self.logs / "srun.log")
            return {"rank": None, "node": None, "cause": f"exit status {code}", "line": line}
        for found in ended:
            found["line"] = records.last_line(rank_log(self.logs, found["rank"]))
        # The others end because of the first, and not always after it: a signal says more than an exit status, and
        # a follower names whom it follows.
        return min(ended, key=lambda found: (found["cause"].lower().startswith("exit"), FOLLOWER in found["line"]))

    def _ended_badly(self) -> list[dict[str, Any]]:
        if not self.on_slurm:
            codes = {rank: process.returncode for rank, process in enumerate(self.processes)}
            causes = {r: signal.Signals(-c).name if c < 0 else f"exit status {c}" for r, c in codes.items() if c}
            return [{"rank": r, "node": socket.gethostname(), "cause": cause} for r, cause in causes.items()]
        return [
            {"rank": rank, "node": found[1], "cause": found[3]}
            for found in filter(None, map(SRUN_FAILURE.search, records.tail(self.logs / "srun.log")))
            for rank in _numbers(found[2])
        ]


def _numbers(text: str) -> list[int]:
    """``0-2,5`` as numbers."""
    ends = [part.split("-") for part in text.split(",")]
    return [number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)]


def rank_log(logs: Path, rank: int) -> Path:
    """What one rank printed."""
    return logs / f"rank_{rank:05d}.out"


def script_command(launch: dict[str, Any], words: list[str]) -> list[str]:
    """The command line of a script in the snapshot's Python."""
    return [*shlex.split(launch["args"]["python"] or shlex.quote(sys.executable)), "-u", "-m", *words]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
