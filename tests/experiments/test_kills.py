"""The experiment at its smallest, and what it makes of what it sees."""

import copy
import json
import signal
import time
from pathlib import Path

import pytest

from experiments.kills import KINDS, KillsArgs, broken, last_printed, last_step, main, newest_whole, verdict
from lingua.errors import UserError


def folder_with(run: Path, checkpoints: dict[int, bool], metrics: str = "") -> Path:
    """A run folder with checkpoints that are whole or not."""
    for step, is_whole in checkpoints.items():
        folder = run / f"checkpoints/{step:010d}"
        folder.mkdir(parents=True)
        if is_whole:
            (folder / "COMPLETE").touch()
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text(metrics)
    return run


def test_what_a_kill_left(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert (newest_whole(none), broken(none), last_step(none)) == (0, None, 0)
    torn = '{"step": 9, "loss": 1.0}\n{"step": 10, "loss": 2.0}\n{"step": 11'
    run = folder_with(tmp_path / "run", {5: True, 10: False}, torn)
    assert (newest_whole(run), last_step(run)) == (5, 10)
    before = broken(run)
    assert before[0] == 10
    assert broken(run) == before
    time.sleep(0.01)
    (run / "checkpoints/0000000010/file").touch()  # it is written anew
    assert broken(run)[0] == 10
    assert broken(run) != before
    run = folder_with(tmp_path / "older", {5: False, 10: True})
    assert (newest_whole(run), broken(run), last_step(run)) == (10, None, 0)


def test_what_a_start_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("resumed checkpoints/0000000005 at step 5\n")
    assert last_printed(log) == 0
    log.write_text("step 6/90  loss 1.0\nwaiting for step 9/90\nstep 7/90  lo")
    assert last_printed(log) == 7


LIFE = {
    "kind": "SIGKILL at a step, one rank",
    "ranks": 2,
    "newest_whole_checkpoint": 5,
    "resumed_at": 5,
    "steps_lost": 3,
    "left_a_broken_checkpoint": False,
    "statuses": [-9, 1],
    "seconds_to_end": 1.0,
    "failure_before_the_kill": None,
}
STOPPED = LIFE | {"kind": "SIGTERM at a step, all ranks", "steps_lost": 0, "statuses": [143, 143]}


def broken_bars(tmp_path: Path, lives: list[dict], found: str, expected: str) -> list[str]:
    """Names of the bars that do not hold, of a run of 3 steps."""
    killed, peaceful = (folder_with(tmp_path / name, {}, text) for name, text in (("k", found), ("p", expected)))
    result = verdict(KillsArgs("x", kills=1, steps=3, save_every=1), lives, killed, peaceful)
    return [bar["name"] for bar in result["bars"] if not bar["met"]]


def metrics(*losses: float, first: int = 1) -> str:
    return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, first))


@pytest.mark.parametrize(
    ("change", "found", "unmet"),
    [
        ({}, metrics(3.0, 2.0, 1.0), []),
        ({"resumed_at": 4}, metrics(3.0, 2.0, 1.0), ["starts elsewhere than at the newest whole checkpoint"]),
        ({"resumed_at": None}, metrics(3.0, 2.0, 1.0), ["starts elsewhere than at the newest whole checkpoint"]),
        ({"resumed_at": None, "kind": "SIGKILL at the start, all ranks"}, metrics(3.0, 2.0, 1.0), []),
        ({"failure_before_the_kill": "error"}, metrics(3.0, 2.0, 1.0), ["starts that failed before the kill"]),
        ({"statuses": [-9, None]}, metrics(3.0, 2.0, 1.0), ["ranks that had to be ended"]),
        ({}, metrics(3.0, 2.0, 1.0) + metrics(1.0, first=3), ["steps missing or twice in the metrics"]),
        (
            {},
            metrics(3.0, 2.0, 1.00001),
            ["largest relative difference of a loss", "relative difference of the last loss"],
        ),
        ({}, metrics(3.0, 2.00001, 1.0), ["largest relative difference of a loss"]),
    ],
)
def test_each_bar_can_fail(tmp_path: Path, change: dict, found: str, unmet: list[str]) -> None:
    lives = [LIFE | change, copy.deepcopy(STOPPED)]
    assert broken_bars(tmp_path, lives, found, metrics(3.0, 2.0, 1.0)) == unmet


def test_a_stop_that_loses_steps_or_ends_otherwise_is_told(tmp_path: Path) -> None:
    lives = [LIFE, STOPPED | {"steps_lost": 1}, STOPPED | {"statuses": [143, 1]}]
    assert broken_bars(tmp_path, lives, metrics(3.0, 2.0, 1.0), metrics(3.0, 2.0, 1.0)) == [
        "SIGTERMs after which a rank did not end with 143",
        "steps lost after SIGTERM",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"app": "embed"}, "app=embed"),
        ({"kills": 0}, "kills=0"),
        ({"steps": 300}, "steps=300"),
        ({"ranks": [0]}, "ranks"),
    ],
)
def test_impossible_experiments_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        KillsArgs("x", **change)


@pytest.mark.slow
def test_five_kills(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(KillsArgs(str(out), str(tmp_path / "runs"), kills=5, steps=80, ranks=[1, 2], seed=3))
    result = json.loads(out.read_text())
    assert [bar for bar in result["bars"] if not bar["met"]] == []
    assert len(result["lives"]) == 5
    assert sum(kind["kills"] for kind in result["kinds"].values()) == 5
    for life in result["lives"]:
        signum, everybody, _ = KINDS[life["kind"]]
        assert len(life["killed_ranks"]) == (life["ranks"] if everybody else 1)
        for rank in life["killed_ranks"]:
            assert life["statuses"][rank] == (143 if signum == signal.SIGTERM else -9)
    assert str(tmp_path) not in out.read_text()
