"""The first pass of a shuffle: text to tokens, each document appended to the bucket of its key.

Every so often what waits in memory is written out, and ``progress.json`` says how far everything is. A killed
run cuts the bucket files back to what it says and goes on with the next block.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from lingua.errors import UserError
from lingua.files import InputFile, write_atomically
from lingua.hashing import counter_hash, text_hash
from lingua.manifest import token_dtype
from lingua.preparation.readers import BadLine, Block, Document, ReaderArgs, blocks, parse
from lingua.preparation.shards import RECORD, Buckets, bucket_path
from lingua.preparation.workers import run_in_order
from lingua.progress import Progress
from lingua.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from lingua.preparation.shuffle import ShuffleArgs

PROGRESS = "progress.json"
SKIPPED = "skipped.jsonl"
SAVE_SECONDS = 60.0  # after which progress is written even if there is memory left


@dataclass
class Counts:
    """Documents of a source: ``read + pieces = stored + empty + unreadable + duplicates``."""

    read: int = 0
    empty: int = 0  # nothing but white space
    unreadable: int = 0
    duplicates: int = 0
    cut: int = 0  # documents that lost their end
    pieces: int = 0  # documents more than before because long ones were split
    stored: int = 0

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Tokenized:
    """The documents of one block: tokens end to end, one record each (``start`` within ``tokens``)."""

    place: tuple[int, int]  # number of the file among this job's, number of the block in it
    tokens: np.ndarray
    records: np.ndarray
    bad: list[BadLine]
    counts: Counts
    raw_bytes: int


@dataclass
class State:
    """How far a job is. ``blocks`` of file ``file`` (among this job's) are done, and all files before."""

    file: int = 0
    blocks: int = 0
    done: bool = False
    counts: Counts = field(default_factory=Counts)
    skipped_bytes: int = 0  # of the list of unreadable documents
    ends: list[int] = field(default_factory=list)  # tokens in each bucket
    records: list[int] = field(default_factory=list)  # documents in each bucket

    def save(self, folder: Path) -> None:
        write_atomically(folder / PROGRESS, json.dumps(asdict(self)))


def load_state(folder: Path) -> State | None:
    """What ``progress.json`` in ``folder`` says, None if there is none."""
    if not (folder / PROGRESS).is_file():
        return None
    values = json.loads((folder / PROGRESS).read_text())
    return State(**{**values, "counts": Counts(**values["counts"])})


def fill_buckets(
    folder: Path,
    title: str,
    files: list[InputFile],
    reader: ReaderArgs,
    args: ShuffleArgs,
    tokenizer: Tokenizer,
    n_buckets: int,
) -> None:
    """Tokenize ``files`` into buckets in ``folder``, from where an earlier run stopped.

    Raises UserError on an unreadable document (``on_error=fail``) or file.
    """
    state = _resume(folder, n_buckets, np.dtype(token_dtype(tokenizer.vocab_size)).itemsize)
    if state.done:
        return
    buckets = Buckets(folder, state.ends, state.records)
    most_waiting = max(args.memory_gb * 1e9 / 8, 1 << 20)
    # sizes are of stored bytes, progress counts those of the text
    known = not any(file.path.endswith((".gz", ".zst", ".parquet")) or not file.size for file in files)
    total = sum(file.size for file in files) if known else None
    with Progress(f"{title}: tokenizing", total, "tokens") as progress, (folder / SKIPPED).open("ab") as skipped:
        saved = time.monotonic()
        try:
            for done in tokenize_all(_work(files, reader, state, progress), reader, args, tokenizer):
                buckets.append(done.tokens, done.records)
                for bad in done.bad:
                    skipped.write(json.dumps(asdict(bad)).encode() + b"\n")
                state.counts.add(done.counts)
                state.file, state.blocks = done.place[0], done.place[1] + 1
                if buckets.waiting_bytes > most_waiting or time.monotonic() - saved > SAVE_SECONDS:
                    _save(buckets, skipped, state)
                    saved = time.monotonic()
                progress.advance(done.raw_bytes, len(done.tokens))
        except UserError:  # of a document or file that comes next: what lies before it is kept
            _save(buckets, skipped, state)
            raise
        state.done = True
        _save(buckets, skipped, state)


def _save(buckets: Buckets, skipped: BinaryIO, state: State) -> None:
    buckets.flush()
    skipped.flush()
    state.skipped_bytes = skipped.tell()
    state.save(buckets.folder)


def _resume(folder: Path, n_buckets: int, item_bytes: int) -> State:
    """The state of an earlier run, its files cut back to it; a fresh one if there is none or files are too short."""
    state = load_state(folder)
    if state and state.done:
        return state
    if state:
        sizes = {folder / SKIPPED: state.skipped_bytes}
        for i in range(n_buckets):
            sizes[bucket_path(folder, i, "tokens")] = state.ends[i] * item_bytes
            sizes[bucket_path(folder, i, "records")] = state.records[i] * RECORD.itemsize
        if all(not size or (path.is_file() and path.stat().st_size >= size) for path, size in sizes.items()):
            for path in sizes:
                if path.is_file():
                    os.truncate(path, sizes[path])
            print(f"{folder}: going on after {state.counts.read:,} documents", flush=True)
            return state
        print(f"{folder}: files of an interrupted run are incomplete, tokenizing again", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return State(ends=[0] * n_buckets, records=[0] * n_buckets)


def _work(
    files: list[InputFile], reader: ReaderArgs, state: State, progress: Progress
) -> Iterator[tuple[tuple[int, int], Block]]:
    """The blocks that are not done yet, each with its place."""
    for number, file in enumerate(files[state.file :], state.file):
        skip = state.blocks if number == state.file else 0
        for i, block in enumerate(blocks(file, reader)):
            if i < skip:
                progress.advance(_raw_bytes(block))
            else:
                yield (number, i), block


def _raw_bytes(block: Block) -> int:
    return sum(len(raw) for _, raw in block.pieces)


def tokenize_all(
    work: Iterable[tuple[tuple[int, int], Block]], reader: ReaderArgs, args: ShuffleArgs, tokenizer: Tokenizer
) -> Iterator[Tokenized]:
    """Tokenize blocks (each with its place) in order, in this process or in ``args.workers`` others."""
    if args.workers == 1:
        return (tokenize(block, reader, args, tokenizer, place) for place, block in work)
    return run_in_order(_tokenize_item, _share, (reader, args), work, args.workers)


def _share(reader: ReaderArgs, args: ShuffleArgs) -> tuple[ReaderArgs, ShuffleArgs, Tokenizer]:
    return reader, args, build_tokenizer(args.tokenizer)


def _tokenize_item(shared: tuple, item: tuple[tuple[int, int], Block]) -> Tokenized:
    return tokenize(item[1], *shared, place=item[0])


def tokenize(
    block: Block, reader: ReaderArgs, args: ShuffleArgs, tokenizer: Tokenizer, place: tuple[int, int] = (0, 0)
) -> Tokenized:
    """The tokens and records of a block's documents. Raises UserError on a bad line (``on_error=fail``)."""
    parsed = parse(block, reader)
    documents = [document for document in parsed.documents if document.text.strip()]
    dtype = token_dtype(tokenizer.vocab_size)
    bos, eos = np.array([tokenizer.bos_id], dtype), np.array([tokenizer.eos_id], dtype)
    counts = Counts(
        read=len(parsed.documents) + len(parsed.bad),
        empty=len(parsed.documents) - len(documents),
        unreadable=len(parsed.bad),
    )
    parts: list[np.ndarray] = []
    places: list[tuple[int, int]] = []  # document and piece of each record
    sizes: list[int] = []  # bytes of its text
    encoded = tokenizer.encode_batch([document.text for document in documents])
    for i, (document, ids) in enumerate(zip(documents, encoded, strict=True)):
        size = len(document.text.encode("utf-8", "surrogatepass"))
        pieces = [ids] if not args.max_document_tokens else _pieces(ids, args.max_document_tokens - 2)
        if args.long_documents == "cut" and len(pieces) > 1:
            size = round(size * len(pieces[0]) / len(ids))
            pieces = pieces[:1]
            counts.cut += 1
        counts.pieces += len(pieces) - 1
        for number, piece in enumerate(pieces):
            parts += (bos, piece.astype(dtype), eos)
            places.append((i, number))
            sizes.append(size if number == 0 else 0)
    return Tokenized(
        place=place,
        tokens=np.concatenate(parts) if parts else np.empty(0, dtype),
        records=_records(documents, places, [len(part) + 2 for part in parts[1::3]], sizes, args),
        bad=parsed.bad,
        counts=counts,
        raw_bytes=_raw_bytes(block),
    )


def _pieces(ids: np.ndarray, most: int) -> list[np.ndarray]:
    return [ids[start : start + most] for start in range(0, max(len(ids), 1), most)]


def _records(
    documents: list[Document], places: list[tuple[int, int]], lengths: list[int], sizes: list[int], args: ShuffleArgs
) -> np.ndarray:
    records = np.zeros(len(places), RECORD)
    if not places:
        return records
    of_document, piece = np.array(places, dtype=np.int64).T
    file = np.array([document.file for document in documents], dtype=np.int64)[of_document]
    row = np.array([document.row for document in documents], dtype=np.int64)[of_document]
    hashes = np.array([text_hash(document.text) for document in documents], dtype=np.int64)[of_document]
    # identical documents fall on the same side, whatever the seed
    records["valid"] = hashes.view(np.uint64) < np.uint64(args.valid_fraction * 2**64)
    if args.duplicates == "drop":  # copies of a text get the same key, so they meet in one bucket
        keys = counter_hash(args.seed, hashes)
        second = [hashlib.blake2b(d.text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for d in documents]
        records["text"] = np.array([int.from_bytes(digest[:8], "little") for digest in second], np.uint64)[of_document]
    else:
        keys = counter_hash(args.seed, file, row)
    keys = np.where(piece > 0, counter_hash(args.seed, keys, piece), keys)
    records["key"] = keys.view(np.uint64)
    records["file"], records["row"], records["piece"] = file, row, piece
    records["tokens"], records["bytes"] = lengths, sizes
    records["start"] = np.cumsum(records["tokens"]) - records["tokens"]
    return records
