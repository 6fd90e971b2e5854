"""The same run on any number of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lingua.metrics import read_metrics
from tests.ranks import finish, free_port, losses, run_ranks, start_ranks, train_ranks
from tests.support import deterministic, tiny_words

Words = Callable[..., list[str]]
SLOW = pytest.mark.slow


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> Words:
    """Command-line words of a tiny run in ``tmp_path/NAME``."""

    def make(app: str, name: str, **changes: object) -> list[str]:
        settings = {"steps": 20, "validation__every": 20, "distributed__timeout": 60, "micro_rows": 2, **changes}
        return tiny_words(app, corpus, tmp_path / name, **settings)

    return make


def records(folder: Path, what: str) -> list:
    return sorted(json.loads(line) for path in folder.glob(f"{what}_*.jsonl") for line in path.open())


@pytest.mark.parametrize(
    ("app", "grid"),
    [
        ("crossbert", [(2, 3, 2)]),
        pytest.param("crossbert", [(2, 1, 1), (4, 4, -1), (4, 1, 2), (3, 2, 1)], marks=SLOW),
        pytest.param("bert", [(2, 2, -1), (4, 2, 2)], marks=SLOW),
    ],
)
def test_rows_masks_and_losses_do_not_depend_on_the_ranks(app, grid, words: Words, tmp_path: Path) -> None:
    def train(n: int, micro_rows: int, dp_shard: int) -> tuple:
        name = f"{n}_{micro_rows}_{dp_shard}"
        folder = tmp_path / f"{name}.records"
        folder.mkdir()
        changes = {"dtype": "fp64", "micro_rows": micro_rows, "distributed__dp_shard": dp_shard}
        train_ranks(n, app, words(app, name, **changes), folder, "record:0:0", RECORDS=str(folder))
        rows, views = (records(folder, what) for what in ("rows", "views"))
        # Padding repeats rows, and validation makes views of its own: what counts is which there are.
        return rows, sorted({tuple(view) for view in views}), losses(tmp_path / name)

    rows, views, expected = train(1, 8, 1)
    assert len(rows) == 20 * 8
    assert len(expected) == 20 + 3
    for n, micro_rows, dp_shard in grid:
        other_rows, other_views, found = train(n, micro_rows, dp_shard)
        assert other_rows == rows
        assert other_views == views
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


@SLOW
def test_fp32_drifts_no_more_than_after_one_unit_in_the_last_place(words: Words, tmp_path: Path) -> None:
    for name, n, fault in (("plain", 1, "none:0:0"), ("control", 1, "ulp:0:0"), ("two", 2, "none:0:0")):
        train_ranks(n, "crossbert", words("crossbert", name), tmp_path / name, fault)
    plain, control, two = (losses(tmp_path / name) for name in ("plain", "control", "two"))

    def drift(other: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(plain, other, strict=True))

    assert 0 < drift(control) < 1e-3
    one_unit = float(np.spacing(np.float32(max(plain))))  # what a loss itself is rounded to
    assert drift(two) <= drift(control) + one_unit


@pytest.mark.parametrize("dp_shard", [pytest.param(1, marks=SLOW), 2])
def test_a_run_goes_on_bit_by_bit_on_the_same_ranks(words: Words, tmp_path: Path, dp_shard: int) -> None:
    changes = {"checkpoint__dump__every": 7, "distributed__dp_shard": dp_shard}
    train_ranks(2, "crossbert", words("crossbert", "whole", **changes), tmp_path / "whole.out")
    command = ["-m", "tests.faulty", "crossbert", "SIGKILL:1:11", *words("crossbert", "run", **changes)]
    ended = run_ranks(2, command, tmp_path / "out")
    assert [rank.status for rank in ended] == [1, -9]
    assert "no sign of life" in ended[0].text or "Connection" in ended[0].text
    train_ranks(2, "crossbert", words("crossbert", "run", **changes), tmp_path / "again.out")
    assert "at step 7" in (tmp_path / "run/train.log").read_text()
    listing = json.loads((tmp_path / "run/checkpoints/0000000020/COMPLETE").read_text())
    assert {"__0_0.distcp", "__1_0.distcp"} <= listing.keys()
    whole, run = (deterministic(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "run"))
    assert run == whole


@SLOW
def test_a_run_goes_on_on_other_ranks(words: Words, tmp_path: Path) -> None:
    """1, 2, 4 and 1 ranks in turn, replicas and shards; fp64 shows the mathematics."""
    train_ranks(1, "crossbert", words("crossbert", "whole", dtype="fp64"), tmp_path / "out")
    for stop, n, dp_shard in ((5, 1, 1), (9, 2, 2), (13, 4, 2), (20, 1, 1)):
        changes = {"dtype": "fp64", "distributed__dp_shard": dp_shard, "micro_rows": 1}
        folder = tmp_path / f"out_{stop}"
        if stop < 20:
            command = ["-m", "tests.faulty", "crossbert", f"SIGUSR2:0:{stop}", *words("crossbert", "run", **changes)]
            assert {rank.status for rank in run_ranks(n, command, folder)} == {140}
        else:
            train_ranks(n, "crossbert", words("crossbert", "run", **changes), folder)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        pytest.param("SIGUSR2", 140, marks=SLOW),
        pytest.param("SIGTERM", 143, marks=SLOW),
        pytest.param("SIGINT", 130, marks=SLOW),
    ],
)
def test_a_signal_to_one_rank_in_mid_accumulation_stops_all_at_one_step(words: Words, tmp_path, kind, status) -> None:
    train_ranks(2, "crossbert", words("crossbert", "whole"), tmp_path / "whole.out")
    command = ["-m", "tests.faulty", "crossbert", f"{kind}:1:5", *words("crossbert", "run")]
    ended = run_ranks(2, command, tmp_path / "out")
    assert [rank.status for rank in ended] == [status, status], ended
    assert f"stopped by {kind} after step" in ended[0].text
    (saved,) = (tmp_path / "run/checkpoints").iterdir()
    assert saved.name in ("0000000005", "0000000006")  # the vote of step 5 had begun, or not
    train_ranks(2, "crossbert", words("crossbert", "run"), tmp_path / "again")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


@SLOW
def test_non_finite_gradients_on_one_rank_skip_the_step_on_all(words: Words, tmp_path: Path) -> None:
    train_ranks(2, "crossbert", words("crossbert", "run", distributed__dp_shard=1), tmp_path / "out", "nan:1:5")
    steps = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in r]
    assert [r["skipped_steps"] for r in steps] == [0] * 4 + [1] * 16
    assert steps[4]["loss"] is None
    assert all(r["loss"] < 12 for r in steps[5:])
    # Replicas that took different steps would give another loss when one rank goes on alone.
    alone = words("crossbert", "run", steps=21, resume__allow="[steps]", validation__every=1)
    train_ranks(1, "crossbert", alone, tmp_path / "alone")
    validations = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if "valid/made_up/loss@0.5" in r]
    assert abs(validations[-1]["valid/made_up/loss@0.5"] - validations[-2]["valid/made_up/loss@0.5"]) < 0.2


@pytest.mark.parametrize(
    ("kind", "rank", "cause"),
    [
        ("raise", 1, r"rank 1 \(.*\): Traceback"),
        pytest.param("raise", 0, r"rank 0 \(.*\): Traceback", marks=SLOW),
        pytest.param("exit", 1, r"rank 1 \(.*\): no sign of life", marks=SLOW),
        pytest.param("exit", 0, "rank 0: its process is gone", marks=SLOW),
        pytest.param("SIGKILL", 1, r"rank 1 \(.*\): no sign of life", marks=SLOW),
        ("hang", 1, r"no progress for 8 s .*: rank 1 \(.*\) stands in happen, .*\n  rank 0 \(.*\) waits for others"),
        pytest.param("hang", 0, r"no progress for 8 s .*: rank 0 \(.*\) stands in happen", marks=SLOW),
        pytest.param("SIGSTOP", 1, r"rank 1 \(.*\): no sign of life", marks=SLOW),
        pytest.param("SIGSTOP", 0, "rank 0, which has not answered", marks=SLOW),
    ],
)
def test_a_rank_that_fails_takes_the_others_with_it(words: Words, tmp_path: Path, kind, rank, cause) -> None:
    command = ["-m", "tests.faulty", "crossbert", f"{kind}:{rank}:5"]
    command += words("crossbert", "run", distributed__timeout=8, validation__every=100)
    ranks = start_ranks(2, command, tmp_path / "out")
    other = ranks[1 - rank]
    other.wait(60)  # the start takes most of it
    ended = finish(ranks if kind != "SIGSTOP" else [other], tmp_path / "out", 30) if kind != "SIGSTOP" else None
    text = (tmp_path / f"out/rank_{1 - rank}.txt").read_text()
    for process in ranks:
        process.kill()
    assert other.returncode == 1
    assert re.search(rf"\[rank {1 - rank}\] stopping, because of {cause}", text), text
    if kind == "raise":
        assert "something is broken here" in text
        assert ended[rank].status == 1


@SLOW
def test_a_rank_may_take_its_time_at_the_end(words: Words, tmp_path: Path) -> None:
    """Longer than a rank is given to show a sign of life."""
    changes = {"steps": 2, "distributed__timeout": 10}
    train_ranks(2, "crossbert", words("crossbert", "run", **changes), tmp_path / "out", "late:0:7")


@SLOW
def test_a_second_ctrl_c_stops_at_once(words: Words, tmp_path: Path) -> None:
    command = ["-m", "tests.faulty", "crossbert", "SIGINT+SIGINT:1:5", *words("crossbert", "run")]
    ended = run_ranks(2, command, tmp_path / "out")
    assert [rank.status for rank in ended] == [1, 130]
    assert "[rank 1] interrupted, without saving" in ended[1].text
    assert re.search(r"\[rank 0\] stopping, because of rank 1 \(.*\): interrupted, without saving", ended[0].text)
    assert "Traceback" not in ended[0].text + ended[1].text
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_mistake_that_one_rank_meets_is_the_exit_status_of_all(words: Words, tmp_path: Path) -> None:
    command = ["-m", "apps.crossbert.train", *words("crossbert", "run", init__path="nowhere")]
    ended = run_ranks(2, command, tmp_path / "out")
    assert [rank.status for rank in ended] == [2, 2]
    assert ended[0].text == "[rank 0] error: nowhere: no such run or checkpoint folder\n"
    assert ended[1].text.endswith("): error: nowhere: no such run or checkpoint folder\n")


def test_ranks_that_disagree_are_told(words: Words, tmp_path: Path) -> None:
    port, ranks = str(free_port()), []
    for rank, more in enumerate(([], ["optim.lr=0.001"])):
        command = ["-m", "apps.crossbert.train", *words("crossbert", "run"), *more]
        meeting = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
        ranks += start_ranks(1, command, tmp_path / f"out_{rank}", **meeting)
    assert [rank.wait(60) for rank in ranks] == [2, 2]
    text = (tmp_path / "out_0/rank_0.txt").read_text()
    assert "the ranks disagree on the config: optim.lr is 0.003 on rank 0" in text
    assert "and 0.001 on rank 1" in text
    assert "Traceback" not in text
    assert "disagree" not in (tmp_path / "out_1/rank_0.txt").read_text()  # one voice is enough
