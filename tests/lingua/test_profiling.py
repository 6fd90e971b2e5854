from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from lingua.errors import UserError
from lingua.profiling import Profiler, ProfilingArgs

CPU = torch.device("cpu")


def run(profiler: Profiler, steps: int, fail_at: int = 0) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    for step in range(1, steps + 1):
        with profiler.step(step):
            (weight @ weight).sum().backward()
            if step == fail_at:
                raise RuntimeError("broken step")
    profiler.close()


def events(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_chosen_steps_are_traced_and_no_others(tmp_path: Path) -> None:
    run(Profiler(ProfilingArgs(steps=[5, 2], length=2), tmp_path, CPU, steps=8), 8)
    traces = {path.name: events(path) for path in (tmp_path / "profile").iterdir()}
    assert sorted(traces) == ["step0000000002_rank0.json.gz", "step0000000005_rank0.json.gz"]
    for first, names in zip((2, 5), (traces[name] for name in sorted(traces)), strict=True):
        steps = {name for name in names if name.startswith("step ")}
        assert steps == {f"step {first}", f"step {first + 1}"}
        assert names.count("aten::mm") == 2 * 3  # of each step one product forward, two backward


def test_off_it_does_and_writes_nothing(tmp_path: Path) -> None:
    profiler = Profiler(ProfilingArgs(), tmp_path, CPU, steps=3)
    assert isinstance(profiler.step(1), contextlib.nullcontext)
    start = time.perf_counter()
    for step in range(10_000):
        with profiler.step(step):
            pass
    assert (time.perf_counter() - start) / 10_000 < 1e-4  # seconds a step
    run(profiler, 3)
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_unless_all_are_asked_for(tmp_path: Path) -> None:
    run(Profiler(ProfilingArgs(steps=[1]), tmp_path, CPU, steps=2, rank=1), 2)
    assert list(tmp_path.iterdir()) == []
    run(Profiler(ProfilingArgs(steps=[1], all_ranks=True), tmp_path, CPU, steps=2, rank=1), 2)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step0000000001_rank1.json.gz"]


def test_a_step_that_fails_ends_the_profile_and_shows_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken step"):
        run(Profiler(ProfilingArgs(steps=[2], length=3), tmp_path, CPU, steps=9), 9, fail_at=3)
    assert not (tmp_path / "profile").exists()
    run(Profiler(ProfilingArgs(steps=[1]), tmp_path, CPU, steps=2), 2)  # the profiler is free again
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_a_run_that_is_stopped_within_a_trace_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(Profiler(ProfilingArgs(steps=[2], length=3), tmp_path, CPU, steps=9), 3)
    assert "the run ended before the trace that began with step 2" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    with pytest.raises(UserError, match=r"profile/step0000000001_rank0\.json\.gz: cannot write the profile"):
        run(Profiler(ProfilingArgs(steps=[1]), tmp_path, CPU, steps=1), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [0]}, "steps count from 1"),
        ({"steps": [1], "length": 0}, r"profiling\.length=0"),
        ({"steps": [9, 7], "length": 3}, "from steps 7 and 9 overlap"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProfilingArgs(**changes)


def test_steps_behind_the_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profiling\.steps=\[9\] with profiling\.length=2: the run ends with step 9"):
        Profiler(ProfilingArgs(steps=[3, 9], length=2), tmp_path, CPU, steps=9)
