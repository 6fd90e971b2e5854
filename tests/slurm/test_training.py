"""Training of several ranks as a job: as with torchrun, through preemption and time limits, and when a rank dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.stool import records
from tests.slurm.launching import Launcher, ends, logs, losses, starts, wait
from tests.support import ROOT, environment, tiny_words

pytestmark = pytest.mark.slow


def torchrun(corpus: Path, run: Path, ranks: int, **changes: object) -> Path:
    """The same training without a scheduler."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["apps.crossbert.train", *tiny_words("crossbert", corpus, run, **changes)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def test_two_nodes_with_two_tasks_train_as_torchrun_does(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.launch("run", "nodes=2", "tasks_per_node=2")
    assert launcher.wait_for_end(run)["state"] == records.FINISHED, logs(run)
    assert launcher.slurm_state(run) == "COMPLETED"
    assert launcher.cluster.job(records.summary(run)["job"])["NumTasks"] == "4"
    (start,) = starts(run)
    assert len(start["nodes"]) == 2
    assert [path.name for path in sorted(Path(start["logs"]).glob("rank*"))] == [f"rank_0000{i}.out" for i in range(4)]
    assert losses(run) == losses(torchrun(launcher.corpus, tmp_path / "reference", 4))
    line = launcher.state(run)
    assert (line["state"], line["step"], line["failure"]) == ("FINISHED", "30/30", "")


def saved_steps(run: Path) -> list[int]:
    """Steps after which the run was stopped, and those from which it went on, in turn."""
    found = re.findall(r"(?:stopped by \w+ after|resumed \S+ at) step (\d+)", (run / "train.log").read_text())
    return [int(step) for step in found]


def test_a_run_goes_on_after_preemption_and_after_a_requeue(launcher: Launcher, tmp_path: Path) -> None:
    steps = {"steps": 200, "logging__every": 5, "validation__every": 1000, "checkpoint__dump__every": 1000}
    run = launcher.launch("run", "nodes=2", "partition=low", **steps)
    launcher.wait_for_step(run, 20)
    launcher.cluster.call("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    wait(lambda: len(starts(run)) == 2, 120, lambda: logs(run))
    (end,) = ends(run)
    assert (end["state"], end["exit"], end["reason"]) == (records.REQUEUED, 140, "stopped by SIGUSR2")
    launcher.wait_for_step(run, saved_steps(run)[0] + 20)
    launcher.cluster.call("scontrol", "requeue", records.summary(run)["job"])
    about = launcher.wait_for_end(run)
    assert (about["state"], about["restarts"]) == (records.FINISHED, 2), logs(run)
    assert launcher.slurm_state(run) == "COMPLETED"
    stopped, resumed, stopped_again, resumed_again = saved_steps(run)
    assert (resumed, resumed_again) == (stopped, stopped_again)
    assert 20 <= stopped < stopped_again < 200
    assert losses(run) == losses(torchrun(launcher.corpus, tmp_path / "reference", 2, **steps))


def test_a_run_goes_on_after_its_time_limit(launcher: Launcher) -> None:
    run = launcher.launch("run", "time=1", "signal_s=20", steps=100_000, logging__every=5, validation__every=10**6)
    wait(lambda: len(starts(run)) == 2, 150, lambda: logs(run))
    (end,) = ends(run)
    assert (end["state"], end["exit"], end["reason"]) == (records.REQUEUED, 140, "stopped by SIGUSR2")
    stopped = saved_steps(run)[0]
    launcher.wait_for_step(run, stopped + 5)
    assert saved_steps(run) == [stopped, stopped]


def test_a_rank_that_is_killed_ends_the_job_and_is_named(launcher: Launcher) -> None:
    run = launcher.launch("run", "nodes=2", "tasks_per_node=2", steps=100_000)
    launcher.wait_for_step(run, 3)
    os.kill(process_of_rank(run, 3), signal.SIGKILL)
    about = launcher.wait_for_end(run, 60)
    assert (about["state"], about["exit"]) == (records.FAILED, 137)
    node = starts(run)[0]["nodes"][1]
    assert f"rank 3 on {node}: Killed" in launcher.state(run)["failure"]
    assert f"rank 3 on {node}: Killed" in launcher.stool("status", run).stdout
    assert launcher.slurm_state(run) == "FAILED"
    assert launcher.cluster.job(about["job"])["ExitCode"] == "137:0"


def process_of_rank(run: Path, rank: int) -> int:
    """The process of a rank of this run on this machine, which is all nodes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        is_run = b"python" in words[0] and f"config={run}/stool/config.yaml".encode() in words
        if is_run and f"SLURM_PROCID={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")
