"""What a GPU makes of both models: tokens a second of the real apps, and where the time goes. Unattended, in minutes.

    python -m benchmarks.gpu out=docs/results/gpu.json

28 x 768, compiled, in bf16: BERT (20% masked) and CrossBERT (50% hidden, 6-layer predictor) are trained by their own
``train.py`` on made-up text, and one step of each is traced: its kernels are added up by kind. Beside it stand the rate
of one large bf16 product (what the device can do), each kernel of attention at the lengths the models have, and steps
in this process over batch sizes, ways to compile and activation checkpointing, with their peak memory. Parts run in
the order of what matters; those that would begin after ``minutes`` are left out, and said to be. Without a GPU it
does the same at toy size, which says nothing about speed.

Bars, fixed before any run, for one H200: ``BARS``.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.backends import backend_errors, milliseconds
from benchmarks.common import command, environment, run_parts, write_result
from benchmarks.contestants import Size, ours
from benchmarks.gpu_smoke import train
from benchmarks.made_up import prepare_text
from lingua.attention import BACKENDS
from lingua.distributed import COMPILE_MODES, DistributedArgs, pick_device, pick_dtype
from lingua.errors import UserError
from lingua.metrics import read_metrics

GPU_SIZE = Size(768, 28, 12, predictor_layers=6, rows=64)
TOY_SIZE = Size(32, 2, 2, predictor_layers=1, rows=4, seq_len=32)
SWEPT_ROWS = (16, 32, 64, 128, 256)  # of a micro-batch
MICRO_BATCHES = 4  # of a step of the apps
STEPS, EVERY, TRACED = 30, 5, 28  # of the apps; a step that is traced spoils the record it belongs to
BARS = {  # at least, on one H200
    "bert: tokens a second": 250e3,  # the paper has 123k on an H100
    "crossbert: tokens a second": 390e3,  # 207k
    "bert: FLOP rate over that of one product": 0.45,
    "crossbert: FLOP rate over that of one product": 0.45,
    "tokens of crossbert over bert, over their FLOPs ratio": 0.95,
}
# The first pattern found in a kernel's name, in lower case, tells its kind.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|mha_",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitk",
    "communication": r"nccl",
    "optimizer and gradient norm": r"multi_tensor|adam|lpnorm",
    "softmax at the output": r"softmax|logsumexp",
    "fused by the compiler": r"triton",
    "copies": r"memcpy|memset|copy",
    "element by element and reductions": r"elementwise|reduce|vectorized|index|gather|scatter|catarray",
}


@dataclass
class GpuArgs:
    """Speed of training on this machine's GPU."""

    out: str = "???"  # JSON file to write
    compile: bool = True  # compile the blocks in the apps and in the sweep over batch sizes
    minutes: float = 6.5  # parts that would begin later are left out

    def __post_init__(self) -> None:
        if not self.minutes >= 0:
            raise UserError(f"minutes={self.minutes}: expected a number of minutes, 0 or more")


@dataclass
class Bench:
    """What all parts know and what they found."""

    args: GpuArgs
    device: torch.device
    size: Size
    folder: Path
    figures: dict[str, float]

    @property
    def dtype(self) -> torch.dtype:
        return pick_dtype("auto", self.device)


def product(bench: Bench) -> dict[str, Any]:
    """Rate of one large square product in the apps' precision, in TFLOP/s."""
    n = 8192 if bench.device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    rate = 2 * n**3 / (milliseconds(lambda: a @ b, bench.device) * 1e-3) / 1e12
    bench.figures["TFLOP/s of one product"] = rate
    return {"n": n, "tflops": rate}


def app(bench: Bench, name: str) -> dict[str, Any]:
    """``python -m apps.NAME.train``, as a user starts it: speed, memory, and the kernels of one step by kind."""
    size, views = bench.size, {"bert": 1, "crossbert": 2}[name]
    values = {
        "config": f"apps/{name}/configs/base.yaml",
        "dump_dir": bench.folder / name,
        "data.root_dir": bench.folder / "data",
        "data.seq_len": size.seq_len,
        **{f"model.{field}": getattr(size, field) for field in ("dim", "n_layers", "n_heads")},
        "batch_tokens": MICRO_BATCHES * size.rows * size.seq_len * views,
        "micro_rows": size.rows,
        "steps": STEPS,
        "flops": "null",
        "dtype": "auto",
        "compile": str(bench.args.compile).lower(),
        "optim.warmup": 5,
        "logging.every": EVERY,
        "logging.tensorboard": "false",
        "checkpoint.dump.every": 10 * STEPS,
        "profiling.steps": f"[{TRACED}]",
        "profiling.memory": "false",
    }
    if name == "crossbert":
        values["model.predictor.n_layers"] = size.predictor_layers
    begun = time.monotonic()
    run = train(name, [f"{key}={value}" for key, value in values.items()])
    records = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    # The first contains compilation, the last the trace.
    fair = [r for r in records if r["step"] > EVERY and not r["step"] - EVERY < TRACED <= r["step"]]
    speed = median(r["tokens_per_second"] for r in fair)
    tflops = median(r["tflops"] for r in fair)
    bench.figures[f"{name}: tokens a second"] = speed
    bench.figures[f"{name}: FLOP rate over that of one product"] = tflops / bench.figures["TFLOP/s of one product"]
    bench.figures[f"{name}: FLOPs a token"] = tflops * 1e12 / speed
    if name == "crossbert" and "bert: tokens a second" in bench.figures:
        ratio = bench.figures["bert: FLOPs a token"] / bench.figures["crossbert: FLOPs a token"]
        faster = speed / bench.figures["bert: tokens a second"]
        bench.figures["tokens of crossbert over bert"] = faster
        bench.figures["FLOPs ratio of bert and crossbert"] = ratio
        bench.figures["tokens of crossbert over bert, over their FLOPs ratio"] = faster / ratio
    (trace,) = (run / "profile").glob("*.json.gz")
    return {
        "view_tokens_per_second": [r["tokens_per_second"] for r in fair],
        "tflops": tflops,
        "data_wait_share": max(r["data_wait_share"] for r in fair),
        "memory_gb": max(r["memory_gb"] for r in records),
        "losses": [r["loss"] for r in records],
        "seconds_of_the_command": round(time.monotonic() - begun, 1),
        "traced_step": by_kind(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]),
    }


def by_kind(events: list[dict[str, Any]]) -> dict[str, Any] | str:
    """Milliseconds of the kernels in a trace by kind, of no kernel at all, and the slowest of those of no known kind.

    ``largest besides products`` names the kind, or idling, where the most time is that no product needs.
    """
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return "no kernel of a GPU in the trace"
    spent: dict[str, float] = defaultdict(float)
    unknown: dict[str, float] = defaultdict(float)
    busy, end = 0.0, 0.0
    for event in sorted(kernels, key=lambda e: e["ts"]):
        name = event["name"].lower()
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")
        spent[kind] += event["dur"] / 1e3
        if kind == "others":
            unknown[event["name"][:120]] += event["dur"] / 1e3
        start, stop = event["ts"], event["ts"] + event["dur"]
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    spent["idle"] = (end - min(e["ts"] for e in kernels) - busy) / 1e3
    ordered = dict(sorted(spent.items(), key=lambda item: -item[1]))
    return {
        "ms": {kind: round(ms, 2) for kind, ms in ordered.items()},
        "largest besides products": next(kind for kind in ordered if kind != "matrix products"),
        "others": {name: round(ms, 2) for name, ms in sorted(unknown.items(), key=lambda item: -item[1])[:8]},
    }


def attention_kernels(bench: Bench) -> dict[str, Any]:
    """Milliseconds of attention, forward and backward, of one layer: whole rows by kernel, documents by backend."""
    size, result = bench.size, {}
    half = size.seq_len // 2
    for case, rows, n in (("bert, whole rows", size.rows, size.seq_len), ("crossbert, half rows", size.rows, half)):
        shape = (rows, size.n_heads, n, size.dim // size.n_heads)
        q, k, v = (torch.randn(shape, device=bench.device, dtype=bench.dtype).requires_grad_() for _ in range(3))

        def step(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

        found: dict[str, Any] = {"as chosen by PyTorch": milliseconds(step, bench.device)}
        for kernel in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            try:
                with sdpa_kernel(getattr(SDPBackend, kernel)):
                    found[kernel.lower()] = milliseconds(step, bench.device)
            except RuntimeError as error:
                found[kernel.lower()] = f"not run: {str(error).splitlines()[0]}"
        result[case] = found
    shape = (size.rows, size.seq_len, size.n_heads, size.dim // size.n_heads)
    for backend in BACKENDS[1:]:
        errors = backend_errors(backend, bench.dtype, bench.device, *shape)
        result[f"documents, {backend}"] = (
            errors if isinstance(errors, str) else {case: found["ms"] for case, found in errors.items()}
        )
    return result


def sweep(bench: Bench, kind: str, settings: dict[str, tuple[int, bool, DistributedArgs]]) -> dict[str, Any]:
    """View tokens a second, optimizer included, and peak memory of steps in this process, by name of a setting."""
    result: dict[str, Any] = {}
    for name, (rows, compile, distributed) in settings.items():
        torch.compiler.reset()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            size = replace(bench.size, rows=rows)
            contestant = ours(kind, size, bench.device, bench.dtype, compile, distributed)
            ms = milliseconds(contestant.step, bench.device, repeats=5)
        except torch.cuda.OutOfMemoryError:
            result[name] = "not enough memory"
            continue
        result[name] = {"tokens_per_second": round(contestant.tokens / ms * 1e3)}
        if bench.device.type == "cuda":
            result[name]["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return result


def parts(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to run, by name, the most important first."""
    plain, compile = DistributedArgs(), bench.args.compile
    rows = SWEPT_ROWS if bench.device.type == "cuda" else (bench.size.rows,)
    batches = {f"{n} rows": (n, compile, plain) for n in rows}
    ways = {"not compiled": (bench.size.rows, False, plain)}
    for mode in ("selective", "block"):
        changed = DistributedArgs(activation_checkpointing=mode)
        ways[f"activation checkpointing: {mode}"] = (bench.size.rows, compile, changed)
    for mode in COMPILE_MODES if compile else ():
        ways[f"compile mode {mode}"] = (bench.size.rows, True, DistributedArgs(compile_mode=mode))
    result: dict[str, Callable[[], dict[str, Any]]] = {"product": lambda: product(bench)}
    result |= {name: (lambda name=name: app(bench, name)) for name in ("bert", "crossbert")}
    result["attention"] = lambda: attention_kernels(bench)
    for what, settings in (("batch size", batches), ("ways", ways)):
        for kind in ("crossbert", "bert"):
            result[f"{what}, {kind}"] = lambda kind=kind, settings=settings: sweep(bench, kind, settings)
    return result


def bars(figures: dict[str, float]) -> list[dict[str, Any]]:
    """Each bar whose figure was measured."""
    return [
        {"name": name, "value": figures[name], "bound": bound, "met": figures[name] >= bound}
        for name, bound in BARS.items()
        if name in figures
    ]


def driver() -> str | None:
    """Name, driver and memory of the GPUs as ``nvidia-smi`` has them."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(args: GpuArgs) -> None:
    """Run the parts, write the JSON after each in case the time runs out, print the bars; UserError if one failed."""
    begun, device = time.monotonic(), pick_device()
    is_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args, device, GPU_SIZE if is_gpu else TOY_SIZE, Path(name), {})
        prepare_text(bench.folder, "roberta")

        def keep(found: dict[str, Any]) -> None:
            Path(args.out).write_text(json.dumps({"bars": bars(bench.figures), "parts": found}))

        found = run_parts(parts(bench), args.minutes, keep)
    result = {
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU, at toy size: there is no GPU here",
        "driver": driver() if is_gpu else None,
        "cuda": torch.version.cuda,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "compile": args.compile,
        "seconds": round(time.monotonic() - begun, 1),
        "bars": bars(bench.figures) if is_gpu else [],
        "figures": bench.figures,
        "parts": found,
        **environment("torch", "numpy"),
    }
    write_result(args.out, result)
    for bar in result["bars"]:
        print(f"{'met' if bar['met'] else 'MISSED':7s}{bar['name']}: {bar['value']:.4g} (>= {bar['bound']:g})")
    if failed := [part for part, result in found.items() if "failed" in result]:
        last = found[failed[0]]["failed"].strip().splitlines()[-1]
        raise UserError(f"{len(failed)} parts failed ({', '.join(failed)}), the first by {last}: see {args.out}")
    if is_gpu and (lacking := set(BARS) - set(bench.figures)):
        raise UserError(f"bars not measured for want of time: {'; '.join(sorted(lacking))}: give more minutes")


if __name__ == "__main__":
    command(GpuArgs, main, "python -m benchmarks.gpu")
