from __future__ import annotations

import json
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.metrics import Metrics, read_metrics


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
