"""Evaluation jobs: each kept checkpoint is probed by a job of its own, and whatever becomes of it, training goes on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from lingua.stool import records
from lingua.stool.evaluation import LEASE, evaluations
from tests.slurm.launching import Launcher, logs, losses, wait
from tests.support import run_app, tiny_words

pytestmark = pytest.mark.slow
CHECKPOINTS = [f"{step:010d}" for step in (15, 30)]


def probe_words(folder: Path, test_file: str) -> list[str]:
    """Words of a launch with a small text classification after each checkpoint."""
    texts = [("the cat sees the sea", "animal"), ("our teacher likes a red house", "person")]
    for name in ("train", "test"):
        rows = [{"text": f"{text} {i}", "label": label} for i in range(12) for text, label in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / f"{test_file}.yaml"
    config.write_text(f"tasks: {{kind: {{train: {folder}/train.jsonl, test: {folder}/{test_file}}}}}\nlayers: -1\n")
    return ["eval.script=apps.crossbert.eval", "eval.ngpu=0", "eval.time=5", f"eval.config={config}"]


def test_each_checkpoint_is_probed_while_training_goes_on(launcher: Launcher) -> None:
    changes = {"checkpoint__dump__every": 15, "validation__every": 1000}
    probed = launcher.launch("probed", *probe_words(launcher.folder, "test.jsonl"), **changes)
    changes["checkpoint__dump__every"] = 1000  # its last only
    failing = launcher.launch("failing", *probe_words(launcher.folder, "absent.jsonl"), **changes)
    plain = launcher.folder / "plain"
    run_app("crossbert", tiny_words("crossbert", launcher.corpus, plain, **changes))
    for run in (probed, failing):
        assert launcher.wait_for_end(run)["state"] == records.FINISHED, logs(run)
    for run in (probed, failing):
        wait(lambda run=run: {e["state"] for e in evaluations(run).values()} <= {"DONE", "FAILED"}, 120)

    found = evaluations(probed)
    assert list(found) == CHECKPOINTS
    assert {e["state"] for e in found.values()} == {"DONE"}, [*probed.glob("stool/evaluations/*.log")]
    for step in CHECKPOINTS:
        assert json.loads((probed / "eval" / step / "results.json").read_text())["step"] == int(step)
        assert not (probed / "checkpoints" / step / LEASE).exists()
    job = launcher.cluster.job(found[CHECKPOINTS[0]]["job"])
    assert (job["JobName"], job["JobState"]) == ("probed_eval", "COMPLETED")
    # One after another, as the dependency says.
    times = [launcher.cluster.job(found[step]["job"]) for step in CHECKPOINTS]
    assert all(before["EndTime"] <= after["StartTime"] for before, after in itertools.pairwise(times))

    assert {e["state"] for e in evaluations(failing).values()} == {"FAILED"}
    assert "absent.jsonl" in evaluations(failing)[CHECKPOINTS[-1]]["reason"]
    assert "absent.jsonl" in launcher.stool("status", failing).stdout
    assert losses(failing) == losses(probed) == losses(plain)
    assert launcher.slurm_state(failing) == "COMPLETED"


def test_a_probe_that_the_scheduler_refuses_leaves_training_alone(launcher: Launcher) -> None:
    words = [*probe_words(launcher.folder, "test.jsonl"), "eval.partition=nowhere"]
    run = launcher.launch("run", *words, checkpoint__dump__every=1000)
    assert launcher.wait_for_end(run)["state"] == records.FINISHED, logs(run)
    (found,) = evaluations(run).values()
    assert found["state"] == "FAILED"
    assert "invalid partition specified: nowhere" in found["reason"]
    assert not (run / "checkpoints" / "0000000030" / LEASE).exists()

    launch = records.read_launch(run)
    launch["args"]["eval"]["partition"] = "high"
    records.write_launch(run, launch)
    assert "submitted" in launcher.stool("evaluate", run).stdout
    wait(lambda: next(iter(evaluations(run).values()))["state"] == "DONE", 60, lambda: logs(run))
