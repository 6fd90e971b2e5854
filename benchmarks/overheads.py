"""What training costs beside its steps: memory and time at the output, waiting, logging, checkpoints, starting."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.bert.train import BertTrainArgs, train
from benchmarks.made_up import prepare_text
from lingua import stats
from lingua.args import parse
from lingua.distributed import precision
from lingua.logger import Logger
from lingua.loss import cross_entropy
from lingua.metrics import read_metrics
from lingua.saving import Checkpointer

TOKENS, DIM, VOCABULARY = 8192, 768, 50265  # at the output
CADENCE = {"logging": 10, "checkpoints": 1000, "statistics": 100}  # steps; the first two are the defaults
STEPS = 40


def head_step(kind: str, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Loss and gradients at the output: ``ours``, or ``naive``, with all logits at once."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(tokens, DIM, generator=generator).requires_grad_()
    weight_VD = (torch.randn(VOCABULARY, DIM, generator=generator) * 0.02).requires_grad_()
    targets_N = torch.randint(VOCABULARY, (tokens,), generator=generator)

    def loss() -> Tensor:
        if kind == "ours":
            return cross_entropy(x_ND, weight_VD, targets_N, torch.ones(tokens)).loss
        return F.cross_entropy(F.linear(x_ND, weight_VD).float(), targets_N, reduction="sum")

    def step() -> None:
        x_ND.grad = weight_VD.grad = None
        with precision(dtype, x_ND.device):
            result = loss()
        result.backward()

    return step


def _head_growth(kind: str, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a step of this process takes at most beyond what it has before (Linux)."""
    torch.set_num_threads(1)
    step = head_step(kind, tokens, dtype)
    # Not getrusage: its peak is that of the parent too, which a new process inherits.
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def head_memory(dtype: torch.dtype, rounds: int, toy: bool) -> dict[str, float]:
    """Peak memory and time of our loss over those of the naive one, on the CPU."""
    tokens = 512 if toy else TOKENS
    peaks = {}
    for kind in ("ours", "naive"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a peak can only be read of a fresh process
            peaks[kind] = pool.apply(_head_growth, (kind, tokens, dtype))
    steps = {kind: head_step(kind, tokens, dtype) for kind in peaks}
    ratios = []
    for number in range(rounds + 1):
        seconds = {}
        for kind, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[kind] = time.perf_counter() - start
        if number:  # the first is to warm up
            ratios.append(seconds["ours"] / seconds["naive"])
    return {
        "peak GB at the output": peaks["ours"] / 1e9,
        "peak GB at the naive output": peaks["naive"] / 1e9,
        "peak memory at the output over the naive head's": peaks["ours"] / peaks["naive"],
        "time at the output over the naive head's": median(ratios),
    }


@contextmanager
def _timed(owner: Any, names: tuple[str, ...], seconds: list[float]) -> Iterator[None]:
    """Collect how long each call of some functions of ``owner`` takes."""

    def wrap(function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        return timed

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


def shares_of_training(toy: bool) -> dict[str, float]:
    """Shares of the time of a real run (``apps.bert.train``, 6 x 256): waiting for data, and keeping records of it.

    What each record, checkpoint and set of statistics costs the loop is measured, and counted at ``CADENCE``.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    ends: list[float] = []
    real_step = Logger.step

    def step_ends(self: Logger, step: int) -> None:
        ends.append(time.perf_counter())
        real_step(self, step)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        run = Path(folder) / "run"
        shape = {"dim": 32, "n_layers": 2, "n_heads": 2} if toy else {"dim": 256, "n_layers": 6, "n_heads": 4}
        words = {
            "dump_dir": run, "data.root_dir": prepare_text(Path(folder), "roberta", 20_000),
            "data.seq_len": 64 if toy else 512, "batch_tokens": 1024 if toy else 8192, "micro_rows": 16,
            "steps": STEPS, "logging.every": 10, "stats.every": 10, "checkpoint.dump.every": 20,
            **{f"model.{name}": value for name, value in shape.items()},
        }  # fmt: skip
        for owner, names, kind in (
            (Logger, ("say", "write"), "logging"),
            (Checkpointer, ("save",), "checkpoints"),
            (stats, ("forward_statistics", "parameter_statistics"), "statistics"),
        ):
            patches.enter_context(_timed(owner, names, spent[kind]))
        patches.enter_context(mock.patch.object(Logger, "step", step_ends))
        train(parse(BertTrainArgs, [f"{key}={value}" for key, value in words.items()]))
        waited = [record["data_wait_share"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    step_seconds = median(later - earlier for earlier, later in itertools.pairwise(ends))
    events = {"logging": STEPS / 10, "checkpoints": STEPS / 20, "statistics": STEPS / 10}
    costs = {kind: sum(spent[kind]) / events[kind] / step_seconds / CADENCE[kind] for kind in CADENCE}
    return {
        "share of time that waits for data": median(waited),
        **{f"share of time for {kind}": cost for kind, cost in costs.items()},
        "share of time for logging, checkpoints and statistics": sum(costs.values()),
    }


def starts() -> dict[str, float]:
    """Seconds of ``import lingua`` and ``--help`` (the longer), and from the command to the first step of 28 x 768."""
    helps = []
    for words in (["-c", "import lingua"], ["-m", "apps.bert.train", "--help"], ["-m", "lingua.stool", "--help"]):
        times = []
        for _ in range(2):  # the first time, files come from the disk
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        helps.append(min(times))
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_text(Path(folder), "roberta")
        words = {"dump_dir": f"{folder}/run", "data.root_dir": data, "steps": 2, "logging.every": 1, "dtype": "auto"}
        words |= {"batch_tokens": 1024, "micro_rows": 1, "checkpoint.dump.every": 10}
        command = [sys.executable, "-m", "apps.crossbert.train", "config=apps/crossbert/configs/base.yaml"]
        command += [f"{key}={value}" for key, value in words.items()]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        metrics = Path(folder) / "run/metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {process.stderr.read()}")
            time.sleep(0.05)
        first = time.perf_counter() - start
        process.kill()
        process.wait()
    return {"seconds to the first step": first, "seconds of import lingua and --help": max(helps)}
