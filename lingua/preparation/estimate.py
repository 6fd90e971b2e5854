"""How many tokens and documents a source will give, and so how many buckets and how much disk its shuffle needs."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lingua.errors import UserError
from lingua.files import InputFile
from lingua.preparation.readers import ReaderArgs, blocks
from lingua.preparation.shards import RECORD
from lingua.preparation.sorting import RECORD_COPIES
from lingua.preparation.tokenizing import tokenize
from lingua.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lingua.preparation.shuffle import ShuffleArgs

MAX_BUCKETS = 4096
UNKNOWN_BUCKETS = 256  # where sizes are unknown
PACKED_BYTES = 5  # of text in a byte of a compressed file


@dataclass(frozen=True)
class Estimate:
    """What a source is expected to give, from its first megabyte."""

    tokens: float
    documents: float


def estimate(files: list[InputFile], reader: ReaderArgs, args: ShuffleArgs, tokenizer: Tokenizer) -> Estimate | None:
    """Tokens and documents of all files, in proportion to the first block of text; None if sizes are unknown."""
    if not all(file.size for file in files if file.path.startswith("hf:")):
        return None
    text_bytes = sum(
        file.size * (PACKED_BYTES if file.path.endswith((".gz", ".zst", ".parquet")) else 1) for file in files
    )
    for file in files:
        for block in blocks(file, reader):
            sample = tokenize(block, reader, args, tokenizer)
            if sample.raw_bytes:
                scale = text_bytes / sample.raw_bytes
                return Estimate(len(sample.tokens) * scale, len(sample.records) * scale)
            break
    return Estimate(0, 0)


def bucket_count(expected: Estimate | None, item_bytes: int, args: ShuffleArgs) -> int:
    """Enough buckets that one fits twice into a worker's share of the memory, so that a wrong estimate costs little.

    Sorting never takes more memory than there is: a bucket that is too large is read several times.
    """
    if expected is None:
        return UNKNOWN_BUCKETS
    cost = expected.tokens * item_bytes + expected.documents * RECORD.itemsize * RECORD_COPIES
    return min(max(math.ceil(2 * cost * args.workers / (args.memory_gb * 1e9)), 1), MAX_BUCKETS)


def disk_needed(expected: Estimate, args: ShuffleArgs, item_bytes: int) -> tuple[float, float]:
    """Bytes that a shuffle needs at most, over all jobs, and those of them that stay as shards."""
    tokens = expected.tokens * item_bytes
    stays = tokens + 8 * expected.documents
    # buckets and their records, and what is there twice for a moment: a bucket and a shard of each worker
    jobs = args.workers * args.share[1]
    twice = min(tokens, jobs * (args.shard_tokens * item_bytes + args.memory_gb * 1e9 / 2 / args.workers))
    return tokens + (RECORD.itemsize + 8) * expected.documents + twice, stays


def check_disk_space(name: str, folder: Path, expected: Estimate | None, args: ShuffleArgs, item_bytes: int) -> None:
    """Say how much disk a shuffle needs. Raises UserError if there is less, unless ``args.check_disk`` is off."""
    free = shutil.disk_usage(folder).free
    if expected is None:
        print(f"{name}: {free / 1e9:,.1f} GB of disk are free; the dataset does not tell how much it needs", flush=True)
        return
    needed, stays = disk_needed(expected, args, item_bytes)
    print(
        f"{name}: needs about {needed / 1e9:,.2f} GB of disk at most, of which {stays / 1e9:,.2f} GB stay; "
        f"{free / 1e9:,.2f} GB are free",
        flush=True,
    )
    if needed > free and args.check_disk:
        raise UserError(
            f"{folder.parent}: about {needed / 1e9:,.2f} GB of disk are needed, {free / 1e9:,.2f} GB are free (an "
            "estimate from the first megabyte of text): choose another out, or set check_disk=false to try all the same"
        )
