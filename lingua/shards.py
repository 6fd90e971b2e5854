"""Writing token shards, and the bucket files that a shuffle goes through.

A document on its way is a span of tokens and a record of where it is and where it belongs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lingua.manifest import DOCS_DTYPE, Shard

MAX_WRITE_DOCUMENTS = 50_000  # gathered in memory at a time
# key, file and row give a document's place in the order; start and tokens (counts of tokens) its span in the
# token array beside the records; bytes the size of its text.
RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("file", "<u4"),
        ("row", "<u8"),
        ("start", "<u8"),
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("valid", "?"),
    ]
)


class Buckets:
    """``n`` pairs of files in ``folder``; bucket ``i`` takes the ``i``-th of ``n`` equal ranges of keys."""

    def __init__(self, folder: Path, n: int) -> None:
        self.n = n
        self._tokens = [bucket_path(folder, i, "tokens").open("wb") for i in range(n)]
        self._records = [bucket_path(folder, i, "records").open("wb") for i in range(n)]
        self._ends = [0] * n  # tokens so far

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._tokens + self._records:
            file.close()

    def append(self, tokens: np.ndarray, records: np.ndarray) -> None:
        of_bucket = ((records["key"] >> np.uint64(32)) * np.uint64(self.n)) >> np.uint64(32)
        for i in np.unique(of_bucket).tolist():
            chosen = records[of_bucket == i]
            self._tokens[i].write(gather(tokens, chosen))
            chosen["start"] = self._ends[i] + np.cumsum(chosen["tokens"]) - chosen["tokens"]
            self._ends[i] += int(chosen["tokens"].sum())
            self._records[i].write(chosen.tobytes())


def bucket_path(folder: Path, index: int, ending: str) -> Path:
    return folder / f"{index:03d}.{ending}"


def gather(tokens: np.ndarray, records: np.ndarray) -> bytes:
    """The tokens of ``records`` out of ``tokens``, end to end."""
    view = memoryview(tokens).cast("B") if len(tokens) else b""
    starts = (records["start"] * tokens.itemsize).tolist()
    ends = ((records["start"] + records["tokens"]) * tokens.itemsize).tolist()
    return b"".join([view[start:end] for start, end in zip(starts, ends, strict=True)])


class ShardWriter:
    """Writes documents, in the order they come, into the shards of one split."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        folder.mkdir()
        self.folder, self.shard_tokens = folder, shard_tokens
        self.shards: list[Shard] = []
        self.bytes_of_text = 0
        self._open: tuple[BinaryIO, BinaryIO] | None = None

    def write(self, tokens: np.ndarray, records: np.ndarray) -> None:
        """Append the documents ``records`` of ``tokens``."""
        self.bytes_of_text += int(records["bytes"].sum())
        while len(records):
            if self._open is None:
                self._start()
            ends = self._tokens + np.cumsum(records["tokens"].astype(np.int64))
            fit = int(np.searchsorted(ends, self.shard_tokens, side="right"))
            if not fit and not self._documents:
                fit = 1  # one document longer than a shard
            fit = min(fit, MAX_WRITE_DOCUMENTS)
            if fit:
                self._append(gather(tokens, records[:fit]), ends[:fit].astype(DOCS_DTYPE).tobytes())
                self._tokens, self._documents = int(ends[fit - 1]), self._documents + fit
                records = records[fit:]
            else:
                self.close()

    def close(self) -> None:
        """End the current shard."""
        if self._open is None:
            return
        for file in self._open:
            file.close()
        self.shards.append(
            Shard(
                name=self._name,
                tokens=self._tokens,
                documents=self._documents,
                tokens_bytes=self._bytes[0],
                docs_bytes=self._bytes[1],
                tokens_sha256=self._hashes[0].hexdigest(),
                docs_sha256=self._hashes[1].hexdigest(),
            )
        )
        self._open = None

    def _start(self) -> None:
        self._name = f"shard_{len(self.shards):05d}"
        self._open = (
            (self.folder / f"{self._name}.tokens").open("wb"),
            (self.folder / f"{self._name}.docs").open("wb"),
        )
        self._hashes = (hashlib.sha256(), hashlib.sha256())
        self._bytes = [0, 0]
        self._tokens = self._documents = 0

    def _append(self, *parts: bytes) -> None:
        assert self._open is not None
        for i, part in enumerate(parts):
            self._open[i].write(part)
            self._hashes[i].update(part)
            self._bytes[i] += len(part)
