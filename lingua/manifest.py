"""A folder of token shards and the ``manifest.json`` that describes it.

``shard_00000.tokens`` holds token ids (little-endian uint16 or uint32), documents one after another, each
``<s> tokens </s>``; ``shard_00000.docs`` holds for each document the offset (uint64, in tokens from the start
of the shard) at which it ends. Documents never cross shards. ``manifest.json`` is written last: a folder
without it is not data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.files import write_atomically
from lingua.tokenizer import Tokenizer

FORMAT_VERSION = 1
NAME = "manifest.json"
DOCS_DTYPE = "<u8"
AGAIN = "run setup/prepare_data.py again"


def token_dtype(vocab_size: int) -> str:
    """The smallest of the two token types that holds ids below ``vocab_size``."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


@dataclass(frozen=True)
class Shard:
    """One shard of a folder: counts, sizes in bytes, and checksums of its two files."""

    name: str  # without ending
    tokens: int
    documents: int
    tokens_bytes: int
    docs_bytes: int
    tokens_sha256: str
    docs_sha256: str


@dataclass
class Manifest:
    """What a folder of shards holds. All counts are over this folder (one split of one source)."""

    version: int
    source: str
    split: str  # train | valid
    tokenizer: dict[str, Any]  # Tokenizer.identity()
    dtype: str  # NumPy name of the token type: <u2 | <u4
    seed: int
    settings: dict[str, Any]  # what else decides the bytes
    inputs: list[dict[str, Any]]  # path, size in bytes, and time or tag of each raw file
    tokens: int  # <s> and </s> included
    documents: int
    bytes_of_text: int  # UTF-8
    empty_documents: int  # left out of the whole source: texts of nothing but white space
    skipped_count: int  # documents of the whole source that could not be read (on_error=skip)
    skipped: list[dict[str, Any]]  # the first of them: path, line, reason (skipped.jsonl beside the splits has all)
    shards: list[Shard]
    # documents of the whole source: read + pieces = stored + empty + unreadable + duplicates
    counts: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)  # of documents, in tokens: mean, longest, at_most
    languages: dict[str, Any] = field(default_factory=dict)  # of a sample of this split: documents, shares by ISO code
    folder: Path = field(default=Path(), compare=False)  # where it was read from; not in the file

    def tokens_path(self, shard: int) -> Path:
        return self.folder / f"{self.shards[shard].name}.tokens"

    def docs_path(self, shard: int) -> Path:
        return self.folder / f"{self.shards[shard].name}.docs"

    def open_tokens(self, shard: int) -> np.ndarray:
        """Token ids of a shard, a read-only memory map."""
        return np.memmap(self.tokens_path(shard), dtype=self.dtype, mode="r")

    def open_docs(self, shard: int) -> np.ndarray:
        """End offset of each document of a shard, in tokens, a read-only memory map."""
        return np.memmap(self.docs_path(shard), dtype=DOCS_DTYPE, mode="r")

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless ``tokenizer`` is the one the shards were written with."""
        ours, theirs = tokenizer.identity(), self.tokenizer
        if ours != theirs:
            keys = [key for key in ours if ours[key] != theirs.get(key)]
            raise UserError(
                f"{self.folder}: these shards were written with another tokenizer: "
                + "; ".join(f"{key} of the shards {theirs.get(key)}, of the config {ours[key]}" for key in keys)
                + f"; set tokenizer.name and tokenizer.path to the one that wrote them, or {AGAIN}"
            )

    def save(self, folder: Path) -> None:
        """Write ``folder/manifest.json``, atomically."""
        values = dataclasses.asdict(self)
        del values["folder"]
        write_atomically(folder / NAME, json.dumps(values, indent=1) + "\n")


def load_manifest(folder: str | Path) -> Manifest:
    """Read and check ``folder/manifest.json``; every shard must be there with its recorded size.

    Raises:
        UserError: no folder, no manifest, unreadable or of another version, no tokens, a shard missing or of
            another size. Contents are checked by :func:`verify`.
    """
    folder = Path(folder)
    path = folder / NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make it with setup/prepare_data.py")
    if not path.is_file():
        splits = [name for name in ("train", "valid") if (folder / name / NAME).is_file()]
        hint = f"; did you mean {folder / splits[0]}?" if splits else f"; {AGAIN}, it may have been interrupted"
        raise UserError(f"{folder}: no {NAME} here, so this is not a finished folder of shards{hint}")
    manifest = parse_manifest(path.read_text(), str(path), folder)
    _check_sizes(manifest)
    return manifest


def parse_manifest(text: str, path: str, folder: Path) -> Manifest:
    """A manifest from the content of its file ``path``, for shards in ``folder`` that nobody looked at yet.

    Raises:
        UserError: unreadable, or of another version.
    """
    try:
        values = json.loads(text)
        version = values["version"]
        if version == FORMAT_VERSION:
            values["shards"] = [Shard(**shard) for shard in values["shards"]]
            manifest = Manifest(**values, folder=folder)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not a readable manifest ({error!r}); {AGAIN}") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this code reads {FORMAT_VERSION}; {AGAIN}")
    return manifest


def _check_sizes(manifest: Manifest) -> None:
    if manifest.dtype not in ("<u2", "<u4"):
        raise UserError(f"{manifest.folder / NAME}: dtype {manifest.dtype!r}, expected <u2 or <u4; {AGAIN}")
    if not manifest.tokens:
        raise UserError(f"{manifest.folder}: no tokens in this folder; give the source more text")
    item = np.dtype(manifest.dtype).itemsize
    for i, shard in enumerate(manifest.shards):
        for file, size, count in (
            (manifest.tokens_path(i), shard.tokens_bytes, shard.tokens * item),
            (manifest.docs_path(i), shard.docs_bytes, shard.documents * 8),
        ):
            if size != count:
                raise UserError(f"{file}: the manifest gives {size} bytes for content of {count} bytes; {AGAIN}")
            if not file.is_file():
                raise UserError(f"{file}: missing, expected {size} bytes; {AGAIN}")
            found = file.stat().st_size
            if found != size:
                state = "truncated" if found < size else "too long"
                raise UserError(f"{file}: {state}: found {found} bytes, expected {size}; {AGAIN}")


def verify(folder: str | Path) -> Manifest:
    """:func:`load_manifest`, and read every byte: checksums, ids below the vocabulary size, document
    offsets that rise to the end of the shard, and totals that are the shards' sums. Raises UserError."""
    manifest = load_manifest(folder)
    for i, shard in enumerate(manifest.shards):
        for file, expected in (
            (manifest.tokens_path(i), shard.tokens_sha256),
            (manifest.docs_path(i), shard.docs_sha256),
        ):
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected:
                raise UserError(f"{file}: corrupt: sha256 {found}, expected {expected}; {AGAIN}")
        largest = int(manifest.open_tokens(i).max())
        if largest >= manifest.tokenizer["vocab_size"]:
            raise UserError(
                f"{manifest.tokens_path(i)}: token id {largest}, expected ids below "
                f"{manifest.tokenizer['vocab_size']}; {AGAIN}"
            )
        ends = manifest.open_docs(i)
        if ends[-1] != shard.tokens or (ends[1:] <= ends[:-1]).any():
            raise UserError(f"{manifest.docs_path(i)}: document ends do not rise to {shard.tokens}; {AGAIN}")
    for key in ("tokens", "documents"):
        total, found = getattr(manifest, key), sum(getattr(shard, key) for shard in manifest.shards)
        if total != found:
            raise UserError(f"{folder}: the manifest gives {total} {key}, its shards hold {found}; {AGAIN}")
    return manifest
