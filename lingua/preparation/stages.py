"""The stages of a shuffle, each shared by any number of jobs: see :mod:`lingua.preparation.shuffle`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingua.errors import UserError
from lingua.files import InputFile, write_atomically
from lingua.manifest import Manifest
from lingua.preparation.languages import language_statistics
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shards import bucket_path
from lingua.preparation.sorting import ShardJob, SortJob, Split, pack_shard, sort_bucket
from lingua.preparation.tokenizing import SKIPPED, Counts, fill_buckets, load_state
from lingua.preparation.workers import run_in_order
from lingua.progress import Progress
from lingua.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lingua.preparation.shuffle import ShuffleArgs

MAX_LISTED = 1000  # unreadable documents in the manifest; skipped.jsonl has all


def run_stages(
    partial: Path,
    plan: dict[str, Any],
    files: list[InputFile],
    reader: ReaderArgs,
    args: ShuffleArgs,
    tokenizer: Tokenizer,
    common: dict[str, Any],
) -> bool:
    """Do this job's share; whether with it everything is done."""
    number, n = args.share
    work = partial / "work"
    if args.stage in ("all", "tokenize"):
        folder = work / f"part_{number:05d}"
        fill_buckets(folder, common["source"], files[number::n], reader, args, tokenizer, plan["buckets"])
    if args.stage in ("all", "sort"):
        _sort(work, plan, args, common)
    return args.stage in ("all", "pack") and _pack(partial, plan, args, tokenizer, common)


def split_names(args: ShuffleArgs) -> dict[str, bool]:
    """The splits that a preparation writes: train, and valid if a share goes there."""
    return {"train": False, "valid": True} if args.valid_fraction else {"train": False}


def _sort(work: Path, plan: dict[str, Any], args: ShuffleArgs, common: dict[str, Any]) -> None:
    parts = [work / f"part_{i:05d}" for i in range(plan["jobs"])]
    states = [load_state(part) for part in parts]
    missing = [str(i) for i, state in enumerate(states) if state is None or not state.done]
    if missing:
        raise UserError(f"{work}: stage tokenize is not done by job {', '.join(missing)} of {plan['jobs']}")
    out = work / "sorted"
    out.mkdir(exist_ok=True)
    job = SortJob(
        parts=parts,
        out=out,
        n_buckets=plan["buckets"],
        dtype=common["dtype"],
        splits=split_names(args),
        drop_duplicates=args.duplicates == "drop",
        memory_bytes=0.8 * args.memory_gb * 1e9 / args.workers,
    )
    number, n = args.share
    todo = range(number, plan["buckets"], n)
    with Progress(f"{common['source']}: sorting", len(todo), "tokens") as progress:
        for tokens in run_in_order(sort_bucket, _given, (job,), todo, args.workers):
            progress.advance(1, tokens)


def _given(value: Any) -> Any:
    return value


def _pack(partial: Path, plan: dict[str, Any], args: ShuffleArgs, tokenizer: Tokenizer, common: dict[str, Any]) -> bool:
    """Write this job's shards; if with them all are there, the manifests too. Returns whether they are."""
    work = partial / "work"
    out = work / "sorted"
    missing = [str(i) for i in range(plan["buckets"]) if not bucket_path(out, i, "json").is_file()]
    if missing:
        raise UserError(f"{work}: stage sort is not done: {len(missing)} of {plan['buckets']} buckets are missing")
    counts, skipped = _counts(partial, plan, out, args)
    splits = {}
    for name in split_names(args):
        (partial / name).mkdir(exist_ok=True)
        splits[name] = Split(out, plan["buckets"], name, partial / name, common["dtype"], args.shard_tokens)
        if not splits[name].documents:
            shutil.rmtree(partial)
            hint = "; set valid_fraction higher, or 0 for no valid split" if name == "valid" else ""
            first = "; the first: {path}, line {line}: {reason}".format(**skipped[0]) if skipped else ""
            raise UserError(
                f"{common['source']}: no document for the {name} split ({counts.empty} empty, {counts.unreadable} "
                f"unreadable, in {len(common['inputs'])} files{first}){hint}"
            )
    counts.stored = sum(split.documents for split in splits.values())
    if counts.read + counts.pieces != counts.stored + counts.empty + counts.unreadable + counts.duplicates:
        raise UserError(f"{work}: documents are missing ({asdict(counts)}): delete the folder and prepare again")
    number, n = args.share
    jobs = [job for split in splits.values() for job in split.jobs][number::n]
    with Progress(f"{common['source']}: writing shards", len(jobs), "tokens") as progress:
        job: ShardJob
        for job in run_in_order(pack_shard, _given, (None,), jobs, args.workers):
            splits[job.split].free(job)
            progress.advance(1, sum(last - first for _, first, last in job.tokens))
    for name, split in splits.items():
        shards = split.shards()
        if shards is None:
            return False
        manifest = Manifest(
            **common,
            split=name,
            tokens=split.tokens,
            documents=split.documents,
            bytes_of_text=split.bytes,
            empty_documents=counts.empty,
            skipped_count=counts.unreadable,
            skipped=skipped,
            shards=shards,
            counts=asdict(counts),
            lengths=split.length_statistics(),
            folder=partial / name,
        )
        if args.languages:
            manifest.languages = language_statistics(manifest, tokenizer, args.languages)
        manifest.save(partial / name)
    return True


def _counts(partial: Path, plan: dict[str, Any], out: Path, args: ShuffleArgs) -> tuple[Counts, list[dict[str, Any]]]:
    """The counts of all jobs, and the first unreadable documents; the whole list goes to ``skipped.jsonl``.

    A duplicate that was split is dropped with its pieces, which then are no pieces more than before.
    """
    counts = Counts()
    skipped: list[dict[str, Any]] = []
    for i in range(plan["jobs"]):
        folder = partial / "work" / f"part_{i:05d}"
        state = load_state(folder)
        if state is None:
            raise UserError(f"{folder}: part {i} of the work is gone; run its stage=tokenize again")
        counts.add(state.counts)
        skipped += [json.loads(line) for line in (folder / SKIPPED).read_text().splitlines()]
    skipped.sort(key=lambda bad: (bad["path"], bad["line"]))
    for i in range(plan["buckets"]):
        said = json.loads(bucket_path(out, i, "json").read_text())
        counts.duplicates += said["duplicates"]
        counts.pieces -= said["duplicate_pieces"]
    if skipped:
        write_atomically(partial / SKIPPED, "".join(json.dumps(bad) + "\n" for bad in skipped))
    return counts, skipped[:MAX_LISTED]
