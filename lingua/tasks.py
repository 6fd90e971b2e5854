"""Labelled data for probes, from local files, in a few lines of YAML:

tasks:
  brown: {kind: tokens, train: brown_train.jsonl, test: brown_test.jsonl}
  reviews: {train: train.csv, test: test.csv, text: review, label: stars, kind: regression}
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.hashing import permutation
from lingua.scores import METRICS

KINDS = ("classification", "regression", "tokens")


@dataclass
class TaskArgs:
    """One labelled data set."""

    train: str = "???"  # file of labelled rows: .jsonl, .csv or .tsv, also .gz
    test: str = "???"  # file of the evaluation rows, of the same columns
    kind: str = "classification"  # classification | regression | tokens (a class for each word)
    text: str = "text"  # column of the text
    text_b: str | None = None  # column of the second text, for tasks on pairs
    label: str = "label"  # column of the class or number
    words: str = "words"  # tokens: column with the list of words
    tags: str = "tags"  # tokens: column with the list of their classes
    metric: str | None = None  # the primary score; none: accuracy, or spearman for regression
    # most training rows, a seeded subset (the paper's limit); -1: all. A row of a tokens task is a word, and
    # its sentences stay whole
    max_train_rows: int = 10_000
    max_test_rows: int = -1  # most evaluation rows; -1: all
    seed: int = 0  # of the subsets

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"task: kind={self.kind}: expected one of {', '.join(KINDS)}")
        if self.kind == "tokens" and self.text_b is not None:
            raise UserError(f"task: text_b={self.text_b}: a tokens task has no pairs")
        known = METRICS[self.score_kind]
        if self.metric is None:
            self.metric = next(iter(known))
        if self.metric not in known:
            raise UserError(f"task: metric={self.metric}: a {self.kind} task has {', '.join(known)}")
        for key in ("max_train_rows", "max_test_rows"):
            if getattr(self, key) != -1 and getattr(self, key) < 2:
                raise UserError(f"task: {key}={getattr(self, key)}: expected -1 (all) or at least 2")

    @property
    def score_kind(self) -> str:
        """What its predictions are scored as: ``classification`` or ``regression``."""
        return "regression" if self.kind == "regression" else "classification"


@dataclass
class Split:
    """The rows of one file that are used, in the file's order."""

    path: str
    sha256: str  # of the file's bytes as stored
    rows_in_file: int
    texts: list[str] = field(default_factory=list)
    pairs: list[str] | None = None
    sentences: list[list[str]] = field(default_factory=list)  # of a tokens task, instead of texts
    # one for each text or, sentence after sentence, each word
    labels: list[str] | list[float] = field(default_factory=list)
    y: np.ndarray = field(default_factory=lambda: np.empty(0))  # class numbers (int64) or targets (float64)

    @property
    def groups(self) -> np.ndarray:
        """For each label the number of its text or sentence."""
        if self.sentences:
            return np.repeat(np.arange(len(self.sentences)), [len(words) for words in self.sentences])
        return np.arange(len(self.labels))


@dataclass
class Task:
    """A labelled task that has been read: its two splits and its classes."""

    name: str
    args: TaskArgs
    train: Split
    test: Split
    classes: list[str]  # sorted; empty for regression. Class numbers are places in it


def load_task(name: str, args: TaskArgs) -> Task:
    """Read, check and subset both files.

    Raises:
        UserError: a file that is missing, empty or of an unknown kind; a row that cannot be used, with file
            and line; fewer than two classes or values in the training rows.
    """
    train = _load_split(args.train, args, args.max_train_rows)
    test = _load_split(args.test, args, args.max_test_rows)
    kinds = set(train.labels)
    if len(kinds) < 2:
        raise UserError(
            f"{args.train}: all {len(train.labels)} training rows have the label {kinds.pop()!r}: "
            "expected at least two different ones"
        )
    classes: list[str] = []
    if args.score_kind == "classification":
        classes = sorted({*train.labels, *test.labels})
        number = {label: index for index, label in enumerate(classes)}
        if not kinds & set(test.labels):
            raise UserError(
                f"{args.test}: none of its labels ({_some(test.labels)}) is among those of {args.train} "
                f"({_some(train.labels)}): is it labelled, and the same task?"
            )
        for split in (train, test):
            split.y = np.array([number[label] for label in split.labels], dtype=np.int64)
    else:
        for split in (train, test):
            split.y = np.array(split.labels, dtype=np.float64)
    return Task(name, args, train, test, classes)


def _some(labels: list[Any]) -> str:
    names = sorted(set(labels))
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def _load_split(path: str, args: TaskArgs, max_rows: int) -> Split:
    read = _token_row if args.kind == "tokens" else _text_row
    rows = [read(row, args, f"{path}, line {line}") for line, row in read_rows(path)]
    if not rows:
        raise UserError(f"{path}: no rows")
    with open(path, "rb") as file:
        split = Split(path, hashlib.file_digest(file, "sha256").hexdigest(), len(rows))
    rows = [rows[i] for i in _subset([row[2] for row in rows], max_rows, args.seed)]
    if args.kind == "tokens":
        split.sentences = [row[0] for row in rows]
        split.labels = [tag for row in rows for tag in row[1]]
    else:
        split.texts = [row[0][0] for row in rows]
        split.pairs = None if args.text_b is None else [row[0][1] for row in rows]
        split.labels = [row[1] for row in rows]
    return split


def _subset(sizes: list[int], most: int, seed: int) -> list[int]:
    """Rows of a seeded order up to the first that would pass ``most`` in all, in the file's order."""
    if most == -1:
        return list(range(len(sizes)))
    order = permutation(len(sizes), seed)
    within = np.cumsum(np.array(sizes)[order]) <= most
    return sorted(order[: max(1, int(within.sum()))].tolist())


def _text_row(row: dict[str, Any], args: TaskArgs, where: str) -> tuple[tuple[str, ...], str | float, int]:
    """((text[, second text]), label, size in rows)"""
    texts = []
    for column in (args.text,) if args.text_b is None else (args.text, args.text_b):
        value = _column(row, column, where)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: column {column!r} holds {value!r}: expected a text that is not empty")
        texts.append(value)
    label = _column(row, args.label, where)
    if args.kind == "classification":
        return tuple(texts), _class(label, args.label, where), 1
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: column {args.label!r} holds {label!r}: expected a finite number")
    return tuple(texts), number, 1


def _token_row(row: dict[str, Any], args: TaskArgs, where: str) -> tuple[list[str], list[str], int]:
    """(words, tags, size in rows)"""
    words, tags = _column(row, args.words, where), _column(row, args.tags, where)
    for column, value in ((args.words, words), (args.tags, tags)):
        if not isinstance(value, list) or not value:
            raise UserError(f"{where}: column {column!r} holds {value!r}: expected a list that is not empty")
    if len(words) != len(tags):
        raise UserError(f"{where}: {len(words)} {args.words} and {len(tags)} {args.tags}: expected as many")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise UserError(f"{where}: column {args.words!r} has {word!r}: expected a word that is not empty")
    return words, [_class(tag, args.tags, where) for tag in tags], len(words)


def _column(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise UserError(f"{where}: no column {name!r}; found {', '.join(map(str, row)) or 'none'}")
    return row[name]


def _class(value: Any, column: str, where: str) -> str:
    if not isinstance(value, (str, int)) or value == "":
        raise UserError(f"{where}: column {column!r} holds {value!r}: expected a class (a string or an integer)")
    return str(value)


def read_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) of a labelled file; the kind is told by its ending.

    ``.jsonl``: one object a line. ``.csv``: a line of column names, quotes as in RFC 4180. ``.tsv``: a line of
    column names, quotes are characters like any other. UTF-8; ``.gz`` behind any of them.

    Raises:
        UserError: no such file, unknown ending, or a line that cannot be read.
    """
    ending = "".join(Path(path).suffixes[-2:]) if path.endswith(".gz") else Path(path).suffix
    read = {".jsonl": _read_jsonl, ".csv": _read_table, ".tsv": _read_table}.get(ending.removesuffix(".gz"))
    if read is None:
        raise UserError(f"{path}: expected a file that ends in .jsonl, .csv or .tsv (or those with .gz)")
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    yield from read(path, ending.startswith(".tsv"))


def _lines(path: str) -> Iterator[str]:
    """Lines with their ends, decoded one at a time so that an error has a line number."""
    number = 0
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path}: cannot be read after line {number}: {error}") from None


def _read_jsonl(path: str, _: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}): {line.strip()[:80]!r}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found {line.strip()[:80]!r}")
        yield number, row


def _read_table(path: str, tabs: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit of 131,072 characters is less than a document
    quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
    reader = csv.reader(_lines(path), delimiter="\t" if tabs else ",", quoting=quoting, strict=True)
    columns: list[str] | None = None
    try:
        for values in reader:
            if columns is None:
                columns = values
                if len(set(columns)) < len(columns):
                    raise UserError(f"{path}, line 1: a column name stands twice: {', '.join(columns)}")
                continue
            if len(values) != len(columns):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(values)} columns, the first line names {len(columns)}"
                )
            yield reader.line_num, dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None
