"""How the speed of training changes with row length, batch, hidden ratio and ranks, beside what FLOPs predict.

    python -m benchmarks.curves out=docs/results/curves.json plot=docs/images/curves

Training steps as in benchmarks.train, each timed in turns with a step of its family's reference (512 tokens, as many
rows as the size has, the paper's hidden ratio), so that a machine that is slower for a while is so for both. The line
through the reference says how fast the others would be if every FLOP took as long as it does there. What lies above it
is FLOPs that are cheaper there, what lies below costs that are no FLOPs. Ranks are processes of the real app on this
machine's CPUs, one thread each, the model sharded over all of them: with more of them than CPUs they show what sharing
costs, not speed.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from apps.plots.style import FAMILY_COLORS, FAMILY_NAMES, legend, panels, save
from benchmarks.common import command, environment, write_result
from benchmarks.contestants import Contestant, Size, ours
from benchmarks.gpu_smoke import train
from benchmarks.made_up import prepare_text
from benchmarks.train import in_turns
from lingua.distributed import pick_device, pick_dtype
from lingua.errors import UserError
from lingua.metrics import read_metrics

SIZES = {"cpu": Size(256, 6, 4, predictor_layers=2, rows=16), "cuda": Size(768, 28, 12, predictor_layers=6, rows=64)}
TOY = Size(32, 2, 2, predictor_layers=1, rows=4, seq_len=64, vocab_size=500)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)  # of as many rows as make the reference's tokens
ROWS = (1, 2, 4, 8, 16, 32)
RATIOS = {"bert": (0.1, 0.2, 0.3, 0.5), "crossbert": (0.5, 0.6, 0.7, 0.8, 0.9)}
AXES = {"length": "tokens in a row", "batch": "rows in a step", "ratio": "hidden ratio", "ranks": "ranks"}
STEPS = 10  # of the app on several ranks; the first four do not count


@dataclass
class CurvesArgs:
    """Curves of training speed."""

    out: str = "???"  # JSON file to write
    plot: str | None = None  # also PLOT.png and PLOT.svg
    curves: list[str] = field(default_factory=lambda: list(AXES))
    ranks: list[int] = field(default_factory=lambda: [1, 2, 4])
    repeats: int = 3  # timed steps of each point and of the reference in turns, after three that are not; runs on ranks
    compile: bool = False
    toy: bool = False  # tiny sizes, to try it

    def __post_init__(self) -> None:
        if unknown := set(self.curves) - set(AXES):
            raise UserError(f"curves={sorted(unknown)}: expected some of {', '.join(AXES)}")
        if not self.curves:
            raise UserError(f"curves=[]: expected some of {', '.join(AXES)}")
        if self.repeats < 1:
            raise UserError(f"repeats={self.repeats}: expected at least 1")
        if not self.ranks or min(self.ranks) < 1:
            raise UserError(f"ranks={self.ranks}: expected numbers of processes, each at least 1")


def sizes(curve: str, family: str, reference: Size) -> Iterator[tuple[float, Size]]:
    """Where a curve is measured: the value on its axis, and the size of the step."""
    tokens = reference.rows * reference.seq_len
    if curve == "length":
        lengths = [length for length in LENGTHS if length <= tokens]
        yield from ((length, replace(reference, seq_len=length, rows=tokens // length)) for length in lengths)
    elif curve == "batch":
        yield from ((rows, replace(reference, rows=rows)) for rows in ROWS)
    else:
        yield from ((ratio, replace(reference, hidden_ratio=ratio)) for ratio in RATIOS[family])


class Reference:
    """A family's step at the reference's size, and how others compare with it."""

    def __init__(self, args: CurvesArgs, family: str, size: Size, device: torch.device) -> None:
        self.args, self.family, self.device = args, family, device
        self.step = self._make(size)
        self.seconds: list[float] = []

    def _make(self, size: Size) -> Contestant:
        return ours(self.family, size, self.device, pick_dtype("auto", self.device), self.args.compile)

    @property
    def tokens_per_second(self) -> float:
        """View tokens a second: the median over all that was measured beside it."""
        return self.step.tokens / median(self.seconds)

    def measure(self, size: Size) -> dict[str, float]:
        """View tokens a second of a step over those of the reference, and its FLOPs for each of them."""
        torch.compiler.reset()  # there is a limit to how many shapes a block is compiled for
        other = self._make(size)
        rounds = in_turns(self.step, other, self.args.repeats, self.device)
        self.seconds += [mine for mine, _ in rounds]
        ratio = median(mine / its for mine, its in rounds) * other.tokens / self.step.tokens
        return {"over_reference": ratio, "flops_per_token": other.all_flops / other.tokens}

    def finish(self, points: list[dict[str, float]]) -> None:
        """Add to each point its speed, and that which it would have at the reference's FLOP rate."""
        flops_per_token = self.step.all_flops / self.step.tokens
        for point in points:
            point["tokens_per_second"] = self.tokens_per_second * point["over_reference"]
            point["predicted"] = self.tokens_per_second * flops_per_token / point["flops_per_token"]


def measure_ranks(args: CurvesArgs, family: str, n: int, size: Size, folder: Path) -> float:
    """View tokens a second of ``apps.FAMILY.train`` on ``n`` ranks, which share the reference's rows."""
    parts = math.lcm(*args.ranks)
    micro_rows = max(1, size.rows // parts)  # the same on any number of ranks, as is the whole step
    run = folder / f"{family}_{n}"
    shutil.rmtree(run, ignore_errors=True)  # of the turn before
    values = {
        "dump_dir": run, "data.root_dir": folder / "data", "data.seq_len": size.seq_len,
        "batch_tokens": parts * micro_rows * size.seq_len * (2 if family == "crossbert" else 1),
        "micro_rows": micro_rows, "steps": STEPS, "dtype": "auto", "logging.every": 1, "logging.tensorboard": "false",
        "checkpoint.dump.every": 10 * STEPS, "distributed.dp_shard": -1, "compile": str(args.compile).lower(),
        **{f"model.{name}": getattr(size, name) for name in ("dim", "n_layers", "n_heads")},
    }  # fmt: skip
    if family == "crossbert":
        values["model.predictor.n_layers"] = size.predictor_layers
    train(family, [f"{key}={value}" for key, value in values.items()], n, OMP_NUM_THREADS="1")
    speeds = [record["tokens_per_second"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    return median(speeds[4:])


def ranks_beside(args: CurvesArgs, size: Size, device: torch.device) -> dict[str, list[dict[str, float]]]:
    """The curve of ranks. Predicted is the first number's speed for each rank, times those that have a device."""
    units = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    found = {}
    with tempfile.TemporaryDirectory() as name:
        prepare_text(Path(name), "roberta", 20_000)
        for family in FAMILY_NAMES:
            turns = [
                {n: measure_ranks(args, family, n, size, Path(name)) for n in args.ranks} for _ in range(args.repeats)
            ]
            speeds = {n: median(turn[n] for turn in turns) for n in args.ranks}
            alone = speeds[args.ranks[0]] / args.ranks[0]
            found[family] = [
                {"at": n, "tokens_per_second": speed, "predicted": alone * min(n, units)} for n, speed in speeds.items()
            ]
            reached = ", ".join(f"{n}: {speed:.0f}" for n, speed in speeds.items())
            print(f"ranks, {family}, tokens/s: {reached}", flush=True)
    return found


def draw(found: dict[str, dict[str, list[dict[str, float]]]], stem: Path) -> None:
    """A panel a curve: measured points, and the predicted line."""
    figure, axes = panels(len(found), across=2)
    for axis, (curve, families) in zip(axes, found.items(), strict=True):
        for family, points in families.items():
            color, x = FAMILY_COLORS[family], [point["at"] for point in points]
            y = [point["tokens_per_second"] / 1e3 for point in points]
            axis.plot(x, y, "o", color=color, label=f"{FAMILY_NAMES[family]}, measured")
            line = [point["predicted"] / 1e3 for point in points]
            of = "one rank, times CPUs" if curve == "ranks" else "from FLOPs"
            axis.plot(x, line, "-", color=color, alpha=0.6, label=f"{FAMILY_NAMES[family]}, {of}")
        if curve != "ratio":
            ticks = sorted({point["at"] for points in families.values() for point in points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        axis.set(xlabel=AXES[curve], ylabel="thousand view tokens a second", ylim=(0, None))
        legend(axis)
    save(figure, stem)


def main(args: CurvesArgs) -> None:
    """Measure all curves, write the JSON, draw the plot."""
    device = pick_device()
    reference = TOY if args.toy else SIZES[device.type]
    of_steps = [curve for curve in args.curves if curve != "ranks"]
    found: dict[str, dict[str, list[dict[str, float]]]] = {curve: {} for curve in args.curves}
    if "ranks" in args.curves:  # first, while this process holds no memory of the device
        found["ranks"] = ranks_beside(args, reference, device)
    families = {family: Reference(args, family, reference, device) for family in FAMILY_NAMES if of_steps}
    for curve in of_steps:
        for family, known in families.items():
            points = [{"at": at, **known.measure(size)} for at, size in sizes(curve, family, reference)]
            found[curve][family] = points
            over = ", ".join(f"{point['at']:g}: {point['over_reference']:.2f}" for point in points)
            print(f"{curve}, {family}, tokens/s over the reference's: {over}", flush=True)
    for curve in of_steps:
        for family, known in families.items():
            known.finish(found[curve][family])
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(pick_dtype("auto", device)).removeprefix("torch."),
        "compile": args.compile,
        "reference_tokens_per_second": {family: round(known.tokens_per_second) for family, known in families.items()},
        "curves": found,
    }
    write_result(args.out, {**result, **environment("torch", "numpy")})
    if args.plot:
        draw(found, Path(args.plot))


if __name__ == "__main__":
    command(CurvesArgs, main, "python -m benchmarks.curves")
