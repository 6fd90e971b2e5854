"""Looking after runs without accounting, and without a scheduler; dry runs; what the scheduler refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from lingua.stool import records
from tests.slurm.launching import Launcher, logs, starts, wait

pytestmark = pytest.mark.slow


def test_status_logs_and_cancel_without_accounting(launcher: Launcher) -> None:
    assert "disabled" in launcher.client_error("sacct")
    run = launcher.launch("run", "nodes=2", "tasks_per_node=1", steps=100_000)
    launcher.wait_for_step(run, 5)
    line = launcher.state(run)
    assert (line["state"], line["restarts"], line["note"], line["failure"]) == ("RUNNING", "0", "", "")
    assert re.fullmatch(r"[\d,]+/100,000", line["step"])
    assert float(line["loss"]) > 0
    assert "step " in line["log"]
    waiting = launcher.launch("waiting", "sbatch.hold=true")
    line = launcher.state(waiting)
    assert (line["state"], line["note"]) == ("PENDING", "JobHeldUser")

    assert launcher.stool("logs", run).stdout.splitlines()[-1].count("loss") == 1
    assert "step " in launcher.stool("logs", run, "--rank", "0").stdout
    following = launcher.stool("logs", run, "-f", background=True)

    refused = launcher.stool("resume", run)
    assert refused.returncode == 2
    assert f"{run} is RUNNING: cancel it first" in refused.stderr

    done = launcher.stool("cancel", run, waiting)
    assert done.returncode == 0, done.stderr
    about = launcher.wait_for_end(run)
    assert (about["state"], about["exit"]) == (records.CANCELLED, 143)
    assert launcher.slurm_state(run) == launcher.slurm_state(waiting) == "CANCELLED"
    assert launcher.state(waiting)["state"] == "CANCELLED"
    assert starts(waiting) == []
    assert len([*run.glob("checkpoints/*/COMPLETE")]) == 1
    assert "stopped by SIGTERM" in following.communicate(timeout=30)[0]

    # Nothing was lost: it goes on, with what is changed.
    resumed = launcher.stool("resume", run, "nodes=1", "partition=high")
    assert resumed.returncode == 0, resumed.stderr
    wait(lambda: "resumed" in (run / "train.log").read_text(), 60, lambda: logs(run))
    assert launcher.cluster.job(records.summary(run)["job"])["Partition"] == "high"


def test_cancelled_behind_the_launchers_back(launcher: Launcher) -> None:
    run = launcher.launch("run", steps=100_000)
    launcher.wait_for_step(run, 3)
    launcher.cluster.call("scancel", records.summary(run)["job"])
    assert launcher.wait_for_end(run)["state"] == records.CANCELLED
    time.sleep(3)  # in which it must not come back
    assert launcher.slurm_state(run) == "CANCELLED"


def test_the_records_alone_tell_the_state(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.launch("run", steps=100_000)
    launcher.wait_for_step(run, 3)
    # A controller that does not answer: the port is closed.
    config = Path(launcher.environment["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", config))
    away = launcher.environment | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    began = time.monotonic()
    status = launcher.stool("status", run, env=away)
    assert time.monotonic() - began < 40
    assert status.returncode == 0, status.stderr
    assert "RUNNING" in status.stdout
    assert "note: by the records alone: squeue" in status.stdout
    refused = launcher.stool("cancel", run, env=away)
    assert refused.returncode == 2
    assert "the scheduler did not cancel" in refused.stderr
    nothing = launcher.environment | {"PATH": "/nonexistent"}
    assert "squeue not found" in launcher.stool("status", run, env=nothing).stdout


def test_a_job_that_is_gone_without_a_word(launcher: Launcher) -> None:
    run = launcher.launch("run", steps=100_000)
    launcher.wait_for_step(run, 3)
    # As if the node had died: the process that writes the records ends with everything else.
    launcher.cluster.call("scancel", "--signal=KILL", "--full", records.summary(run)["job"])
    assert launcher.slurm_state(run) in ("FAILED", "CANCELLED", "NODE_FAIL")
    line = launcher.state(run)
    assert line["state"] in ("FAILED", "CANCELLED")
    assert launcher.stool("resume", run).returncode == 0
    assert launcher.state(run)["state"] in ("PENDING", "RUNNING")


@pytest.mark.parametrize(
    "own", [["nodes=2", "ngpu=2", "cpus=2", "mem=500M"], ["gres=gpu:1", "sweep.optim.lr=1e-3,2e-3", "max_parallel=1"]]
)
def test_a_dry_run_prints_a_script_that_sbatch_takes(launcher: Launcher, tmp_path: Path, own: list[str]) -> None:
    done = launcher.stool(*launcher.words("run", *own, "dry_run=true"))
    assert done.returncode == 0, done.stderr
    assert not (launcher.folder / "run").exists()
    script = tmp_path / "script.sh"
    script.write_text(done.stdout)
    said = launcher.client_error("sbatch", "--test-only", str(script))
    assert re.search(r"Job \d+ to start at", said), said
    assert "# batch         512 tokens = 8 rows a step over all ranks" in done.stdout


def test_what_the_scheduler_refuses_is_told_in_full(launcher: Launcher) -> None:
    words = launcher.words("run", "partition=nowhere")
    done = launcher.stool(*words)
    assert done.returncode == 2
    assert "sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert "Batch job submission failed: Invalid partition name specified" in done.stderr
    assert re.search(r"The command was: sbatch \S+\.sh", done.stderr)
    assert "Traceback" not in done.stderr
    # Nothing has run in the folder: it can be launched with another partition.
    words[words.index("partition=nowhere")] = "partition=high"
    assert launcher.stool(*words).returncode == 0
    done = launcher.stool(*words)
    assert done.returncode == 2
    assert "is there already and is left as it is" in done.stderr
