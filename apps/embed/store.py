"""Rows and their texts as tokens, in files that are mapped and not read: made once, by what decides them.

``CACHE/KEY/``: ``tokens.u32`` (all texts one after another, each once), ``lengths.i32``, ``rows.npy`` ([rows, 2 + K]
numbers of texts: query, positive, negatives, -1 for those that a row lacks) and, last, ``manifest.json``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from apps.embed.data import BadRows, PairArgs, Row, read_ids, read_pairs
from lingua.args import to_dict
from lingua.embedder import role_sequences
from lingua.errors import UserError
from lingua.files import list_files, write_atomically
from lingua.frozen import FrozenEncoder, NoTokenError, has_half_pair
from lingua.hashing import text_hash

log = logging.getLogger(__name__)
CHUNK = 2000  # rows or texts read at a time
SAMPLE = "A tokenizer shows by how it cuts this: 3.14, re-read, naïve Zürich; quickly!"


class Store:
    """What :func:`build` wrote, mapped.

    Attributes:
        rows: [rows, 2 + K] int32 numbers of texts.
        lengths: tokens of each text.
        manifest: what was read, cut and left out.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self._tokens = np.memmap(folder / "tokens.u32", dtype="<u4", mode="r")
        self.lengths = np.fromfile(folder / "lengths.i32", dtype="<i4")
        self._bounds = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.rows: np.ndarray = np.load(folder / "rows.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def tokens(self, number: int) -> np.ndarray:
        """int64 ids of a text, special tokens included."""
        return self._tokens[self._bounds[number] : self._bounds[number + 1]].astype(np.int64)

    @property
    def negatives(self) -> int:
        """Most hard negatives of a row."""
        return self.rows.shape[1] - 2


def store_folder(cache: Path, path: str, args: PairArgs, encoder: FrozenEncoder) -> Path:
    """Where the store of the rows in ``path`` lies: a function of the files, how they are read and the tokenizer."""
    files = [file for part in (path, args.queries, args.collection) if part for file in list_files(part)]
    settings = {key: to_dict(args)[key] for key in ("max_length", "prompt", "on_error", "queries", "collection")}
    cut = role_sequences(encoder, [SAMPLE], "", 512).ids[0].tolist()
    facts = [[f"{file.path} {file.size} {file.stamp}" for file in files], settings, cut]
    return cache / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def build(folder: Path, path: str, args: PairArgs, encoder: FrozenEncoder) -> Iterator[None]:
    """Write the store, if it is not there; yields now and then.

    Raises:
        UserError: no file, a file or row that cannot be used, no row left, or no room.
    """
    if (folder / "manifest.json").is_file():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield from _Builder(folder, path, args, encoder).write()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written: {error.strerror or error}; data.cache_dir names another"
        ) from None


class _Builder:
    def __init__(self, folder: Path, path: str, args: PairArgs, encoder: FrozenEncoder) -> None:
        self.folder, self.path, self.args, self.encoder = folder, path, args, encoder
        self.bad = BadRows(args.on_error)
        self.numbers: dict[str, dict[Any, int]] = {"query": {}, "passage": {}}  # about 100 bytes a text; -1: no token
        self.count = self.n_tokens = self.rows = 0
        self.cut: Counter[str] = Counter({"query": 0, "passage": 0})
        self.digest = hashlib.sha256()
        self.widest = 0

    def write(self) -> Iterator[None]:
        names = ("tokens.u32", "lengths.i32", "flat.i32")
        with (
            (self.folder / names[0]).open("wb") as self.tokens,
            (self.folder / names[1]).open("wb") as self.lengths,
            (self.folder / names[2]).open("w+b") as self.flat,
        ):
            if self.args.queries is not None and self.args.collection is not None:
                yield from self._read_ids("query", self.args.queries)
                yield from self._read_ids("passage", self.args.collection)
            rows = read_pairs(self.path, self.bad)
            while chunk := list(islice(rows, CHUNK)):
                if self.args.queries is None:
                    self._add_texts("query", {row.query for row in chunk}, text_hash)
                    passages = {text for row in chunk for text in (row.positive, *row.negatives)}
                    self._add_texts("passage", passages, text_hash)
                for row in chunk:
                    self._add_row(row)
                yield
        if not self.rows:
            raise UserError(f"{self.path}: no row to train on{self._said()}")
        self._widen(self.folder / names[2])
        self._finish()

    def _key(self, text: str) -> Any:
        return text if self.args.queries is not None else text_hash(text)

    def _add_texts(self, role: str, texts: set[str], key: Callable[[str], Any]) -> None:
        """Give a number to each text that has none."""
        known = self.numbers[role]
        new = {key(text): text for text in sorted(texts) if key(text) not in known}
        self._tokenize(role, list(new), list(new.values()))

    def _tokenize(self, role: str, keys: list[Any], texts: list[str]) -> None:
        before, max_length = getattr(self.args.prompt, role), getattr(self.args.max_length, role)
        known = self.numbers[role]
        while texts:
            try:
                found = role_sequences(self.encoder, texts, before, max_length)
                break
            except NoTokenError as error:  # such as blanks of Unicode, that the tokenizer drops
                known[keys.pop(error.index)] = -1
                texts.pop(error.index)
        if not texts:
            return
        self.cut[role] += found.truncated
        lengths = np.array([len(ids) for ids in found.ids], dtype="<i4")
        self._put(self.tokens, np.concatenate(found.ids).astype("<u4"))
        self._put(self.lengths, lengths)
        known.update(zip(keys, range(self.count, self.count + len(keys)), strict=True))
        self.count, self.n_tokens = self.count + len(keys), self.n_tokens + int(lengths.sum())

    def _read_ids(self, role: str, path: str) -> Iterator[None]:
        lines = read_ids(path)
        while chunk := list(islice(lines, CHUNK)):
            for place, key, _ in chunk:
                if key in self.numbers[role]:
                    raise UserError(f"{place}: the id {key} stands there a second time")
                self.numbers[role][key] = -1
            there = [(key, text) for _, key, text in chunk if text.strip() and not has_half_pair(text)]
            self._tokenize(role, [key for key, _ in there], [text for _, text in there])
            yield

    def _add_row(self, row: Row) -> None:
        numbers = []
        for role, text in (("query", row.query), *(("passage", text) for text in (row.positive, *row.negatives))):
            number = self.numbers[role].get(self._key(text))
            if number is None:
                where = self.args.queries if role == "query" else self.args.collection
                return self.bad.add(row.place, f"{role} {text} is not in {where}", f"unknown {role} id")
            if number < 0:
                return self.bad.add(row.place, f"{role} {text[:80]!r} has no token", f"{role} without a token")
            numbers.append(number)
        self._put(self.flat, np.array([len(numbers), *numbers], dtype="<i4"))
        self.rows, self.widest = self.rows + 1, max(self.widest, len(numbers))
        return None

    def _put(self, file: Any, array: np.ndarray) -> None:
        data = array.tobytes()
        self.digest.update(data)
        file.write(data)

    def _widen(self, path: Path) -> None:
        """Rows of different lengths as one matrix."""
        flat, at = np.memmap(path, dtype="<i4", mode="r"), 0
        rows = np.lib.format.open_memmap(
            self.folder / "rows.npy", mode="w+", dtype="<i4", shape=(self.rows, self.widest)
        )
        for number in range(self.rows):
            count = int(flat[at])
            rows[number, :count], rows[number, count:] = flat[at + 1 : at + 1 + count], -1
            at += 1 + count
        rows.flush()
        del flat, rows
        path.unlink()

    def _said(self) -> str:
        total = sum(self.bad.counts.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.bad.counts.items()))
        return f"; {total} left out: {kinds} (such as {self.bad.examples[0]})" if total else ""

    def _finish(self) -> None:
        manifest = {
            "path": self.path,
            "files": [file.path for file in list_files(self.path)],
            "rows": self.rows,
            "texts": self.count,
            "tokens": self.n_tokens,
            "negatives": self.widest - 2,
            "cut": dict(self.cut),
            "left_out": dict(self.bad.counts),
            "left_out_examples": self.bad.examples,
            "repeated_negatives": self.bad.repeated,
            "sha256": self.digest.hexdigest(),
        }
        write_atomically(self.folder / "manifest.json", json.dumps(manifest, indent=1))
        log.info(
            "%s: %d rows, %d different texts of %d tokens, up to %d negatives a row; cut to their length: %d queries, "
            "%d passages%s",
            self.path, self.rows, self.count, self.n_tokens, self.widest - 2, self.cut["query"], self.cut["passage"],
            self._said(),
        )  # fmt: skip
