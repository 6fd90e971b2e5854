"""How fast a shuffle is with one and more worker processes, stage by stage.

With several workers one process reads the text, hands it out and files the tokens. Its processor seconds tell how many
tokens per second it could keep up with, whatever the number of workers; above that, start several jobs (part=i/n).

python -m benchmarks.shuffle out=FILE.json text=data/quickstart/raw/text/*.jsonl workers=[1,2,4]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import command, environment, write_result
from lingua.errors import UserError
from lingua.manifest import load_manifest
from lingua.preparation.readers import Document, ReaderArgs, documents
from lingua.preparation.shuffle import STAGES, ShuffleArgs, shuffle


@dataclass
class ShuffleRateArgs:
    """A whole shuffle's tokens per second by number of worker processes."""

    out: str = "???"  # JSON file to write
    text: str = "data/quickstart/raw/text/*.jsonl"  # any input of lingua.preparation.readers
    megabytes: int = 200  # of text, repeated as needed
    files: int = 8  # that the text is divided into
    memory_gb: float = 0.1  # for all workers
    workers: list[int] = field(default_factory=lambda: [1, 2])  # numbers of processes to try
    rounds: int = 3  # of each, in turns

    def __post_init__(self) -> None:
        if min([self.megabytes, self.files, self.rounds, *self.workers, len(self.workers)]) < 1:
            raise UserError("megabytes, files, rounds and workers: expected at least 1 of each")


def write_text(args: ShuffleRateArgs, folder: Path) -> None:
    """The text as JSONL files of about the same size."""
    rows = [
        json.dumps({"text": d.text}).encode() + b"\n"
        for d in documents(ReaderArgs(path=args.text))
        if isinstance(d, Document) and d.text.strip()
    ]
    size = sum(map(len, rows))
    if not size:
        raise UserError(f"{args.text}: no text to measure with")
    rows *= max(1, round(args.megabytes * 1e6 / size))
    for i in range(args.files):
        (folder / f"{i:03d}.jsonl").write_bytes(b"".join(rows[i :: args.files]))


def shuffle_rate(args: ShuffleRateArgs) -> dict[str, Any]:
    """Seconds of each stage and tokens per second of all, for each number of workers, in every round; and the
    processor seconds of the tokenize stage in this process and in its workers."""
    readings: dict[int, list[dict[str, float]]] = {workers: [] for workers in args.workers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(args, folder)
        for number in range(args.rounds):
            for workers in args.workers:
                out = folder / f"{number}_{workers}"
                seconds = {}
                for stage in STAGES:
                    settings = ShuffleArgs(
                        valid_fraction=0, workers=workers, memory_gb=args.memory_gb, stage=stage, languages=0
                    )
                    before, begun = processor_seconds(), time.perf_counter()
                    shuffle("text", ReaderArgs(path=f"{folder}/*.jsonl"), settings, out)
                    seconds[stage] = time.perf_counter() - begun
                    if stage == "tokenize":
                        own, of_workers = (now - then for now, then in zip(processor_seconds(), before, strict=True))
                        cpu = {"tokenize_own_cpu": own, "tokenize_workers_cpu": of_workers}
                tokens = load_manifest(out / "text" / "train").tokens
                readings[workers].append({**seconds, **cpu, "tokens_per_second": tokens / sum(seconds.values())})
    return {
        "unit": "seconds of each stage; tokens per second of all three; processor seconds of tokenize",
        "tokens": tokens,
        "memory_gb": args.memory_gb,
        "workers": [{"workers": workers, "rounds": rounds} for workers, rounds in readings.items()],
    }


def processor_seconds() -> tuple[float, float]:
    """Of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


def main(args: ShuffleRateArgs) -> None:
    """Measure and write the result."""
    from lingua.evaluation.results import (
        markdown_table,  # here, because workers import this module too, and it brings torch
    )

    result = shuffle_rate(args)
    write_result(args.out, {**environment("tiktoken", "numpy"), **result})
    rows = [
        [
            str(entry["workers"]),
            *(f"{median(reading[stage] for reading in entry['rounds']):.1f}" for stage in STAGES),
            f"{median(reading['tokens_per_second'] for reading in entry['rounds']) / 1e6:.2f}",
            f"{result['tokens'] / median(reading['tokenize_own_cpu'] for reading in entry['rounds']) / 1e6:.1f}"
            if entry["workers"] > 1
            else "",
        ]
        for entry in result["workers"]
    ]
    columns = ["workers", *(f"{stage}, s" for stage in STAGES), "million tokens/s", "one reader at most"]
    print("\n" + markdown_table(columns, rows))


if __name__ == "__main__":
    command(ShuffleRateArgs, main, "python -m benchmarks.shuffle")
