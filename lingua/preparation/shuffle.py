"""Raw text to globally shuffled token shards, in bounded memory.

Every document has a key, a hash of (seed, file number, number in that file), or of (seed, text) where duplicates
are dropped. The shards hold the documents in the order of their keys, so the result depends on nothing else: not
on workers, memory, machines or interruptions. Three stages get there. ``tokenize`` appends each document to one
of many bucket files, each for a range of keys (:mod:`lingua.preparation.tokenizing`); ``sort`` sorts one bucket at a
time in memory; ``pack`` cuts the sorted buckets into shards (:mod:`lingua.preparation.sorting`).

All work happens in ``OUT/SOURCE.partial``, which becomes ``OUT/SOURCE`` at the very end. What is in it is not done
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.files import InputFile, list_files, write_atomically
from lingua.manifest import FORMAT_VERSION, NAME, Manifest, load_manifest, token_dtype
from lingua.preparation import languages
from lingua.preparation.estimate import bucket_count, check_disk_space, estimate
from lingua.preparation.readers import BLOCK_BYTES, ReaderArgs
from lingua.preparation.stages import run_stages, split_names
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer

STAGES = ("tokenize", "sort", "pack")


@dataclass
class ShuffleArgs:
    """What decides the bytes: ``tokenizer``, ``seed``, ``valid_fraction``, ``shard_tokens``, ``duplicates``,
    ``max_document_tokens`` and ``long_documents``, and of the manifest also ``languages``."""

    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    seed: int = 0  # of the order
    valid_fraction: float = 0.01  # share of documents that go to the valid split, by a hash of their text
    shard_tokens: int = 100_000_000  # a shard ends before the document that would exceed this
    duplicates: str = "keep"  # documents whose text is exactly that of another: keep | drop (all but the first)
    max_document_tokens: int = 0  # <s> and </s> included; 0: any length
    long_documents: str = "split"  # what becomes of longer ones: split (each piece is a document) | cut
    languages: int = 1000  # documents of each split whose language is guessed, for the manifest; 0: none
    workers: int = 1  # processes; 1: this one alone
    memory_gb: float = 2.0  # of all workers, beside what Python and the tokenizer take in each
    check_disk: bool = True  # stop where the estimate of the disk needed exceeds what is free
    stage: str = "all"  # all | tokenize | sort | pack: the stages one by one, for several machines
    part: str = "0/1"  # i/n: this is job i (from 0) of n that share the work and the folder

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("valid_fraction", self.valid_fraction, 0 <= self.valid_fraction < 1, "0 <= fraction < 1"),
            ("shard_tokens", self.shard_tokens, self.shard_tokens >= 1, "at least 1"),
            ("duplicates", self.duplicates, self.duplicates in ("keep", "drop"), "keep or drop"),
            (
                "max_document_tokens",
                self.max_document_tokens,
                self.max_document_tokens == 0 or self.max_document_tokens >= 3,
                "0 or at least 3",
            ),
            ("languages", self.languages, self.languages >= 0, "at least 0"),
            ("long_documents", self.long_documents, self.long_documents in ("split", "cut"), "split or cut"),
            ("workers", self.workers, self.workers >= 1, "at least 1"),
            ("memory_gb", self.memory_gb, self.memory_gb > 0, "above 0"),
            ("stage", self.stage, self.stage in ("all", *STAGES), f"all or one of {', '.join(STAGES)}"),
        ):
            if not good:
                raise UserError(f"{name}={value}: expected {expected}")
        if self.share[1] > 1 and self.stage == "all":
            raise UserError(
                f"part={self.part}: several jobs take one stage at a time, each when the one before is done by all: "
                "stage=tokenize, then stage=sort, then stage=pack"
            )

    @property
    def share(self) -> tuple[int, int]:
        """Number of this job, and of all jobs. Raises UserError if ``part`` is not i/n."""
        number, _, n = self.part.partition("/")
        if not (number.isdigit() and n.isdigit() and int(number) < int(n)):
            raise UserError(f"part={self.part}: expected i/n with i from 0 to n - 1, such as 0/4")
        return int(number), int(n)


def shuffle(name: str, reader: ReaderArgs, args: ShuffleArgs, out: str | Path) -> dict[str, Manifest]:
    """Prepare one source: ``OUT/NAME/train`` and, for ``valid_fraction`` above 0, ``OUT/NAME/valid``.

    Finished work (same settings, tokenizer, and names and sizes of the inputs; it is said if their times are others)
    is recognised and returned at once; interrupted work goes on.

    Returns:
        The manifests by split; none while other stages or other jobs are still to come.

    Raises:
        UserError: unreadable input, nothing in it, other settings in an existing folder, no space.
    """
    files = list_files(reader.path)
    empty = [file.path for file in files if file.stamp and not file.size]
    if empty:
        print(f"{name}: note: {len(empty)} of {len(files)} files have 0 bytes, such as {empty[0]}", flush=True)
    if args.languages:
        languages.package()  # a missing one is known at once
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
        "settings": _settings(args) | {"reader": _reader_settings(reader)},
        "inputs": [{"path": file.path, "bytes": file.size, "stamp": file.stamp} for file in files],
    }
    final, partial = Path(out) / name, Path(out) / f"{name}.partial"
    if final.exists():
        return _finished(final, common, args)
    try:
        plan = _plan(partial, files, reader, args, tokenizer, common)
        with _alone(partial / "work", args):
            if final.exists():  # another process did it all while this one looked
                shutil.rmtree(partial)
                return _finished(final, common, args)
            if not run_stages(partial, plan, files, reader, args, tokenizer, common):
                print(f"{name}: part {args.part} of stage {args.stage} is done", flush=True)
                return {}
            for path in partial.rglob("*.partial"):
                path.unlink()  # of a process that was killed while it wrote
            partial.rename(final)
        shutil.rmtree(final / "work", ignore_errors=True)
    except OSError as error:
        if final.exists():
            return _finished(final, common, args)
        raise UserError(f"{partial}: cannot write: {error}; when that is mended the same command goes on") from None
    return {split: load_manifest(final / split) for split in split_names(args)}


@contextlib.contextmanager
def _alone(work: Path, args: ShuffleArgs) -> Iterator[None]:
    """Raise UserError if another process does the same share of the same work: both would write the same files."""
    with (work / f"lock_{args.part.replace('/', '_of_')}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{work}: another process is at work on part={args.part} here; wait for it, or stop it"
            ) from None
        except OSError as error:  # file systems without locks
            print(f"{work}: no lock ({error.strerror}): see to it that no other process works there", flush=True)
        yield


# --- settings, and what exists already ------------------------------------------------------------------------


def _settings(args: ShuffleArgs) -> dict[str, Any]:
    names = ("valid_fraction", "shard_tokens", "duplicates", "max_document_tokens", "long_documents", "languages")
    # 0 and 0.0 are written alike
    return {**{name: getattr(args, name) for name in names}, "valid_fraction": float(args.valid_fraction)}


def _reader_settings(reader: ReaderArgs) -> dict[str, Any]:
    return {key: value for key, value in asdict(reader).items() if key != "path"}


def _finished(final: Path, common: dict[str, Any], args: ShuffleArgs) -> dict[str, Manifest]:
    splits = split_names(args)
    manifests = {split: load_manifest(final / split) for split in splits if (final / split / NAME).is_file()}
    if "train" not in manifests:
        raise UserError(f"{final}: exists, but was not written by this command; choose another out or name")
    found = {key: getattr(manifests["train"], key) for key in common}
    # settings that did not exist when the folder was written had the value that is now their default
    found["settings"] = _settings(ShuffleArgs()) | found["settings"]
    found["settings"]["reader"] = _reader_settings(ReaderArgs()) | found["settings"].get("reader", {})
    # the same files may lie elsewhere now
    difference = _difference(*({**values, "inputs": _sizes(values["inputs"])} for values in (found, common)))
    if difference:
        raise UserError(
            f"{final}: already prepared otherwise: {difference}; choose another out, or delete the folder to "
            "prepare it anew"
        )
    print(
        f"{final}: already prepared, nothing to do: same settings, tokenizer, and names and sizes of inputs", flush=True
    )
    touched = [
        new["path"]
        for old, new in zip(found["inputs"], common["inputs"], strict=True)
        if old.get("stamp", new["stamp"]) != new["stamp"]
    ]
    if touched:
        print(
            f"{final}: note: {len(touched)} of {len(common['inputs'])} inputs have the same size but another time or "
            f"tag than then, such as {touched[0]}; if their text is another, delete the folder and prepare again",
            flush=True,
        )
    return manifests


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


def _plan(
    partial: Path,
    files: list[InputFile],
    reader: ReaderArgs,
    args: ShuffleArgs,
    tokenizer: Tokenizer,
    common: dict[str, Any],
) -> dict[str, Any]:
    """What all jobs must agree on, kept in ``work/plan.json``: made by the first, compared by the others and by a
    run that goes on."""
    path = partial / "work" / "plan.json"
    wanted = {
        **common,
        "settings": common["settings"] | {"reader": {**common["settings"]["reader"], "on_error": ""}},  # may change
        "inputs": {f"{file.index} {file.path}": f"{file.size} {file.stamp}" for file in files},
        "jobs": args.share[1],
        "block_bytes": BLOCK_BYTES,
    }
    if path.is_file():
        plan = json.loads(path.read_text())
        if args.stage in ("sort", "pack"):  # any number of jobs will do
            wanted["jobs"] = plan["jobs"]
        difference = _difference({key: plan[key] for key in wanted}, wanted)
        if difference:
            raise UserError(
                f"{partial}: an interrupted run was another one: {difference}; repeat that one, or delete the folder "
                "to begin anew"
            )
        return plan
    if args.stage in ("sort", "pack"):
        raise UserError(f"{partial}: no work to go on with; run stage=tokenize first")
    expected = estimate(files, reader, args, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(common["source"], path.parent, expected, args, np.dtype(common["dtype"]).itemsize)
    plan = {**wanted, "buckets": bucket_count(expected, np.dtype(common["dtype"]).itemsize, args)}
    write_atomically(path, json.dumps(plan), keep=True)
    return _plan(partial, files, reader, args, tokenizer, common)  # another job may have been the first
