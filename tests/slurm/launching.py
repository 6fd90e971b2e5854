"""What the tests on a cluster do again and again: launch a tiny run, wait for something, read what it left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lingua.metrics import read_metrics
from lingua.stool import records
from tests.slurm.cluster import Cluster
from tests.support import ROOT, deterministic, environment, tiny_words


class Launcher:
    """``python -m lingua.stool`` against the test cluster.

    Args:
        corpus: ``data.root_dir`` of the runs.
        folder: where they go.
    """

    def __init__(self, cluster: Cluster, corpus: Path, folder: Path) -> None:
        self.cluster, self.corpus, self.folder = cluster, corpus, folder
        self.environment = {**environment(), **cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def stool(self, *words: object, background: bool = False, **options: Any) -> Any:
        """One command: what it did, or with ``background`` its process."""
        command = [sys.executable, "-m", "lingua.stool", *map(str, words)]
        settings = {"cwd": ROOT, "env": self.environment, "text": True} | options
        if background:
            return subprocess.Popen(command, stdout=subprocess.PIPE, **settings)
        return subprocess.run(command, capture_output=True, timeout=120, **settings)

    def client_error(self, *command: str) -> str:
        """What one of SLURM's own commands says on its standard error."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60).stderr

    def words(self, name: str, *own: str, **changes: object) -> list[str]:
        """The words that launch a tiny CrossBERT in ``folder/name``: ``own`` for the launch, changes of its config."""
        run = self.folder / name
        script = [word for word in tiny_words("crossbert", self.corpus, run, **changes) if "dump_dir=" not in word]
        start = ["script=apps.crossbert.train", "ngpu=0", "time=30", "signal_s=60", f"dump_dir={run}", *own]
        return [*start, "--", *script, "distributed.timeout=60"]

    def launch(self, name: str, *own: str, **changes: object) -> Path:
        """Launch it and return its folder."""
        done = self.stool(*self.words(name, *own, **changes))
        assert done.returncode == 0, done.stderr
        return self.folder / name

    def state(self, run: Path) -> dict[str, Any]:
        """What ``status --json`` says of one run."""
        done = self.stool("status", "--json", run)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for_end(self, run: Path, seconds: float = 120) -> dict[str, Any]:
        """Wait until the run's records say that it has ended; returns their summary."""
        return wait(lambda: (s := records.summary(run))["state"] in records.ENDED and s, seconds, lambda: logs(run))

    def wait_for_step(self, run: Path, step: int, seconds: float = 120) -> None:
        """Wait until the run's metrics have come to ``step``."""
        wait(lambda: records.progress(run).get("step", 0) >= step, seconds, lambda: logs(run))

    def slurm_state(self, run: Path) -> str:
        """What the scheduler calls the run's job once it has settled."""
        job = records.summary(run)["job"]
        return wait(lambda: (s := self.cluster.job(job)["JobState"]) not in ("RUNNING", "COMPLETING") and s, 60)


def wait(condition: Callable[[], Any], seconds: float, explain: Callable[[], str] = str) -> Any:
    """Poll until ``condition`` is true and return its value; fail with ``explain`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so after {seconds} s\n{explain()}"
        time.sleep(0.3)
    return value


def logs(run: Path) -> str:
    """Everything a run has printed, for a test that fails."""
    paths = [*run.glob("stool/jobs.jsonl"), *run.glob("stool/submitit/*.out"), *run.glob("stool/logs/*/*")]
    return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in paths)


def losses(run: Path) -> list[dict[str, Any]]:
    """The run's metrics without what depends on the clock."""
    return deterministic(read_metrics(run / "metrics.jsonl"))


def starts(run: Path) -> list[dict[str, Any]]:
    """The records of the run's starts."""
    return [record for record in records.read(run) if record["event"] == "start"]


def ends(run: Path) -> list[dict[str, Any]]:
    """The records of the run's ends."""
    return [record for record in records.read(run) if record["event"] == "end"]
