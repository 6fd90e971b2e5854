"""The second pass of a shuffle: each bucket sorted in bounded memory, then the sorted buckets cut into shards.

Both steps are lists of independent jobs, each of which writes a small JSON file last: what has one is done.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingua.files import write_atomically
from lingua.manifest import Shard
from lingua.preparation.shards import COPY_BYTES, RECORD, ShardFile, bucket_of, bucket_path, cut_into_shards, gather

LENGTH_DTYPE = "<u4"
CHUNK_RECORDS = 1 << 16  # read at a time
RECORD_COPIES = 5  # of the records, held while a bucket is sorted


@dataclass(frozen=True)
class SortJob:
    """What sorting a bucket needs to know."""

    parts: list[Path]  # folders with bucket files, one for each job of the first pass
    out: Path
    n_buckets: int
    dtype: str
    splits: dict[str, bool]  # name: is it the valid split
    drop_duplicates: bool
    memory_bytes: float


def sort_bucket(job: SortJob, index: int) -> int:
    """Write bucket ``index`` in order, split by split, and remove it; its number of tokens.

    A bucket that is too large for the memory is sorted in several rounds, one for each part of its key range.
    """
    done = bucket_path(job.out, index, "json")
    if not done.is_file():
        write_atomically(done, json.dumps(_sort(job, index)))
    for part in job.parts:
        for ending in ("tokens", "records"):
            bucket_path(part, index, ending).unlink(missing_ok=True)
    return sum(split["tokens"] for split in json.loads(done.read_text())["splits"].values())


def _sort(job: SortJob, index: int) -> dict[str, Any]:
    cost = 0
    for part in job.parts:
        for ending, copies in (("tokens", 1), ("records", RECORD_COPIES)):
            path = bucket_path(part, index, ending)
            cost += copies * path.stat().st_size if path.exists() else 0
    rounds = max(1, math.ceil(cost / job.memory_bytes))
    totals = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in job.splits}
    duplicates = np.zeros(2, np.int64)
    out = {
        (name, ending): bucket_path(job.out, index, f"{name}.{ending}").open("wb")
        for name in job.splits
        for ending in ("tokens", "lengths")
    }
    for number in range(rounds):
        records, dropped = _load_records(job, index, number, rounds)
        duplicates += dropped
        tokens, records = _load_tokens(job, index, records)
        for name, is_valid in job.splits.items():
            chosen = records[records["valid"] == is_valid]
            out[name, "tokens"].writelines(gather(tokens, chosen))
            out[name, "lengths"].write(chosen["tokens"].astype(LENGTH_DTYPE).tobytes())
            total = totals[name]
            total["documents"] += len(chosen)
            for key in ("tokens", "bytes"):
                total[key] += int(chosen[key].sum())
        del tokens, records
    for file in out.values():
        file.close()
    documents, pieces = duplicates.tolist()
    return {"splits": totals, "duplicates": documents, "duplicate_pieces": pieces}


def _load_records(job: SortJob, index: int, number: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The records of a round in order, ``part`` beside each, and what was dropped (see _drop)."""
    dtype = np.dtype([*RECORD.descr, ("part", "<u4")])
    found: list[np.ndarray] = [np.zeros(0, dtype)]
    duplicates, waiting = np.zeros(2, np.int64), 0
    for part, folder in enumerate(job.parts):
        path = bucket_path(folder, index, "records")
        if not path.exists():
            continue
        with path.open("rb") as file:
            while len(chunk := np.fromfile(file, RECORD, CHUNK_RECORDS)):
                if rounds > 1:  # ranges of the whole run, so that each bucket holds some of them whole
                    fine = bucket_of(chunk["key"], job.n_buckets * rounds)
                    chunk = chunk[fine == index * rounds + number]
                with_part = np.zeros(len(chunk), dtype)
                for name in RECORD.names:
                    with_part[name] = chunk[name]
                with_part["part"] = part
                found.append(with_part)
                waiting += len(chunk)
                if job.drop_duplicates and waiting > max(len(found[0]), CHUNK_RECORDS):
                    kept, dropped = _drop(_in_order(np.concatenate(found)))
                    found, waiting, duplicates = [kept], 0, duplicates + dropped
    records = _in_order(np.concatenate(found))
    del found
    if job.drop_duplicates:
        records, dropped = _drop(records)
        duplicates += dropped
    return records, duplicates


def _in_order(records: np.ndarray) -> np.ndarray:
    keys = ("row", "file", "piece", "text", "key")  # the last is the first to count
    return records[np.lexsort([records[name] for name in keys])]


def _drop(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of records in order only the first of each text, and how many documents and further pieces of documents that
    leaves out."""
    again = np.zeros(len(records), bool)
    again[1:] = True
    for name in ("key", "text", "piece"):
        again[1:] &= records[name][1:] == records[name][:-1]
    pieces = int((again & (records["piece"] > 0)).sum())
    return records[~again], np.array([int(again.sum()) - pieces, pieces])


def _load_tokens(job: SortJob, index: int, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of ``records`` in one array, and the records with their place in it. Nothing else is read into
    memory, and what stands together in a file is read together."""
    tokens = np.empty(int(records["tokens"].sum()), job.dtype)
    item = tokens.itemsize
    view = memoryview(tokens).cast("B") if len(tokens) else memoryview(b"")
    by_place = np.lexsort([records["start"], records["part"]])
    starts, lengths = records["start"][by_place].astype(np.int64), records["tokens"][by_place].astype(np.int64)
    parts = records["part"][by_place]
    targets = np.cumsum(lengths) - lengths
    records["start"][by_place] = targets
    for part in np.unique(parts).tolist():
        first, last = np.searchsorted(parts, [part, part + 1])
        breaks = np.flatnonzero(starts[first + 1 : last] != starts[first : last - 1] + lengths[first : last - 1]) + 1
        with bucket_path(job.parts[part], index, "tokens").open("rb") as file:
            for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), last - first], strict=True):
                run = slice(first + begin, first + end)
                file.seek(int(starts[run][0]) * item)
                at = int(targets[run][0]) * item
                file.readinto(view[at : at + int(lengths[run].sum()) * item])
    return tokens, records


# --- sorted buckets to shards ---------------------------------------------------------------------------------


Spans = list[tuple[int, int, int]]  # bucket, first and end of the items that are meant in its file


@dataclass(frozen=True)
class ShardJob:
    """One shard: where it goes, and where its tokens and the lengths of its documents lie."""

    sorted: Path
    out: Path
    split: str
    index: int
    tokens: Spans
    lengths: Spans
    dtype: str

    @property
    def done(self) -> Path:
        return self.sorted / f"{self.split}_{self.index:05d}.shard.json"


class Split:
    """The sorted buckets of one split as one long sequence of documents, and the shards it is cut into."""

    def __init__(self, folder: Path, n_buckets: int, name: str, out: Path, dtype: str, shard_tokens: int) -> None:
        said = [json.loads(bucket_path(folder, i, "json").read_text())["splits"][name] for i in range(n_buckets)]
        token_ends, document_ends = (np.cumsum([bucket[key] for bucket in said]) for key in ("tokens", "documents"))
        self.tokens, self.documents = int(token_ends[-1]), int(document_ends[-1])
        self.bytes = sum(bucket["bytes"] for bucket in said)
        self._folder, self._name = folder, name
        self._longest, self._by_power = 0, np.zeros(64, np.int64)
        sizes = cut_into_shards(self._lengths(n_buckets), shard_tokens)
        ends = np.cumsum([(0, 0), *sizes], axis=0).tolist()
        self.jobs = [
            ShardJob(
                folder,
                out,
                name,
                i,
                _spans(token_ends, first[1], last[1]),
                _spans(document_ends, first[0], last[0]),
                dtype,
            )
            for i, (first, last) in enumerate(itertools.pairwise(ends))
        ]
        self._users: dict[int, list[ShardJob]] = {}  # of each bucket
        for job in self.jobs:
            for bucket, _, _ in job.tokens:
                self._users.setdefault(bucket, []).append(job)

    def _lengths(self, n_buckets: int) -> Iterator[np.ndarray]:
        for i in range(n_buckets):
            lengths = np.fromfile(bucket_path(self._folder, i, f"{self._name}.lengths"), LENGTH_DTYPE)
            if len(lengths):
                self._longest = max(self._longest, int(lengths.max()))
                self._by_power += np.bincount(np.ceil(np.log2(lengths)).astype(np.int64), minlength=64)
                yield lengths

    def length_statistics(self) -> dict[str, Any]:
        """Mean and largest number of tokens of a document, and how many have at most 2, 4, 8, ... but more than the
        number before."""
        counts = {str(2 ** int(power)): int(self._by_power[power]) for power in np.flatnonzero(self._by_power)}
        return {"mean": round(self.tokens / self.documents, 3), "longest": self._longest, "at_most": counts}

    def shards(self) -> list[Shard] | None:
        """All shards, None if one is not done."""
        if not all(job.done.is_file() for job in self.jobs):
            return None
        return [Shard(**json.loads(job.done.read_text())) for job in self.jobs]

    def free(self, job: ShardJob) -> None:
        """Remove the tokens of those buckets of ``job`` that no unfinished shard needs."""
        for bucket, _, _ in job.tokens:
            if all(user.done.is_file() for user in self._users[bucket]):
                bucket_path(self._folder, bucket, f"{self._name}.tokens").unlink(missing_ok=True)


def _spans(ends: np.ndarray, first: int, last: int) -> Spans:
    """Where the items ``first`` to ``last`` lie, in files that end at item ``ends``."""
    spans = []
    for bucket in range(int(np.searchsorted(ends, first, side="right")), len(ends)):
        begin = int(ends[bucket - 1]) if bucket else 0
        if begin >= last:
            break
        if ends[bucket] > begin:
            spans.append((bucket, max(first, begin) - begin, min(last, int(ends[bucket])) - begin))
    return spans


def pack_shard(_: None, job: ShardJob) -> ShardJob:
    """Copy one shard's documents out of the sorted buckets, unless it is done."""
    if not job.done.is_file():
        shard = ShardFile(job.out, job.index)
        for data in _copy(job, "tokens", job.tokens, np.dtype(job.dtype).itemsize):
            shard.add_tokens(data)
        for data in _copy(job, "lengths", job.lengths, np.dtype(LENGTH_DTYPE).itemsize):
            shard.add_documents(np.frombuffer(data, LENGTH_DTYPE))
        write_atomically(job.done, json.dumps(asdict(shard.close())))
    return job


def _copy(job: ShardJob, ending: str, spans: Spans, item: int) -> Iterator[bytes]:
    for bucket, first, last in spans:
        path = bucket_path(job.sorted, bucket, f"{job.split}.{ending}")
        with path.open("rb") as file:
            file.seek(first * item)
            left = (last - first) * item
            while left:
                data = file.read(min(COPY_BYTES, left))
                if not data:
                    raise OSError(f"{path} is {left} bytes too short")
                left -= len(data)
                yield data
