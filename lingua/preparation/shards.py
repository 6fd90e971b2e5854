"""Bucket files, which documents go through on their way, and the shards in which they end.

A document on its way is a span of tokens and a record of where it is and where it belongs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lingua.manifest import DOCS_DTYPE, Shard

COPY_BYTES = 4 << 20  # gathered or copied at a time
# key, text (0 where duplicates are kept), piece, file and row give a document's place in the order; start and
# tokens (counts of tokens) its span in the token array beside the records; bytes the size of its text.
RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("text", "<u8"),
        ("piece", "<u4"),
        ("file", "<u4"),
        ("row", "<u8"),
        ("start", "<u8"),
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("valid", "?"),
    ]
)


class Buckets:
    """Pairs of files in ``folder``, as many as ``ends`` has entries; the ``i``-th takes the ``i``-th of so many equal
    ranges of keys.

    What is appended waits in memory until :meth:`flush`. Files are opened only then, so there may be thousands.
    """

    def __init__(self, folder: Path, ends: list[int], counts: list[int]) -> None:
        self.folder, self.n = folder, len(ends)
        self.ends, self.counts = ends, counts  # tokens and documents so far
        self.waiting_bytes = 0
        self._waiting: dict[int, list[tuple[bytes, bytes]]] = {}

    def append(self, tokens: np.ndarray, records: np.ndarray) -> None:
        of_bucket = bucket_of(records["key"], self.n)
        for i in np.unique(of_bucket).tolist():
            chosen = records[of_bucket == i]
            data = b"".join(gather(tokens, chosen))
            chosen["start"] = self.ends[i] + np.cumsum(chosen["tokens"]) - chosen["tokens"]
            self.ends[i] += int(chosen["tokens"].sum())
            self.counts[i] += len(chosen)
            self._waiting.setdefault(i, []).append((data, chosen.tobytes()))
            self.waiting_bytes += len(data) + chosen.nbytes

    def flush(self) -> None:
        for i, parts in self._waiting.items():
            for ending, data in zip(("tokens", "records"), zip(*parts, strict=True), strict=True):
                with bucket_path(self.folder, i, ending).open("ab") as file:
                    file.writelines(data)
        self._waiting, self.waiting_bytes = {}, 0


def bucket_of(keys: np.ndarray, n: int) -> np.ndarray:
    """Which of ``n`` equal ranges each key falls into."""
    return ((keys >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)


def bucket_path(folder: Path, index: int, ending: str) -> Path:
    """The file of bucket ``index`` with a given ending."""
    return folder / f"{index:05d}.{ending}"


def gather(tokens: np.ndarray, records: np.ndarray) -> Iterable[bytes]:
    """The tokens of ``records`` out of ``tokens``, end to end, in parts of about :data:`COPY_BYTES`."""
    view = memoryview(tokens).cast("B") if len(tokens) else b""
    ends = np.cumsum(records["tokens"]) * tokens.itemsize
    first = 0
    while first < len(records):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + COPY_BYTES, side="right")))
        part = records[first:last]
        starts = (part["start"] * tokens.itemsize).tolist()
        stops = ((part["start"] + part["tokens"]) * tokens.itemsize).tolist()
        yield b"".join([view[start:stop] for start, stop in zip(starts, stops, strict=True)])
        first = last


def cut_into_shards(lengths: Iterable[np.ndarray], shard_tokens: int) -> list[tuple[int, int]]:
    """(documents, tokens) of each shard, for documents of ``lengths`` tokens that come in several arrays.

    A shard ends before the document that would exceed ``shard_tokens``; a longer one has a shard of its own.
    """
    shards: list[tuple[int, int]] = []
    documents = tokens = 0  # of the shard that is being filled
    for part in lengths:
        ends = np.cumsum(part.astype(np.int64))
        done = 0
        while done < len(ends):
            before = int(ends[done - 1]) if done else 0
            fit = int(np.searchsorted(ends, before + shard_tokens - tokens, side="right")) - done
            if not fit and not documents:
                fit = 1
            if fit > 0:
                documents, tokens, done = documents + fit, tokens + int(ends[done + fit - 1]) - before, done + fit
            if done < len(ends):
                shards.append((documents, tokens))
                documents = tokens = 0
    return [*shards, (documents, tokens)] if documents else shards


class ShardFile:
    """One shard being written: tokens, and the end of each document."""

    def __init__(self, folder: Path, index: int) -> None:
        self._name = f"shard_{index:05d}"
        self._files = [(folder / f"{self._name}.{ending}").open("wb") for ending in ("tokens", "docs")]
        self._hashes = [hashlib.sha256(), hashlib.sha256()]
        self._bytes = [0, 0]
        self._tokens = self._documents = 0

    def add_tokens(self, data: bytes) -> None:
        self._add(0, data)

    def add_documents(self, lengths: np.ndarray) -> None:
        """``lengths``: tokens of each document."""
        if len(lengths):
            ends = self._tokens + np.cumsum(lengths.astype(np.int64))
            self._add(1, ends.astype(DOCS_DTYPE).tobytes())
            self._tokens, self._documents = int(ends[-1]), self._documents + len(lengths)

    def close(self) -> Shard:
        for file in self._files:
            file.close()
        return Shard(
            name=self._name,
            tokens=self._tokens,
            documents=self._documents,
            tokens_bytes=self._bytes[0],
            docs_bytes=self._bytes[1],
            tokens_sha256=self._hashes[0].hexdigest(),
            docs_sha256=self._hashes[1].hexdigest(),
        )

    def _add(self, which: int, data: bytes) -> None:
        self._files[which].write(data)
        self._hashes[which].update(data)
        self._bytes[which] += len(data)


def write_shard(folder: Path, index: int, tokens: np.ndarray, lengths: np.ndarray) -> Shard:
    """Write documents that are in memory as one shard."""
    shard = ShardFile(folder, index)
    shard.add_tokens(tokens.tobytes())
    shard.add_documents(lengths)
    return shard.close()
