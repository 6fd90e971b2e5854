"""How long a training loop stands still for a checkpoint: saved beside it, saved in place, and by ``torch.save``.

python -m benchmarks.checkpoint out=FILE.json

Model and AdamW state are those of an encoder of about 200 million parameters, on the GPU if there is one, in one
process. Each round saves once each way, in turn, to a temporary folder (TMPDIR chooses the disk), and deletes it.
``blocked`` are the seconds until the loop may go on, ``whole`` until all is written. Our saves also compute checksums
and wait for the disk (fsync); ``torch.save`` does neither. The first round, in which buffers are made, is recorded by
itself.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import command, environment, write_result
from lingua.distributed import pick_device
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table
from lingua.optim import OptimArgs, Optimizer
from lingua.saving import CheckpointArgs, Checkpointer
from lingua.transformer import Encoder, TransformerArgs, init_weights

BAR = 0.2  # on a GPU, of the time that a save in place takes


@dataclass
class CheckpointBenchmarkArgs:
    """Blocking time of the ways to save a checkpoint."""

    out: str = "???"  # JSON file to write
    rounds: int = 5  # of each way, after the first
    dim: int = 1024  # width of the encoder; with the other defaults 205 million parameters
    n_layers: int = 12  # its blocks
    vocab_size: int = 50265  # its embedding

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds}: expected at least 1")


def model_and_optimizer(args: CheckpointBenchmarkArgs, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An encoder, and AdamW after a step, so that it has its state."""
    shape = TransformerArgs(dim=args.dim, n_layers=args.n_layers, n_heads=args.dim // 16, vocab_size=args.vocab_size)
    with torch.device(device):
        model = nn.ModuleDict({"encoder": Encoder(shape)})
    init_weights(model, shape, seed=0)
    adamw = Optimizer(model, OptimArgs(), steps=1).adamw
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    adamw.step()
    adamw.zero_grad(set_to_none=True)
    return model, adamw


def ways(model: nn.Module, adamw: torch.optim.Optimizer, root: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    """Functions that save once and return the seconds ``blocked`` and ``whole``."""

    def ours(asynchronous: bool) -> Callable[[], tuple[float, float]]:
        folder = root / ("asynchronous" if asynchronous else "synchronous")
        checkpointer = Checkpointer(folder, CheckpointArgs(asynchronous=asynchronous))

        def save() -> tuple[float, float]:
            begun = time.perf_counter()
            checkpointer.save(1, model, adamw, {"step": 1}, "")
            blocked = time.perf_counter() - begun
            checkpointer.wait()
            return blocked, time.perf_counter() - begun

        return save

    def plain() -> tuple[float, float]:
        begun = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, root / "plain.pt")
        seconds = time.perf_counter() - begun
        return seconds, seconds

    return {"asynchronous": ours(True), "synchronous": ours(False), "torch.save": plain}


def measure(
    model: nn.Module, adamw: torch.optim.Optimizer, rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """By way: seconds ``blocked`` and ``whole`` of each round, those of the first by themselves, bytes written."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        functions = ways(model, adamw, root)
        for round in range(rounds + 1):
            for way, save in functions.items():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                blocked, whole = save()
                if round == 0:
                    written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
                    first = {"first_blocked": blocked, "first_whole": whole, "bytes": written}
                    results[way] = {**first, "blocked": [], "whole": []}
                else:
                    results[way]["blocked"].append(blocked)
                    results[way]["whole"].append(whole)
                for path in root.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return results


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians of the blocked seconds, and their share of those of a save in place, for which there is a bar."""
    blocked = {way: median(found["blocked"]) for way, found in results.items()}
    share = blocked["asynchronous"] / blocked["synchronous"]
    return {
        "median_blocked": blocked,
        "asynchronous_of_torch.save": blocked["asynchronous"] / blocked["torch.save"],
        "bar": {"name": "asynchronous / synchronous, on a GPU", "value": share, "bound": BAR, "met": share <= BAR},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Median and range over the rounds, as Markdown."""
    rows = [
        [way, *(f"{median(found[k]):.2f} ({min(found[k]):.2f} to {max(found[k]):.2f})" for k in ("blocked", "whole"))]
        for way, found in results.items()
    ]
    return markdown_table(["save", "blocked, s", "until written, s"], rows)


def main(args: CheckpointBenchmarkArgs) -> None:
    """Measure, print a table, and write the JSON."""
    device = pick_device()
    model, adamw = model_and_optimizer(args, device)
    results = measure(model, adamw, args.rounds, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"device": name, "parameters": parameters, "rounds": args.rounds}
    write_result(args.out, {**environment("torch"), **facts, **summary(results), "ways": results})
    print("\n" + table(results))


if __name__ == "__main__":
    command(CheckpointBenchmarkArgs, main, "python -m benchmarks.checkpoint")
