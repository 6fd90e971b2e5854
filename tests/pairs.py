"""Made-up queries with passages that answer them, and a tiny backbone: shared by the tests of apps/embed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lingua.hashing import counter_hash
from tests.tiny_run import make_run

THINGS = ["river", "harbour", "letter", "garden", "captain", "violin", "winter", "bridge", "lantern", "orchard"]
PLACES = ["the old town", "a small island", "the north", "our street", "the valley", "a far country"]
TINY = {
    "steps": 6,
    "batch_queries": 8,
    "micro_rows": 64,
    "dtype": "fp32",
    "optim.lr": 3e-3,
    "optim.warmup": 0,
    "data.max_length": "{query: 64, passage: 80}",
    "logging.every": 1,
    "logging.tensorboard": "false",
    "validation.every": 100,
}


def pairs(n: int) -> list[dict[str, Any]]:
    """``n`` different rows with two hard negatives each: what stands near it, in another place."""
    rows = []
    for i in range(n):
        thing, place = THINGS[i % 10], PLACES[i // 10 % 6]
        number = f"{i // 60}"
        other = PLACES[(i // 10 + 1 + counter_hash(0, i) % 5) % 6]
        rows.append(
            {
                "query": f"where is the {thing} {number} of {place} ?",
                "positive": f"In {place} there is a {thing} number {number} that everybody knows .",
                "negative_1": f"In {other} there is a {thing} number {number} that nobody knows .",
                "negative_2": f"A {THINGS[(i + 3) % 10]} was seen near {place} , number {number} .",
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def backbone(folder: Path, **changes: Any) -> Path:
    """A CrossBERT run that reads bytes."""
    return make_run(folder, {"name": "bytes"}, 261, **{"predictor": {"n_layers": 2}, **changes})


def words(data: Path, backbone: Path | str, dump_dir: Path, **changes: object) -> list[str]:
    """Command-line words of a tiny training (keys of ``changes`` write dots as two underscores)."""
    values = {**TINY, "data.path": data, "backbone": backbone, "dump_dir": dump_dir}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def cosine(a_ND: np.ndarray, b_MD: np.ndarray) -> np.ndarray:
    """[N, M] in float64."""
    a_ND, b_MD = a_ND.astype(np.float64), b_MD.astype(np.float64)
    return (a_ND @ b_MD.T) / np.linalg.norm(a_ND, axis=1)[:, None] / np.linalg.norm(b_MD, axis=1)
