"""Probes beside scikit-learn and beside their bare matrix products, on made-up features.

    python -m benchmarks.probe out=FILE.json

Ridge: our fit and predictions over the whole grid of penalties against fitting scikit-learn's ``Ridge`` penalty by
penalty, both in float64 on the same rows. Neighbours: :func:`lingua.evaluation.knn.nearest` against the products of
the same queries with the same rows, alone. With ``glue=1``, which wants a GPU, also the whole of GLUE's sizes: random
tokens of the right lengths through a 28 x 768 encoder, last layer, all probes of all tasks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import command, environment, write_result
from lingua.distributed import pick_dtype, start
from lingua.errors import UserError
from lingua.evaluation.feature_files import FeatureFiles
from lingua.evaluation.knn import TILE_ROWS, nearest
from lingua.evaluation.probe import ProbeArgs, probe
from lingua.evaluation.ridge import RidgePath
from lingua.features import TextEncoder
from lingua.frozen import Sequences
from lingua.tokenizer import RobertaTokenizer
from lingua.transformer import Encoder, TransformerArgs, init_weights

RIDGE_BAR = 0.5  # of the grid's length: how many times faster than penalty by penalty
KNN_BAR = 2.0  # times the bare products
GLUE_BAR_SECONDS = 300  # the paper's five minutes, on a GPU
# Training and development rows, and mean number of tokens of a sequence with special tokens (estimates: the texts are
# not at hand), of each task; MNLI's two development sets count as one.
GLUE_SIZES = {
    "cola": (8_551, 1_043, 11), "sst2": (67_349, 872, 13), "mrpc": (3_668, 408, 53), "qqp": (363_846, 40_430, 31),
    "stsb": (5_749, 1_500, 32), "mnli": (392_702, 19_647, 40), "qnli": (104_743, 5_463, 50), "rte": (2_490, 277, 70),
}  # fmt: skip


@dataclass
class ProbeSpeedArgs:
    """Speed of the probes."""

    out: str = "???"  # JSON file to write
    rows: list[int] = field(default_factory=lambda: [67_000, 364_000])  # training rows, one measurement each
    dim: int = 768  # width of the features
    classes: int = 3  # to tell apart
    queries: int = 1000  # test rows
    rounds: int = 3  # of each measurement but scikit-learn's, which takes long; the fastest counts
    glue: float = 0.0  # share of GLUE's rows to encode and probe; 1: all. 0: none

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 100:
            raise UserError(f"rows={self.rows}: expected numbers of at least 100")
        for name in ("dim", "queries", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.classes < 2 or not 0 <= self.glue <= 1:
            raise UserError(f"classes={self.classes} glue={self.glue}: expected at least 2, and from 0 to 1")


def features(n: int, dim: int, classes: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Overlapping clusters in float32, and their classes."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(0).normal(size=(classes, dim)).astype(np.float32)
    y = rng.integers(classes, size=n)
    x = rng.standard_normal((n, dim), dtype=np.float32)  # of variance 1, where the grid makes a difference
    return torch.from_numpy(x + centers[y] / 20), y


def measure(n: int, args: ProbeSpeedArgs, device: torch.device) -> dict[str, Any]:
    """Seconds and ratios at ``n`` training rows."""
    from sklearn.linear_model import Ridge

    x_ND, y_N = features(n, args.dim, args.classes, 1)
    test_MD, y_M = features(args.queries, args.dim, args.classes, 2)
    penalties, targets_NC = ProbeArgs().penalties(), np.eye(args.classes)[y_N]
    x_on, test_on = x_ND.to(device), test_MD.to(device)

    def ours() -> list[float]:
        path = RidgePath(x_on, torch.from_numpy(targets_NC))
        return [float((p.argmax(1).cpu().numpy() == y_M).mean()) for p in path.predict(test_on, penalties)]

    ridge_seconds, ridge_scores = fastest(ours, args.rounds, device)
    x, test = x_ND.numpy().astype(np.float64), test_MD.numpy().astype(np.float64)
    begun = time.perf_counter()
    theirs = [Ridge(alpha=a, fit_intercept=False).fit(x, targets_NC).predict(test) for a in penalties]
    sklearn_seconds = time.perf_counter() - begun
    sklearn_scores = [float((p.argmax(1) == y_M).mean()) for p in theirs]
    del x, theirs

    def products() -> None:
        queries = test_on.double().T.contiguous().T
        for tile_TD in x_on.split(TILE_ROWS):
            torch.mm(queries, tile_TD.double().T)

    knn = {distance: fastest(lambda d=distance: nearest(x_on, test_on, 30, d), args.rounds, device)[0]
           for distance in ("l2", "cosine")}  # fmt: skip
    products_seconds, _ = fastest(products, args.rounds, device)
    speedup = sklearn_seconds / ridge_seconds
    slowdown = max(knn.values()) / products_seconds
    return {
        "rows": n,
        "ridge_seconds": ridge_seconds,
        "sklearn_seconds": sklearn_seconds,
        "ridge_speedup": speedup,
        "ridge_speedup_bar": RIDGE_BAR * len(penalties),
        "equal_scores": ridge_scores == sklearn_scores,
        "scores": ridge_scores,
        "knn_seconds": knn,
        "products_seconds": products_seconds,
        "knn_slowdown": slowdown,
        "knn_slowdown_bar": KNN_BAR,
        "met": speedup >= RIDGE_BAR * len(penalties) and slowdown <= KNN_BAR and ridge_scores == sklearn_scores,
    }


def fastest(run: Callable[[], Any], rounds: int, device: torch.device) -> tuple[float, Any]:
    """Least seconds of some rounds, and what the last returned."""
    seconds, value = [], None
    for _ in range(rounds):
        begun = time.perf_counter()
        value = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds), value


def glue_speed(share: float, shape: TransformerArgs) -> dict[str, Any]:
    """Seconds of features and of probes over GLUE's sizes, bf16 where the hardware has it."""
    world = start(3600.0)
    device = str(world.device)
    dtype = pick_dtype("auto", world.device)
    encoder = Encoder(shape)
    init_weights(encoder, shape, seed=0)
    frozen = TextEncoder(encoder, RobertaTokenizer(), 512, device=device, dtype=dtype)
    rng, seconds = np.random.default_rng(0), {"features": 0.0, "probes": 0.0}
    tokens = 0
    for name, (train_rows, test_rows, mean_tokens) in GLUE_SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            files, parts = FeatureFiles(Path(folder), world), []
            begun = time.perf_counter()
            for rows in (max(20, round(share * train_rows)), max(20, round(share * test_rows))):
                lengths = np.clip(rng.gamma(4, mean_tokens / 4, size=rows).astype(int), 4, 512)
                ids = rng.integers(10, shape.vocab_size, size=lengths.sum())
                sequences = Sequences(np.split(ids, np.cumsum(lengths)[:-1]))
                tokens += int(lengths.sum())
                parts.append(files.get(frozen, sequences, [shape.n_layers], title=name)[0])
            encoded = time.perf_counter()
            train_x, test_x = parts
            y = [rng.integers(3, size=len(x)) for x in parts]
            probe(train_x, y[0], test_x, y[1], ProbeArgs(), "accuracy", device=device)
            seconds["features"] += encoded - begun
            seconds["probes"] += time.perf_counter() - encoded
    total = sum(seconds.values())
    bar = {"bar_seconds": GLUE_BAR_SECONDS, "met": total < GLUE_BAR_SECONDS} if share == 1 else {}
    return {"share": share, "tokens": tokens, "dtype": str(dtype), "seconds": seconds, "total_seconds": total, **bar}


def main(args: ProbeSpeedArgs) -> None:
    """Measure and write the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {
        **environment("torch", "numpy", "scikit-learn"),
        "device": name,
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "dim": args.dim,
        "classes": args.classes,
        "queries": args.queries,
        "penalties": ProbeArgs().lambdas,
        "measurements": [measure(n, args, device) for n in args.rows],
    }
    if args.glue:
        result["glue"] = glue_speed(args.glue, TransformerArgs(vocab_size=RobertaTokenizer.vocab_size))
    write_result(args.out, result)


if __name__ == "__main__":
    command(ProbeSpeedArgs, main, "python -m benchmarks.probe")
