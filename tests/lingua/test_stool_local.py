"""Launching on this machine: the whole way from the command to the records, without a scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lingua.metrics import read_metrics
from lingua.stool import records, sweep
from lingua.stool.evaluation import evaluations
from tests.slurm.launching import wait
from tests.support import deterministic, run_app, run_command, tiny_words

OWN = ["script=apps.crossbert.train", "launcher=local", "ngpu=0"]


def stool(*words: object, **options: Any) -> subprocess.CompletedProcess:
    return run_command([sys.executable, "-m", "lingua.stool", *map(str, words)], timeout=120, **options)


def launch(run: Path, corpus: Path, *own: str, **changes: object) -> None:
    script = [word for word in tiny_words("crossbert", corpus, run, **changes) if "dump_dir" not in word]
    done = stool(*OWN, f"dump_dir={run}", *own, "--", *script)
    assert done.returncode == 0, done.stderr


def wait_for_end(run: Path) -> dict[str, Any]:
    return wait(lambda: (about := records.summary(run))["state"] in records.ENDED and about, 120)


def rank_process(run: Path) -> int:
    """The training process of a run, once it catches signals."""
    wait(lambda: records.progress(run).get("step", 0) >= 3, 120)
    pid = records.summary(run)["pid"]
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.slow
def test_a_run_goes_on_after_a_signal_with_the_code_of_its_launch(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    launch(run, corpus, steps=60)
    code = Path(records.read_launch(run)["code"])
    train = code / "apps/crossbert/train.py"
    original = train.read_text()
    child = rank_process(run)
    train.write_text(original.replace("def train(", "print('from the snapshot')\n\n\ndef train(", 1))
    os.kill(child, signal.SIGUSR2)
    about = wait_for_end(run)
    assert (about["state"], about["restarts"]) == (records.FINISHED, 1)
    first, second = (record for record in records.read(run) if record["event"] == "end")
    assert (first["state"], first["exit"], first["reason"]) == (records.REQUEUED, 140, "stopped by SIGUSR2")
    assert (second["state"], second["exit"]) == (records.FINISHED, 0)
    assert "resumed" in (run / "train.log").read_text()
    outputs = sorted(run.glob("stool/logs/*/rank_00000.out"))
    assert ["from the snapshot" in path.read_text() for path in outputs] == [False, True]
    run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "alone", steps=60))
    found, expected = (deterministic(read_metrics(path / "metrics.jsonl")) for path in (run, tmp_path / "alone"))
    assert found == expected
    assert "FINISHED" in stool("status", run).stdout
    assert stool("resume", run).stdout == "run: finished, left alone\nnothing to submit\n"


@pytest.mark.slow
def test_a_run_that_is_cancelled_and_resumed(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    launch(run, corpus, steps=100_000)
    rank_process(run)
    assert stool("cancel", run).returncode == 0
    about = wait_for_end(run)
    assert (about["state"], about["exit"]) == (records.CANCELLED, 143)
    step = json.loads(next(run.glob("checkpoints/*/state.json")).read_text())["step"]
    assert stool("resume", run, "max_restarts=1", "--", "logging.every=2").returncode == 0
    wait(lambda: records.progress(run).get("step", 0) > step + 5, 120)
    child = rank_process(run)
    assert records.read_launch(run)["args"]["max_restarts"] == 1
    log = (run / "train.log").read_text()
    assert f"resumed {run}/checkpoints/{step:010d} at step {step}" in log
    os.kill(records.summary(run)["pid"], signal.SIGKILL)  # as if the machine had gone: nothing is written down
    time.sleep(0.5)
    line = json.loads(stool("status", "--json", run).stdout)
    assert (line["state"], line["note"]) == ("LOST", "the job is gone and left no record of its end")
    os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_crash_is_told_and_requeued_only_if_asked(tmp_path: Path, corpus: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    launch(run, corpus, steps=100_000)
    os.kill(rank_process(run), signal.SIGKILL)
    about = wait_for_end(run)
    assert (about["state"], about["exit"], about["failure"]["cause"]) == (records.FAILED, 137, "SIGKILL")
    assert "first rank 0 on" in stool("status", run).stdout
    launch(again, corpus, "requeue_on_crash=true", "max_restarts=1", steps=60)
    os.kill(rank_process(again), signal.SIGKILL)
    about = wait_for_end(again)
    assert (about["state"], about["restarts"]) == (records.FINISHED, 1)


@pytest.mark.slow
def test_a_sweep_beside_one_another(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "sweep"
    words = [word for word in tiny_words("crossbert", corpus, folder, steps=3) if "dump_dir" not in word]
    own = [*OWN, f"dump_dir={folder}", "sweep.optim.lr=1e-3,2e-3", "max_parallel=1"]
    assert stool(*own, "--", *words).returncode == 0
    for name in ("lr=1e-3", "lr=2e-3"):
        assert wait_for_end(folder / name)["state"] == records.FINISHED
    wait(lambda: [line["state"] for line in sweep.runs(folder)] == [records.FINISHED] * 2, 30)
    assert [line["metrics"]["step"] for line in sweep.runs(folder)] == [3, 3]
    (_, end), (start, _) = (
        [r["time"] for r in records.read(folder / name) if r["event"] in ("start", "end")]
        for name in ("lr=1e-3", "lr=2e-3")
    )
    assert end <= start
    # More points of the same sweep: only these are launched; another config under the same name is refused.
    own[-2] = "sweep.optim.lr=1e-3,2e-3,3e-3"
    more = stool(*own, "--", *words)
    assert more.stdout.count("finished, left alone") == 2
    assert wait_for_end(folder / "lr=3e-3")["state"] == records.FINISHED
    assert len(sweep.runs(folder)) == 3
    refused = stool(*own, "--", *words, "seed=1")
    assert refused.returncode == 2
    assert "is there already with another config" in refused.stderr


@pytest.mark.slow
def test_a_checkpoint_is_probed(tmp_path: Path, corpus: Path) -> None:
    for name in ("train", "test"):
        rows = [{"text": f"{word} {i}", "label": word} for i in range(12) for word in ("sea", "house")]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "eval.yaml"
    config.write_text(f"tasks: {{kind: {{train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl}}}}\nlayers: -1\n")
    run = tmp_path / "run"
    launch(run, corpus, "eval.script=apps.crossbert.eval", f"eval.config={config}", steps=3)
    wait_for_end(run)
    found = wait(lambda: [e for e in evaluations(run).values() if e["state"] in ("DONE", "FAILED")], 120)
    assert found[0]["state"] == "DONE", (run / "stool/evaluations/0000000003.log").read_text()
    assert json.loads((run / "eval/0000000003/results.json").read_text())["step"] == 3


def test_debug_runs_in_this_process_and_reports_mistakes(tmp_path: Path, corpus: Path) -> None:
    words = [word for word in tiny_words("crossbert", corpus, tmp_path / "run", steps=1) if "data.root_dir" not in word]
    own = ["script=apps.crossbert.train", "launcher=debug", "ngpu=0"]
    done = stool(*own, "--", *words, f"data.root_dir={tmp_path}/absent", input="")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Pdb" not in done.stdout
