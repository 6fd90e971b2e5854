"""Does everything that needs a GPU work on this machine? Unattended, in minutes, on made-up text.

python -m benchmarks.gpu_smoke out=FILE.json

Trains both apps with their ``train.py`` as a user would, compiled, in bf16 where the hardware has it: losses against
the same run on the CPU in float32, a resumed run against one in one piece, all GPUs against one, FSDP2 on a single rank
against no FSDP2; each attention backend against float64, forward and gradients, and in training; and counts how often a
step that is not logged waits for the device. Without a GPU it does the same at toy size with what the CPU has, and says
so. What a machine cannot do is recorded with the reason; a check that fails ends the program with status 2, after all
others.

Bounds, fixed before any run: ``BOUNDS``.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from apps.crossbert.model import CrossBert, CrossBertArgs
from benchmarks.backends import backend_errors
from benchmarks.common import command, environment, run_parts, write_result
from benchmarks.made_up import prepare_text
from lingua.args import parse
from lingua.attention import BACKENDS, check_attention
from lingua.distributed import DistributedArgs, World, full, parallelize, pick_device, pick_dtype, precision
from lingua.errors import UserError
from lingua.masking import complementary_views
from lingua.metrics import read_metrics
from lingua.run import Run

APPS = ("bert", "crossbert")
BOUNDS = {  # largest relative difference of any step's loss, unless it says otherwise
    "here against float32 on the CPU": 1e-2,
    "resumed against in one piece": 1e-3,
    "all GPUs against one": 1e-3,
    "FSDP2 on one rank against none": 1e-3,  # of the loss and of the gradients' norm
    "a backend against sdpa in training": 1e-2,
    "attention in bf16 against float64": 2e-2,  # norm of the difference over the norm, output and gradients
    "attention in float32 against float64": 2e-3,  # products may be TF32
    "waits in a step that is not logged": 0,  # with attention over whole rows, or flex within documents
}


@dataclass
class Size:
    """Of the models and rows."""

    dim: int
    n_layers: int
    n_heads: int
    seq_len: int
    rows: int
    steps: int
    rows_of_attention: int
    positions_of_attention: int


GPU_SIZE = Size(256, 4, 4, 128, 32, 10, 8, 512)
TOY_SIZE = Size(32, 2, 2, 32, 8, 6, 2, 64)


@dataclass
class GpuSmokeArgs:
    """Try on this machine what needs a GPU, or the same at toy size on the CPU."""

    out: str = "???"  # JSON file to write
    compile: bool = True  # compile blocks, as one does on a GPU
    minutes: float = 4.5  # parts that would begin later are left out, and said to be

    def __post_init__(self) -> None:
        if not self.minutes >= 0:
            raise UserError(f"minutes={self.minutes}: expected a number of minutes, 0 or more")


@dataclass
class Smoke:
    """What is known to all parts."""

    args: GpuSmokeArgs
    device: torch.device
    size: Size
    folder: Path
    data: Path
    checks: list[dict[str, Any]] = field(default_factory=list)

    def check(self, bound: str, of: str, value: float) -> None:
        """Record a figure beside the bound of that name."""
        met = value <= BOUNDS[bound]  # false for NaN
        self.checks.append({"name": f"{bound}: {of}", "value": value, "bound": BOUNDS[bound], "met": met})

    def words(self, app: str, run: str, **changes: object) -> list[str]:
        """Command-line words of a training run; keys of ``changes`` write dots as two underscores."""
        views = {"bert": 1, "crossbert": 2}[app]
        values: dict[str, Any] = {
            "dump_dir": self.folder / run,
            "data.root_dir": self.data,
            "data.validation.text": self.data / "text/valid",
            "data.seq_len": self.size.seq_len,
            "batch_tokens": self.size.rows * self.size.seq_len * views,
            "micro_rows": self.size.rows // 2,
            "steps": self.size.steps,
            "compile": str(self.args.compile).lower(),
            "model.dim": self.size.dim,
            "model.n_layers": self.size.n_layers,
            "model.n_heads": self.size.n_heads,
            "optim.lr": 1e-3,
            "logging.every": 1,
            "logging.tensorboard": "false",
            "checkpoint.dump.every": self.size.steps // 2,
            "validation.every": self.size.steps,
            "validation.rows": self.size.rows,
        }
        if app == "crossbert":
            values["model.predictor.n_layers"] = 2
        return [f"{k}={v}" for k, v in (values | {k.replace("__", "."): v for k, v in changes.items()}).items()]


def train(app: str, words: list[str], ranks: int = 1, **variables: str) -> Path:
    """``python -m apps.APP.train WORDS`` to its end, or the same on ``ranks`` ranks; returns the run folder."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", f"apps.{app}.train", *words]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[-4000:])
    return Path(next(word for word in words if word.startswith("dump_dir=")).partition("=")[2])


def losses(run: Path) -> list[float]:
    """Training losses by step."""
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def difference(found: list[float], expected: list[float]) -> float:
    """Largest relative difference; infinite if there are not as many or one is no number."""
    pairs = list(zip(found, expected, strict=False))
    if len(found) != len(expected) or any(a is None or b is None for a, b in pairs):
        return float("inf")
    return max(abs(a / b - 1) for a, b in pairs)


def training(smoke: Smoke, app: str) -> dict[str, Any]:
    """One run here, on the CPU, resumed from its middle, and on all GPUs."""
    whole = train(app, smoke.words(app, f"{app}/whole"))
    found = losses(whole)
    cpu = train(app, smoke.words(app, f"{app}/cpu", dtype="fp32", compile="false"), CUDA_VISIBLE_DEVICES="")
    smoke.check("here against float32 on the CPU", app, difference(found, losses(cpu)))
    resumed = smoke.folder / app / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / f"checkpoints/{smoke.size.steps:010d}")
    train(app, smoke.words(app, f"{app}/resumed"))
    if "resumed" not in (resumed / "train.log").read_text():
        raise RuntimeError("the run did not go on from its checkpoint")
    smoke.check("resumed against in one piece", app, difference(losses(resumed), found))
    records = [record for record in read_metrics(whole / "metrics.jsonl") if "loss" in record]
    result = {
        "loss_first": found[0],
        "loss_last": found[-1],
        "resumed_bit_for_bit": losses(resumed) == found,
        "view_tokens_per_second": median(record["tokens_per_second"] for record in records[len(records) // 2 :]),
        "memory_gb": max(record["memory_gb"] for record in records),
        "all_gpus": f"not run: {torch.cuda.device_count()} GPUs",
    }
    if torch.cuda.device_count() > 1:
        together = train(app, smoke.words(app, f"{app}/all", distributed__dp_shard=-1), torch.cuda.device_count())
        smoke.check("all GPUs against one", app, difference(losses(together), found))
        result["all_gpus"] = torch.cuda.device_count()
    return result


def one_rank_fsdp(smoke: Smoke) -> dict[str, Any]:
    """Loss and gradient norm of a CrossBERT without process group, and of one that is sharded over a single rank."""
    size, device, dtype = smoke.size, smoke.device, pick_dtype("auto", smoke.device)
    tokens_BS = torch.randint(5, 1000, (size.rows, size.seq_len), generator=torch.Generator().manual_seed(0)).to(device)
    (view,) = complementary_views(torch.arange(size.rows, device=device), size.seq_len, 0.5, 0)

    def figures() -> list[float]:
        with torch.device("meta"):
            model = CrossBert(CrossBertArgs(size.dim, size.n_layers, size.n_heads, 1000))
        parallelize(model, World(device), DistributedArgs(), dtype, smoke.args.compile)
        with precision(dtype, device):
            loss, targets = model(tokens_BS, view)
        loss.backward()
        norm = full(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return [float(loss.detach() / targets), float(norm / targets)]

    plain = figures()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = figures()
    finally:
        dist.destroy_process_group()
    smoke.check("FSDP2 on one rank against none", "crossbert", difference(sharded, plain))
    return {"loss and gradient norm": {"plain": plain, "sharded": sharded}}


def attention_backend(smoke: Smoke, backend: str) -> dict[str, Any]:
    """A backend against float64 in both precisions, and in the training of a CrossBERT against sdpa."""
    size, device = smoke.size, smoke.device
    shape = (size.rows_of_attention, size.positions_of_attention, size.n_heads, size.dim // size.n_heads)
    result: dict[str, Any] = {}
    for kind, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        result[kind] = found = backend_errors(backend, dtype, device, *shape)
        for case in () if isinstance(found, str) else found:
            errors = found[case]["errors"]
            smoke.check(f"attention in {kind} against float64", f"{backend}, {case}", max(errors))
    compile = smoke.args.compile and backend != "xformers"
    try:
        check_attention(backend, True, [shape[-1]], device, pick_dtype("auto", device), compile)
    except UserError as error:
        return result | {"training": f"not run: {error}"}
    options = {"data__isolate_documents": "true", "model__attention": backend, "compile": str(compile).lower()}
    words = smoke.words("crossbert", f"attention/{backend}", steps=4, checkpoint__dump__every=4, **options)
    result["training"] = losses(train("crossbert", words))
    plain = losses(smoke.folder / "attention/sdpa")
    smoke.check("a backend against sdpa in training", backend, difference(result["training"], plain))
    return result


def waits(smoke: Smoke) -> dict[str, Any]:
    """How often the host waited for the device in steps 4 to 8, none of which is logged."""
    if smoke.device.type != "cuda":
        return {"not run": "no GPU: nothing to wait for"}
    result: dict[str, Any] = {}
    options = {"logging__every": 100, "steps": 10, "checkpoint__dump__every": 100, "validation__every": 100}
    for app, isolated in (("bert", "false"), ("crossbert", "false"), ("crossbert", "true")):
        name = f"{app}, {'documents, flex' if isolated == 'true' else 'whole rows'}"
        words = smoke.words(app, f"waits/{name}", data__isolate_documents=isolated, **options)
        seen = _train_and_watch(app, words, first=4, last=8)
        smoke.check("waits in a step that is not logged", name, len(seen) / 5)
        result[name] = {"a_step": len(seen) / 5, "where": sorted(set(seen))}
    return result


def _train_and_watch(app: str, words: list[str], first: int, last: int) -> list[str]:
    """Train in this process; file and line of every wait in the steps from ``first`` to ``last``."""
    real = Run.steps

    def steps(run: Run, *args: Any) -> Iterator:
        for step, micro_batches in real(run, *args):
            torch.cuda.set_sync_debug_mode("warn" if first <= step <= last else "default")
            yield step, micro_batches

    module = importlib.import_module(f"apps.{app}.train")
    args_class = next(value for name, value in vars(module).items() if name.endswith("TrainArgs"))
    with mock.patch.object(Run, "steps", steps), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module.train(parse(args_class, words))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    own = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in own]


def main(args: GpuSmokeArgs) -> None:
    """Run all parts, write the JSON, and raise UserError if a check failed."""
    begun, device = time.monotonic(), pick_device()
    is_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        smoke = Smoke(args, device, GPU_SIZE if is_gpu else TOY_SIZE, folder, prepare_text(folder, "roberta"))
        parts = {f"training {app}": partial(training, smoke, app) for app in APPS}
        parts |= {"FSDP2 on one rank": partial(one_rank_fsdp, smoke), "waits": partial(waits, smoke)}
        parts |= {f"attention {backend}": partial(attention_backend, smoke, backend) for backend in BACKENDS[1:]}
        results = run_parts(parts, args.minutes)
    failed = [part for part, result in results.items() if "failed" in result]
    failed += [check["name"] for check in smoke.checks if not check["met"]]
    result = {
        **environment("torch"),
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU, at toy size: there is no GPU here",
        "dtype": str(pick_dtype("auto", device)).removeprefix("torch."),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "seconds": round(time.monotonic() - begun, 1),
        "failed": failed,
        "checks": smoke.checks,
        "parts": results,
    }
    write_result(args.out, result)
    if failed:
        raise UserError(f"{len(failed)} of {len(smoke.checks)} checks and parts failed: {'; '.join(failed)}")


if __name__ == "__main__":
    command(GpuSmokeArgs, main, "python -m benchmarks.gpu_smoke")
