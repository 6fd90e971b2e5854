from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.metrics import Metrics, read_metrics
from tests.support import ROOT, command, environment, tiny_words


def test_records_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    for step in range(1, 6):
        metrics.write({"step": step, "loss": 1.0 / step})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    resumed = Metrics(tmp_path, 3, tensorboard=False)
    resumed.write({"step": 4, "loss": 9.0})
    resumed.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0),
    ]  # fmt: skip


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON record"):
        read_metrics(path)


@pytest.mark.parametrize("line", ["5", "[1]", "null", '{"loss": 1.0}', '{"step": null}', '{"step": "1"}'])
def test_json_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: expected a record") as error:
        read_metrics(path)
    assert line in str(error.value)
    path.write_bytes(b'\xff{"step": 1}\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: not a JSON record"):
        Metrics(tmp_path, 3, tensorboard=False)


def test_what_is_not_finite_is_null_in_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n')  # as other programs write it
    metrics = Metrics(tmp_path, 3, tensorboard=False)
    metrics.write({"step": 2, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "lr": 0.5})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    records = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert records == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": None, "grad_norm": None, "low": None, "lr": 0.5},
    ]
    assert read_metrics(path) == records


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, 0, tensorboard=True)
    for step in (1, 2):
        metrics.write({"step": step, "loss": step / 2, "note": "text"})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0)]
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open()] == [0.5, 1.0]


def test_on_a_terminal_lines_go_above_the_bar(corpus: Path, tmp_path: Path) -> None:
    """A real pseudo-terminal: a bar is drawn, and log lines start at the margin."""
    words = command("bert", tiny_words("bert", corpus, tmp_path / "run", steps=20, validation__every=5))
    seen, terminal = bytearray(), pty.openpty()
    process = subprocess.Popen(words, cwd=ROOT, env=environment() | {"TERM": "xterm"}, stdout=terminal[1])
    os.close(terminal[1])
    with contextlib.suppress(OSError):  # how a pseudo-terminal says that the other side is gone
        while chunk := os.read(terminal[0], 4096):
            seen += chunk
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r", "\n")
    assert re.search(r"^run ━+ 20/20", plain, re.MULTILINE)
    for step in (5, 10, 15, 20):
        assert re.search(rf"^step {step}  valid/made_up/loss@0.15", plain, re.MULTILINE)
    assert "step 20/20  loss" in (tmp_path / "run/train.log").read_text()
