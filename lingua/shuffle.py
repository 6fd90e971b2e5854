"""Raw text to globally shuffled token shards, in bounded memory.

Every document has a key, a hash of (seed, file number, number in that file). The shards hold the documents in
the order of their keys, so the result depends on nothing else: not on workers, memory or batches. Two passes
get there. The first tokenizes (in worker processes) and appends each document to one of several bucket files,
each for a range of keys. The second sorts one bucket at a time in memory and writes the shards.

All work happens in ``OUT/SOURCE.partial``, which becomes ``OUT/SOURCE`` at the very end.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.files import InputFile, list_files
from lingua.hashing import counter_hash, text_hash
from lingua.manifest import FORMAT_VERSION, NAME, Manifest, load_manifest, token_dtype
from lingua.progress import Progress
from lingua.readers import BadLine, Block, ReaderArgs, blocks, parse
from lingua.shards import RECORD, Buckets, ShardWriter, bucket_path
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer

MAX_BUCKETS = 256  # open files
MAX_LISTED = 1000  # bad lines in the manifest; all are counted


@dataclass
class ShuffleArgs:
    """What decides the bytes: ``tokenizer``, ``seed``, ``valid_fraction``, ``shard_tokens``."""

    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    seed: int = 0  # of the order
    valid_fraction: float = 0.01  # share of documents that go to the valid split, by a hash of their text
    shard_tokens: int = 100_000_000  # a shard ends before the document that would exceed this
    workers: int = 1  # processes that tokenize; 1: in this process
    memory_gb: float = 2.0  # for sorting a bucket

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("valid_fraction", self.valid_fraction, 0 <= self.valid_fraction < 1, "0 <= fraction < 1"),
            ("shard_tokens", self.shard_tokens, self.shard_tokens >= 1, "at least 1"),
            ("workers", self.workers, self.workers >= 1, "at least 1"),
            ("memory_gb", self.memory_gb, self.memory_gb > 0, "above 0"),
        ):
            if not good:
                raise UserError(f"{name}={value}: expected {expected}")


@dataclass
class Tokenized:
    """The documents of one block: tokens end to end, one record each (``start`` within ``tokens``)."""

    tokens: np.ndarray
    records: np.ndarray
    bad: list[BadLine]
    empty: int
    raw_bytes: int


def shuffle(name: str, reader: ReaderArgs, args: ShuffleArgs, out: str | Path) -> dict[str, Manifest]:
    """Prepare one source: ``OUT/NAME/train`` and, for ``valid_fraction`` above 0, ``OUT/NAME/valid``.

    Finished identical work (same settings, tokenizer, and names and sizes of the inputs) is recognised and
    returned at once.

    Returns:
        The manifests by split.

    Raises:
        UserError: unreadable input, nothing in it, other settings in an existing folder, no space.
    """
    files = list_files(reader.path)
    tokenizer = build_tokenizer(args.tokenizer)
    if tokenizer.appended:
        first = tokenizer.vocab_size - len(tokenizer.appended)
        print(f"{name}: the vocabulary lacks {' '.join(tokenizer.appended)}: appended, ids from {first}", flush=True)
    common = {
        "version": FORMAT_VERSION,
        "source": name,
        "tokenizer": tokenizer.identity(),
        "dtype": token_dtype(tokenizer.vocab_size),
        "seed": args.seed,
        "settings": {
            "valid_fraction": float(args.valid_fraction),  # 0 and 0.0 are written alike
            "shard_tokens": args.shard_tokens,
            "reader": _reader_settings(reader),
        },
        "inputs": [{"path": file.path, "bytes": file.size} for file in files],
    }
    final = Path(out) / name
    if final.exists():
        return _finished(final, common, args)
    partial = Path(out) / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # an interrupted run
    try:
        (partial / "buckets").mkdir(parents=True)
        left_out = _fill_buckets(partial / "buckets", name, files, reader, args, tokenizer)
        splits = _write_shards(partial, common, left_out, args)
        (partial / "buckets").rmdir()
        partial.rename(final)
    except OSError as error:
        raise UserError(f"{partial}: cannot write: {error}") from None
    return {split: load_manifest(final / split) for split in splits}


def _finished(final: Path, common: dict[str, Any], args: ShuffleArgs) -> dict[str, Manifest]:
    splits = ["train", "valid"] if args.valid_fraction else ["train"]
    manifests = {split: load_manifest(final / split) for split in splits if (final / split / NAME).is_file()}
    if "train" not in manifests:
        raise UserError(f"{final}: exists, but was not written by this command; choose another out or name")
    found = {key: getattr(manifests["train"], key) for key in common}
    # the same files may lie elsewhere now
    sides = [{**values, "inputs": _sizes(values["inputs"])} for values in (found, common)]
    # settings that did not exist when the folder was written had the value that is now their default
    sides[0]["settings"] = _with_defaults(sides[0]["settings"])
    difference = _difference(*sides)
    if difference:
        raise UserError(
            f"{final}: already prepared otherwise: {difference}; choose another out, or delete the folder to "
            "prepare it anew"
        )
    print(f"{final}: already prepared, nothing to do", flush=True)
    return manifests


def _with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "reader": _reader_settings(ReaderArgs()) | settings.get("reader", {})}


def _reader_settings(reader: ReaderArgs) -> dict[str, Any]:
    return {key: value for key, value in asdict(reader).items() if key != "path"}


def _sizes(inputs: list[dict[str, Any]]) -> dict[str, int]:
    return {f"{i} {Path(file['path']).name}": file["bytes"] for i, file in enumerate(inputs)}


def _difference(found: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str:
    """The first key in which the two differ, with both values; empty if none does."""
    for key in found | wanted:
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = _difference(old, new, f"{prefix}{key}.")
            if inner:
                return inner
        elif old != new:
            return f"{prefix}{key} was {old}, now {new}"
    return ""


# --- pass 1: text to buckets --------------------------------------------------------------------------------


@dataclass
class LeftOut:
    empty: int = 0
    bad: int = 0
    listed: list[dict[str, Any]] = field(default_factory=list)  # the first bad lines


def _fill_buckets(
    folder: Path, title: str, files: list[InputFile], reader: ReaderArgs, args: ShuffleArgs, tokenizer: Tokenizer
) -> LeftOut:
    left_out = LeftOut()
    work = (block for file in files for block in blocks(file, reader))
    # progress counts decompressed bytes
    known = not any(file.path.endswith((".gz", ".zst", ".parquet")) or not file.size for file in files)
    total = sum(file.size for file in files) if known else None
    with (
        Buckets(folder, bucket_count(files, tokenizer.vocab_size, args.memory_gb)) as buckets,
        Progress(f"{title}: tokenizing", total, "tokens") as progress,
    ):
        for done in tokenize_all(work, reader, args, tokenizer):
            buckets.append(done.tokens, done.records)
            left_out.empty += done.empty
            left_out.bad += len(done.bad)
            left_out.listed += [asdict(bad) for bad in done.bad[: MAX_LISTED - len(left_out.listed)]]
            progress.advance(done.raw_bytes, len(done.tokens))
    return left_out


def bucket_count(files: list[InputFile], vocab_size: int, memory_gb: float) -> int:
    """Enough buckets that one, its records and its sorted copy fit in ``memory_gb``.

    Reckons with one token a byte of text, more than any real text has, and five bytes of text a compressed byte.
    """
    text_bytes = sum(file.size * (5 if file.path.endswith((".gz", ".zst", ".parquet")) else 1) for file in files)
    needed = text_bytes * np.dtype(token_dtype(vocab_size)).itemsize * 2 / (memory_gb * 1e9)
    return min(max(math.ceil(needed), 1), MAX_BUCKETS)


def tokenize_all(
    work: Iterable[Block], reader: ReaderArgs, args: ShuffleArgs, tokenizer: Tokenizer
) -> Iterator[Tokenized]:
    """Tokenize blocks in order, in this process or in ``args.workers`` others, a few blocks ahead."""
    if args.workers == 1:
        yield from (tokenize(block, reader, args.seed, args.valid_fraction, tokenizer) for block in work)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(reader, args),
    )
    waiting: collections.deque[concurrent.futures.Future[Tokenized]] = collections.deque()
    try:
        for block in work:
            waiting.append(pool.submit(_tokenize_in_worker, block))
            if len(waiting) > 2 * args.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError("a tokenizing process died (killed, perhaps for want of memory); try fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[ReaderArgs, ShuffleArgs, Tokenizer]  # of a worker process


def _start_worker(reader: ReaderArgs, args: ShuffleArgs) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = (reader, args, build_tokenizer(args.tokenizer))


def _exit_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize_in_worker(block: Block) -> Tokenized:
    reader, args, tokenizer = _worker
    return tokenize(block, reader, args.seed, args.valid_fraction, tokenizer)


def tokenize(block: Block, reader: ReaderArgs, seed: int, valid_fraction: float, tokenizer: Tokenizer) -> Tokenized:
    """The tokens and records of a block's documents. Raises UserError on a bad line (``on_error=fail``)."""
    parsed = parse(block, reader)
    documents = [document for document in parsed.documents if document.text.strip()]
    encoded = tokenizer.encode_batch([document.text for document in documents])
    dtype = token_dtype(tokenizer.vocab_size)
    bos, eos = np.array([tokenizer.bos_id], dtype), np.array([tokenizer.eos_id], dtype)
    parts = [part for ids in encoded for part in (bos, ids.astype(dtype), eos)]
    records = np.zeros(len(documents), RECORD)
    records["file"] = block.file.index
    records["row"] = [document.row for document in documents]
    records["tokens"] = [len(ids) + 2 for ids in encoded]
    records["start"] = np.cumsum(records["tokens"]) - records["tokens"]
    records["bytes"] = [len(document.text.encode("utf-8", "surrogatepass")) for document in documents]
    # identical documents fall on the same side, whatever the seed
    limit = int(valid_fraction * 2**64)
    records["valid"] = [text_hash(document.text) % 2**64 < limit for document in documents]
    keys = counter_hash(seed, block.file.index, records["row"].astype(np.int64))
    records["key"] = keys.view(np.uint64)
    return Tokenized(
        tokens=np.concatenate(parts) if parts else np.empty(0, dtype),
        records=records,
        bad=parsed.bad,
        empty=len(parsed.documents) - len(documents),
        raw_bytes=sum(len(raw) for _, raw in block.pieces),
    )


# --- pass 2: buckets to shards ------------------------------------------------------------------------------


def _write_shards(partial: Path, common: dict[str, Any], left_out: LeftOut, args: ShuffleArgs) -> list[str]:
    """Sort the buckets one by one into shards, write the manifests, and return the names of the splits."""
    splits = {"train": False, "valid": True} if args.valid_fraction else {"train": False}
    writers = {split: ShardWriter(partial / split, args.shard_tokens) for split in splits}
    folder = partial / "buckets"
    for index in range(len(list(folder.glob("*.tokens")))):
        token_file, record_file = bucket_path(folder, index, "tokens"), bucket_path(folder, index, "records")
        records = np.fromfile(record_file, RECORD)
        if len(records):
            records = records[np.lexsort((records["row"], records["file"], records["key"]))]
            tokens = np.memmap(token_file, common["dtype"], "r")
            for split, is_valid in splits.items():
                writers[split].write(tokens, records[records["valid"] == is_valid])
            del tokens
        token_file.unlink()  # never much more than one copy on disk
        record_file.unlink()
    for split, writer in writers.items():
        writer.close()
        manifest = Manifest(
            **common,
            split=split,
            tokens=sum(shard.tokens for shard in writer.shards),
            documents=sum(shard.documents for shard in writer.shards),
            bytes_of_text=writer.bytes_of_text,
            empty_documents=left_out.empty,
            skipped_count=left_out.bad,
            skipped=left_out.listed,
            shards=writer.shards,
        )
        if not manifest.documents:
            hint = "; set valid_fraction higher, or 0 for no valid split" if split == "valid" else ""
            raise UserError(
                f"{common['source']}: no document for the {split} split ({left_out.empty} empty, "
                f"{left_out.bad} unreadable){hint}"
            )
        manifest.save(partial / split)
    return list(splits)
