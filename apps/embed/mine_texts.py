"""What is mined: the different queries and passages of pairs and of further files, each once, in files of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from apps.embed.data import BadRows, read_pairs
from apps.embed.models import Model
from apps.embed.texts import read_texts
from lingua.errors import UserError
from lingua.evaluation.results import write_whole
from lingua.hashing import text_hash


class _Texts:
    """Different texts, each once, written as they come."""

    def __init__(self, path: Path) -> None:
        self.file, self.offsets, self.numbers = path.open("wb"), [0], dict[int, int]()

    def number(self, text: str) -> int:
        """Of a text, which is written if it is new."""
        key = text_hash(text)
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            line = json.dumps({"text": text}).encode() + b"\n"
            self.file.write(line)
            self.offsets.append(self.offsets[-1] + len(line))
        return self.numbers[key]

    def close(self, offsets: Path) -> None:
        self.file.close()
        np.save(offsets, np.array(self.offsets, dtype=np.int64))


def write_texts(pairs: str, corpus: str | None, column: str, on_error: str, work: Path, model: Model) -> None:
    """The different queries and passages, and the rows as their numbers: ``rows.npy`` [rows, 2].

    Args:
        pairs, corpus: files of rows, and of further passages in ``column``.
        on_error: a row or passage that cannot be encoded by ``model``: fail, or skip and count.

    Raises:
        UserError: a bad row, or none.
    """
    queries, passages = _Texts(work / "queries.jsonl"), _Texts(work / "passages.jsonl")
    bad, rows = BadRows(on_error, "on_error"), []
    same = []  # of a passage that is word by word a query: those two are not told apart
    for row in read_pairs(pairs, bad):
        if not all(has_token(text, model) for text in (row.query, row.positive, *row.negatives)):
            bad.add(row.place, "a text without a token: the tokenizer drops all of it", "text without a token")
            continue
        rows.append((queries.number(row.query), passages.number(row.positive)))
        for text in row.negatives:
            passages.number(text)
    if not rows:
        raise UserError(f"path={pairs}: has no row with a query and a positive")
    for text in read_texts(corpus, column) if corpus else ():
        if text.bad or not has_token(text.text, model):
            bad.add(f"{text.path}, line {text.line}", text.bad or "no token: the tokenizer drops all of it", "passage")
        else:
            passages.number(text.text)
    for key, query in queries.numbers.items():
        if key in passages.numbers:
            same.append((query, passages.numbers[key]))
    queries.close(work / "queries.npy")
    passages.close(work / "passages.npy")
    np.save(work / "rows.npy", np.array(rows, dtype=np.int64))
    np.save(work / "same.npy", np.array(same, dtype=np.int64).reshape(-1, 2))
    told = {"bad": sum(bad.counts.values()), "bad_listed": bad.examples, "passages": len(passages.numbers)}
    write_whole(work / "texts.json", json.dumps(told).encode())


def has_token(text: str, model: Model) -> bool:
    """Whether anything of ``text`` reaches the model. Letters and digits always do, so most texts are not tried."""
    return any(letter.isalnum() for letter in text) or not model.encode_or_zeros([text])[1]


def reader(file: BinaryIO, offsets: Path) -> Callable[[int], str]:
    """Gives the text of a number; ``offsets`` says where each begins in ``file``."""
    at = np.load(offsets, mmap_mode="r")

    def read(number: int) -> str:
        file.seek(at[number])
        return json.loads(file.read(at[number + 1] - at[number]))["text"]

    return read
