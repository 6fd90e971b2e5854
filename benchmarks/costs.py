"""Disk and time that preparing and reading a corpus takes, as docs/data.md shows them, from recorded rates.

python -m benchmarks.costs [data=docs/results/data.json]

Disk is what :mod:`lingua.preparation.estimate` says before it starts, for documents of 1,000 tokens with ids of
2 bytes. Time is tokens over the recorded rate of one process, as if it scaled with their number. What training reads
from an object store is what its first epoch fetches: each shard once, in blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table
from lingua.preparation.estimate import Estimate, disk_needed
from lingua.preparation.shuffle import ShuffleArgs
from lingua.remote import BLOCK_BYTES

CORPORA = {"10 billion": 10e9, "100 billion": 100e9, "4 trillion": 4e12}
PROCESSES = {"1 process": 1, "16": 16, "64 machines of 16": 1024}
DOCUMENT_TOKENS = 1000
TOKEN_BYTES = 2


@dataclass
class CostsArgs:
    """Prints the table of disk and time."""

    data: str = "docs/results/data.json"  # what benchmarks.data wrote


def costs(path: str) -> str:
    """The table as Markdown. Raises UserError if the file of rates is not one."""
    try:
        rate = median(json.loads(Path(path).read_text())["prepare"]["prepare"])  # tokens per second of one process
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no rates of preparation ({error!r}): python -m benchmarks.data writes them") from None
    settings = ShuffleArgs(workers=16, memory_gb=16)
    rows = []
    for name, tokens in CORPORA.items():
        needed, stays = disk_needed(Estimate(tokens, tokens / DOCUMENT_TOKENS), settings, TOKEN_BYTES)
        rows.append(
            [
                name,
                size(stays),
                size(needed - stays),
                *(duration(tokens / rate / processes) for processes in PROCESSES.values()),
                f"{tokens * TOKEN_BYTES / BLOCK_BYTES:,.0f}",
            ]
        )
    columns = ["tokens", "disk that stays", "more meanwhile", *PROCESSES, "requests to train on it"]
    return markdown_table(columns, rows)


def size(n: float) -> str:
    """Bytes as GB or TB, to two digits or the whole GB."""
    return f"{n / 1e12:.1f} TB" if n >= 1e12 else f"{n / 1e9:,.0f} GB"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two or more."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} s"


def main(args: CostsArgs) -> None:
    """Print the table."""
    print(costs(args.data))


if __name__ == "__main__":
    cli(CostsArgs, main, "python -m benchmarks.costs")
