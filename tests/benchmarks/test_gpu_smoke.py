"""On a machine without a GPU: the same at toy size. What only a GPU can show is shown by the program itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import backends, gpu_smoke
from benchmarks.gpu_smoke import BOUNDS, TOY_SIZE, GpuSmokeArgs, Smoke, difference, main
from lingua.attention import Mask
from lingua.errors import UserError
from tests.support import ROOT, environment, run_app

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


def train_here(app: str, words: list[str], ranks: int = 1, **variables: str) -> Path:
    """In this process, which saves the seconds of its start."""
    assert ranks == 1
    run_app(app, words)
    return Path(words[0].removeprefix("dump_dir="))


@needs_no_gpu
def test_all_parts_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_smoke, "train", train_here)
    out = tmp_path / "out.json"
    main(GpuSmokeArgs(str(out), compile=False, minutes=60))
    result = json.loads(out.read_text())
    assert result["failed"] == []
    assert result["device"] == "CPU, at toy size: there is no GPU here"
    for app in ("bert", "crossbert"):
        part = result["parts"][f"training {app}"]
        assert part["loss_last"] < part["loss_first"]
        assert part["resumed_bit_for_bit"]
        assert part["view_tokens_per_second"] > 0
        assert part["memory_gb"] > 0
    checks = {check["name"]: check for check in result["checks"]}
    assert all(check["met"] and check["value"] <= check["bound"] for check in checks.values())
    for app in ("bert", "crossbert"):
        assert checks[f"here against float32 on the CPU: {app}"]["bound"] == BOUNDS["here against float32 on the CPU"]
        assert f"resumed against in one piece: {app}" in checks
    assert "FSDP2 on one rank against none: crossbert" in checks
    for case in ("self", "cross"):
        assert f"attention in bf16 against float64: sdpa, {case}" in checks
        assert checks[f"attention in float32 against float64: sdpa, {case}"]["value"] < 1e-5
    assert len(result["parts"]["attention sdpa"]["training"]) == 4
    for backend in ("flex", "varlen", "xformers"):
        part = result["parts"][f"attention {backend}"]
        for kind in ("bf16", "float32", "training"):
            assert part[kind].startswith(f"not run: model.attention={backend} cannot run here")
    assert result["parts"]["waits"]["not run"] == "no GPU: nothing to wait for"
    assert str(tmp_path) not in out.read_text()


@needs_no_gpu
def test_what_is_wrong_is_found_and_the_rest_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **variables: str) -> Path:
        raise RuntimeError("no training today")

    real = backends.attention

    def wrong_in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return real(q, k, v * (1.05 if q.dtype == torch.float32 else 1.0), mask)

    monkeypatch.setattr(gpu_smoke, "train", broken)
    monkeypatch.setattr(backends, "attention", wrong_in_float32)
    out = tmp_path / "out.json"
    with pytest.raises(UserError, match="training bert; training crossbert; attention sdpa; attention in float32"):
        main(GpuSmokeArgs(str(out), compile=False))
    result = json.loads(out.read_text())
    assert "no training today" in result["parts"]["training bert"]["failed"]
    unmet = [check["name"] for check in result["checks"] if not check["met"]]
    assert unmet == [f"attention in float32 against float64: sdpa, {case}" for case in ("self", "cross")]
    assert result["failed"][-2:] == unmet
    assert "loss and gradient norm" in result["parts"]["FSDP2 on one rank"]


def test_parts_that_would_begin_too_late_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(GpuSmokeArgs(str(out), minutes=0))
    result = json.loads(out.read_text())
    assert {part["not run"] for part in result["parts"].values()} == {"0 minutes were over"}
    assert result["checks"] == []


def test_the_cases_have_queries_that_see_nothing_and_documents_of_one_side() -> None:
    queries, keys = backends.cases(2, 64, torch.device("cpu"))["cross"]
    assert (queries.diff() >= 0).all()
    assert (keys.diff() >= 0).all()
    seen, asked = ({int(d) for d in part[0]} for part in (keys, queries))
    assert asked - seen
    assert seen - asked


def test_differences_by_hand() -> None:
    assert difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert difference([1.0], [1.0, 2.0]) == float("inf")
    assert difference([1.0, None], [1.0, 2.0]) == float("inf")  # what is not finite is written as null
    smoke = Smoke(GpuSmokeArgs("x"), torch.device("cpu"), TOY_SIZE, Path(), Path())
    for value in (0.02, 0.0100001, float("nan"), 0.01):
        smoke.check("here against float32 on the CPU", "bert", value)
    assert [check["met"] for check in smoke.checks] == [False, False, False, True]


@pytest.mark.slow
def test_as_a_user_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [sys.executable, "-m", "benchmarks.gpu_smoke", f"out={out}", "minutes=60"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["failed"] == []
    assert len(result["checks"]) >= 10
