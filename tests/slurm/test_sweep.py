"""A sweep as one job array: how many run at the same time, what the index says, and what a second launch submits."""

from __future__ import annotations

from datetime import datetime

import pytest

from lingua.stool import records, sweep
from tests.slurm.launching import Launcher, ends, logs, starts, wait

pytestmark = pytest.mark.slow


def test_six_runs_of_which_one_fails_and_is_launched_again(launcher: Launcher) -> None:
    # Five find the corpus, one a folder that is not there yet.
    missing = launcher.folder / "later"
    points = launcher.folder / "points.yaml"
    roots = enumerate([launcher.corpus] * 5 + [missing], 1)
    points.write_text("points:\n" + "".join(f"- {{optim.lr: 0.00{i}, data.root_dir: {root}}}\n" for i, root in roots))
    words = launcher.words("sweep", f"sweep.file={points}", "max_parallel=2", steps=5)
    words = [word for word in words if not word.startswith("data.root_dir=")]
    done = launcher.stool(*words)
    assert done.returncode == 0, done.stderr
    folder = launcher.folder / "sweep"
    runs = [folder / line["name"] for line in sweep.runs(folder)]
    assert len(runs) == 6
    for run in runs:
        launcher.wait_for_end(run, 180)

    # A job brings the index up to date just after it has written down its end.
    expected = [records.FINISHED] * 5 + [records.FAILED]
    index = wait(lambda: (lines := sweep.runs(folder)) and [r["state"] for r in lines] == expected and lines, 30)
    assert [line["values"]["optim.lr"] for line in index] == [f"0.00{i}" for i in range(1, 7)]
    assert [line["metrics"].get("step") for line in index] == [5] * 5 + [None]
    assert (index[5]["exit"], index[5]["reason"]) == (2, "user error")
    array = index[0]["job"].split("_")[0]
    assert [line["job"] for line in index] == [f"{array}_{i}" for i in range(6)]
    assert most_at_once(runs) == 2
    status = launcher.stool("status", folder).stdout
    assert status.count("FINISHED") == 5
    assert "rank 0" in status
    assert str(missing) in status

    missing.symlink_to(launcher.corpus)
    again = launcher.stool(*words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("submitted") == 1
    assert again.stdout.count("finished, left alone") == 5
    assert launcher.wait_for_end(runs[5])["state"] == records.FINISHED, logs(runs[5])
    wait(lambda: [line["state"] for line in sweep.runs(folder)] == [records.FINISHED] * 6, 30)
    assert [len(starts(run)) for run in runs] == [1, 1, 1, 1, 1, 2]


def most_at_once(runs: list) -> int:
    """The largest number of runs that were under way at the same time."""
    events = [(datetime.fromisoformat(r["time"]), 1) for run in runs for r in starts(run)]
    events += [(datetime.fromisoformat(r["time"]), -1) for run in runs for r in ends(run)]
    under_way, most = 0, 0
    for _, change in sorted(events):  # ends before starts of the same second
        under_way += change
        most = max(most, under_way)
    return most
