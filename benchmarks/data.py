"""How fast the training stream hands out rows on one core, from a disk and from an object store, and how fast text
becomes token shards.

python -m benchmarks.data out=FILE.json text=data/quickstart/raw/text/*.jsonl

The stream reads made-up token shards of two sources in a temporary folder (TMPDIR chooses the disk), in the first
epoch and in a later one, from files that are in memory (warm) and from files that are not (cold). Cold means: the
files were written out (fsync) and the system was told to forget them (posix_fadvise, DONTNEED) before they were
opened. It may not obey, so ``share_from_disk`` tells how much of the data the kernel then really read from the disk
(which may have a cache of its own). The object store is in :mod:`benchmarks.object_store`; it needs
requirements-dev.txt.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import command, environment, write_result
from benchmarks.made_up import SHARDS, SOURCES, TOKENS_BYTES, epoch_rows, write_shards
from benchmarks.object_store import object_store_rate, object_store_table
from benchmarks.prepare import prepare_rate
from lingua.data import DataArgs, TokenStream
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table
from lingua.tokenizer import RobertaTokenizer, Tokenizer

STREAM_BAR = 50e6  # tokens/s from warm files
PREPARE_BAR = 0.8  # of tiktoken's own rate
STORE_BAR = 0.95  # of the bytes that an empty cache fetches in the first epoch are needed


@dataclass
class DataRateArgs:
    """The stream reads made-up shards; preparation needs real text (setup/quickstart.sh fetches some)."""

    out: str = "???"  # JSON file to write
    megabytes: int = 200  # of token shards
    seq_len: int = 512  # tokens in a row
    batch_rows: int = 768  # rows asked for at a time: by default the paper's step of 393,216 tokens
    rounds: int = 3  # of each reading
    text: str = "data/quickstart/raw/text/*.jsonl"  # for preparation: JSONL or plain
    text_megabytes: int = 60  # of text, repeated as needed
    text_rounds: int = 5  # of preparation and of tiktoken, alternating
    object_store: bool = True  # also read from a server of the S3 protocol

    def __post_init__(self) -> None:
        for name in ("megabytes", "seq_len", "batch_rows", "rounds", "text_megabytes", "text_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")


def make_cold(root: Path) -> None:
    """Ask the system to forget the contents of all files under ``root`` (where it can be asked)."""
    gc.collect()  # pages that are still mapped stay
    for path in root.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only what is on the disk can be forgotten
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_epoch(root: Path, tokenizer: Tokenizer, epoch: int, args: DataRateArgs, cold: bool) -> dict[str, float]:
    """Open the stream and read as many rows as one epoch has, from where every source is in epoch ``epoch``.

    Returns:
        ``rows`` per second, and ``from_disk``: bytes that the kernel fetched for it (NaN where it does not tell).
    """
    if cold:
        make_cold(root)
    stream = TokenStream(DataArgs(root_dir=str(root), seq_len=args.seq_len), tokenizer, seed=0)
    first, n_rows = epoch_rows(stream, epoch)
    before = bytes_from_disk()
    begun = time.perf_counter()
    for start in range(first, first + n_rows, args.batch_rows):
        stream.rows(np.arange(start, min(start + args.batch_rows, first + n_rows)))
    seconds = time.perf_counter() - begun
    return {"rows": n_rows / seconds, "from_disk": bytes_from_disk() - before}


def bytes_from_disk() -> float:
    """Bytes that this process has made the kernel read from storage so far (Linux), else NaN."""
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return float(counters["read_bytes"])
    except (OSError, KeyError):
        return float("nan")


def stream_rate(args: DataRateArgs) -> dict[str, Any]:
    """Rows and tokens per second of every round, for cold and warm files and two epochs."""
    tokenizer = RobertaTokenizer()
    readings: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_shards(root, round(args.megabytes * 1e6) // TOKENS_BYTES, tokenizer)
        shard_bytes = sum(path.stat().st_size for path in root.rglob("*.tokens"))
        for _ in range(args.rounds):
            for epoch in (0, 1):
                for files in ("cold", "warm"):
                    result = read_epoch(root, tokenizer, epoch, args, cold=files == "cold")
                    readings.setdefault((epoch, files), []).append(result)
    return {
        "unit": "rows/s and tokens/s of TokenStream.rows on one core",
        "sources": len(SOURCES),
        "shards": len(SOURCES) * SHARDS,
        "shard_bytes": shard_bytes,
        "seq_len": args.seq_len,
        "batch_rows": args.batch_rows,
        "cold": "fsync and posix_fadvise(DONTNEED) before opening; share_from_disk is what was really read again",
        "readings": [
            {
                "files": files,
                "epoch": epoch,
                "rows_per_second": [result["rows"] for result in results],
                "tokens_per_second": [result["rows"] * args.seq_len for result in results],
                "share_from_disk": [_number(result["from_disk"] / shard_bytes) for result in results],
            }
            for (epoch, files), results in readings.items()
        ],
    }


def _number(value: float) -> float | None:
    return None if value != value else value  # JSON has no NaN


def bar(name: str, value: float, bound: float) -> dict[str, Any]:
    """A figure beside the least it should be."""
    return {"name": name, "value": value, "bound": bound, "met": value >= bound}


def bars(stream: dict[str, Any], prepare: dict[str, Any], store: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The stream's median rate from warm files in each epoch, preparation's share of tiktoken's rate, and how much of
    what is fetched from an object store is needed."""
    warm = [reading for reading in stream["readings"] if reading["files"] == "warm"]
    return [
        *(
            bar(f"stream tokens/s, warm files, epoch {r['epoch']}", median(r["tokens_per_second"]), STREAM_BAR)
            for r in warm
        ),
        bar("preparation / tiktoken, tokens/s on one core", prepare["ratio"], PREPARE_BAR),
        *(
            bar(f"object store, {r['reading']}, needed share of the bytes", r["needed"], STORE_BAR)
            for r in (store["readings"] if store else [])
            if r["reading"] == "first epoch, empty cache"
        ),
    ]


def table(stream: dict[str, Any], prepare: dict[str, Any]) -> str:
    """Medians over the rounds, as Markdown."""
    rows = []
    for reading in stream["readings"]:
        share = [value for value in reading["share_from_disk"] if value is not None]
        rows.append(
            [
                f"stream, {reading['files']} files, epoch {reading['epoch']}",
                f"{median(reading['rows_per_second']):,.0f}",
                f"{median(reading['tokens_per_second']) / 1e6:,.1f}",
                f"{median(share):.0%}" if share else "unknown",
            ]
        )
    for name in ("prepare", "tiktoken"):
        rows.append([name, "", f"{median(prepare[name]) / 1e6:,.2f}", ""])
    return markdown_table(["one core", "rows/s", "million tokens/s", "read from disk"], rows)


def main(args: DataRateArgs) -> None:
    """Measure all, print the tables and the bars, and write the JSON."""
    prepare = prepare_rate(args.text, args.text_megabytes, args.text_rounds)  # missing text is known at once
    stream = stream_rate(args)
    store = object_store_rate(args.megabytes, args.seq_len, args.batch_rows) if args.object_store else None
    result = {"bars": bars(stream, prepare, store), "stream": stream, "prepare": prepare, "object_store": store}
    write_result(args.out, {**environment("tiktoken", "numpy"), **result})
    print("\n" + table(stream, prepare))
    if store:
        print("\n" + object_store_table(store))
    for entry in result["bars"]:
        met = "met" if entry["met"] else "not met"
        print(f"{entry['name']}: {entry['value']:,.2f}, at least {entry['bound']:,.10g}: {met}")


if __name__ == "__main__":
    command(DataRateArgs, main, "python -m benchmarks.data")
