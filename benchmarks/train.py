"""Training steps of ours beside the machine's bare matrix products and beside ``transformers``' encoders.

    python -m benchmarks.train out=docs/results/train.json

Two at a time are built, warmed up and timed in turns, so that whatever else changes, changes for both; a figure is the
median over rounds of the ratio of the two. All contestants (:mod:`benchmarks.contestants`) take the same shapes,
vocabulary, optimizer and precision. Beside these ratios stand what training spends on waiting, logging, checkpoints and
statistics, its peak memory at the output, and how fast it starts (:mod:`benchmarks.overheads`).

Bars, fixed before any run: ``BARS``. With ``toy=true`` all of it in two minutes, on sizes that say nothing: no bars.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from benchmarks.common import command, environment, write_result
from benchmarks.contestants import Contestant, Size, bare_products, ours, peer
from benchmarks.overheads import head_memory, shares_of_training, starts
from lingua.distributed import DTYPES, check_compiler, pick_device, pick_dtype
from lingua.errors import UserError
from lingua.files import optional

SIZES = {
    "28x768": Size(768, 28, 12, predictor_layers=6, rows=4),
    "6x256": Size(256, 6, 4, predictor_layers=2, rows=16),
}
TOY_SIZES = {
    "28x768": Size(32, 3, 2, predictor_layers=1, rows=2, seq_len=32, vocab_size=500),
    "6x256": Size(32, 2, 2, predictor_layers=1, rows=4, seq_len=32, vocab_size=500),
}
BARS = {  # at least; the last four at most
    "28x768: FLOP rate of bert over its bare products": 0.80,
    "28x768: FLOP rate of crossbert over its bare products": 0.80,
    "6x256: FLOP rate of bert over its bare products": 0.65,
    "6x256: FLOP rate of crossbert over its bare products": 0.65,
    "28x768: tokens of crossbert over bert, over their FLOPs ratio": 0.95,
    "28x768: bert over the fastest compiled peer": 1.0,
    "6x256: bert over the fastest compiled peer": 1.1,
    "peak memory at the output over the naive head's": 0.5,
    "time at the output over the naive head's": 1.05,
    "share of time that waits for data": 0.01,
    "share of time for logging, checkpoints and statistics": 0.02,
    "seconds to the first step": 20.0,
    "seconds of import lingua and --help": 3.0,
}
AT_MOST = ("peak memory", "time at", "share", "seconds")
PEERS = ("modernbert", "eurobert", "bert")


@dataclass
class TrainSpeedArgs:
    """Speed of training steps."""

    out: str = "???"  # JSON file to write
    rounds: int = 5  # of each pair
    dtype: str = "auto"  # precision of all: auto, bf16, fp32, fp64
    compile: bool = False  # compile the blocks of ours too (those of the peers are, where it says so)
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    rows: int | None = None  # in a step, instead of the size's own (two models of 28x768 at 4 rows fill 24 GB)
    parts: list[str] = field(default_factory=lambda: ["products", "crossbert", "peers", "overheads"])
    toy: bool = False  # tiny sizes, to try it

    def __post_init__(self) -> None:
        if unknown := set(self.sizes) - set(SIZES):
            raise UserError(f"sizes={sorted(unknown)}: expected some of {', '.join(SIZES)}")
        if unknown := set(self.parts) - {"products", "crossbert", "peers", "overheads"}:
            raise UserError(f"parts={sorted(unknown)}: expected some of products, crossbert, peers, overheads")
        if not self.sizes or not self.parts:
            raise UserError(f"sizes={self.sizes}, parts={self.parts}: expected at least one of each")
        for name in ("rounds", "rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1")


Maker = Callable[[], Contestant]


def in_turns(first: Contestant, second: Contestant, rounds: int, device: torch.device) -> list[tuple[float, float]]:
    """Seconds of a step of each, round by round, after three of each, until when memory is still being taken."""

    def seconds(contestant: Contestant) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        contestant.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        first.step(), second.step()
    return [(seconds(first), seconds(second)) for _ in range(rounds)]


class Comparison:
    """Pairs of contestants, timed in turns, and what came out."""

    def __init__(self, args: TrainSpeedArgs) -> None:
        self.args, self.device = args, pick_device()
        self.dtype = pick_dtype(args.dtype, self.device)
        self.seconds: list[dict[str, Any]] = []
        self.figures: dict[str, float] = {}

    def time(self, size_name: str, first: Maker, second: Maker) -> tuple[Contestant, Contestant, list[float]]:
        """Both contestants, and by round how many times longer a step of the second took."""
        a, b = first(), second()
        rounds = in_turns(a, b, self.args.rounds, self.device)
        record = {"size": size_name}
        for contestant, times in zip((a, b), zip(*rounds, strict=True), strict=True):
            record[contestant.name] = {
                "seconds": [round(t, 4) for t in times],
                "tokens_per_second": round(contestant.tokens / median(times)),
            }
        self.seconds.append(record)
        speeds = (f"{name} {known['tokens_per_second']:,}" for name, known in record.items() if name != "size")
        print(f"{size_name}: tokens/s: {', '.join(speeds)}", flush=True)
        return a, b, [t_b / t_a for t_a, t_b in rounds]

    def contestants(self, size: Size) -> tuple[Callable[..., Maker], Callable[..., Maker], Callable[..., Maker]]:
        """Makers of ours, bare products and peers at a size."""
        common = self.device, self.dtype
        return (
            lambda kind: lambda: ours(kind, size, *common, self.args.compile),
            lambda kind: lambda: bare_products(kind, size, *common),
            lambda *kind: lambda: peer(kind[0], size, *common, *kind[1:]),
        )

    def products(self, name: str, size: Size) -> None:
        """FLOP rates of whole steps over those of the bare products."""
        our, bare, _ = self.contestants(size)
        for kind in ("bert", "crossbert"):
            step, products, slower = self.time(name, our(kind), bare(kind))
            ratio = median(slower) * step.products / products.products
            self.figures[f"{name}: FLOP rate of {kind} over its bare products"] = ratio

    def crossbert(self, name: str, size: Size) -> None:
        """CrossBERT and ELECTRA beside BERT, in tokens as the paper counts them."""
        our, _, _ = self.contestants(size)
        for kind in ("crossbert", "electra"):
            step, bert, slower = self.time(name, our(kind), our("bert"))
            speed = median(slower) * step.tokens / bert.tokens
            cost = (bert.all_flops / bert.tokens) / (step.all_flops / step.tokens)
            self.figures[f"{name}: tokens of {kind} over bert"] = speed
            self.figures[f"{name}: FLOPs ratio of bert and {kind}"] = cost
            self.figures[f"{name}: tokens of {kind} over bert, over their FLOPs ratio"] = speed / cost

    def peers(self, name: str, size: Size) -> None:
        """Our BERT beside each peer: equal lengths, compiled and eager; and as it is shipped."""
        our, _, others = self.contestants(size)
        compiled = []
        for kind in PEERS:
            for compile, as_shipped in ((True, False), (False, False), (False, True)):
                bert, other, slower = self.time(name, our("bert"), others(kind, compile, as_shipped))
                ratio = median(slower) * bert.tokens / other.tokens
                self.figures[f"{name}: bert over {other.name}"] = ratio
                compiled += [ratio] if compile else []
        self.figures[f"{name}: bert over the fastest compiled peer"] = min(compiled)


def bars(figures: dict[str, float]) -> list[dict[str, Any]]:
    """Each bar whose figure was measured: name, value, bound, and whether it is met."""
    result = []
    for name, bound in BARS.items():
        if name in figures:
            value = figures[name]
            met = value <= bound if name.startswith(AT_MOST) else value >= bound
            result.append({"name": name, "value": round(value, 4), "bound": bound, "met": met})
    return result


def measure(args: TrainSpeedArgs, part: str, name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures and step times of one part at one size."""
    comparison = Comparison(args)
    size = (TOY_SIZES if args.toy else SIZES)[name]
    getattr(comparison, part)(name, replace(size, rows=args.rows or size.rows))
    return comparison.figures, comparison.seconds


def main(args: TrainSpeedArgs) -> None:
    """Time everything, print the table, write the JSON. Raises UserError if a part ended without figures."""
    if "peers" in args.parts:
        optional("transformers", "benchmarks.train with parts=[..., peers]", "requirements-eval.txt")
        check_compiler(pick_device())
    device = pick_device()
    dtype = pick_dtype(args.dtype, device)
    figures: dict[str, float] = {}
    seconds: list[dict[str, Any]] = []
    lost = []
    for name in args.sizes:
        for part in args.parts:
            if part == "overheads":
                continue
            try:  # each in a process of its own: one that has trained keeps the memory it had at most
                with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                    found, times = alone.submit(measure, args, part, name).result()
            except BrokenProcessPool:
                lost.append(f"{part} of {name}")
                continue
            figures |= found
            seconds += times
    if "overheads" in args.parts:
        figures |= head_memory(dtype, args.rounds, args.toy)
        figures |= shares_of_training(args.toy) | ({} if args.toy else starts())
    result = {
        "dtype": next(name for name, known in DTYPES.items() if known == dtype),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "compile": args.compile,
        "rounds": args.rounds,
        "rows": args.rows,
        "toy": args.toy,
        "bars": [] if args.toy else bars(figures),
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "killed": lost,
        "steps": seconds,
    }
    write_result(args.out, {**result, **environment("torch", "transformers", "numpy")})
    for bar in result["bars"]:
        sign = "<=" if bar["name"].startswith(AT_MOST) else ">="
        print(f"{'met' if bar['met'] else 'MISSED':7s}{bar['name']}: {bar['value']:.3g} ({sign} {bar['bound']})")
    if lost:
        raise UserError(
            f"killed while measuring, as a rule for want of memory: {', '.join(lost)}. The rest is in {args.out}"
        )


if __name__ == "__main__":
    command(TrainSpeedArgs, main, "python -m benchmarks.train")
