"""Labelled data for probes, from local files, in a few lines of YAML:

tasks:
  brown: {kind: tokens, train: brown_train.jsonl, test: brown_test.jsonl}
  reviews: {train: train.csv, test: test.csv, text: review, label: stars, kind: regression}

``python -m lingua.evaluation.tasks train=FILE test=FILE ...`` reads one and says what it found.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lingua.args import cli
from lingua.errors import UserError
from lingua.evaluation.samples import whole_groups
from lingua.evaluation.scores import METRICS
from lingua.evaluation.tables import file_digest, read_rows

KINDS = ("classification", "regression", "tokens")


@dataclass
class TaskArgs:
    """One labelled data set."""

    train: str = "???"  # file of labelled rows: .jsonl, .csv, .tsv or (tokens) .conll, also .gz, or .parquet
    test: str = "???"  # file of the evaluation rows, of the same columns
    kind: str = "classification"  # classification | regression | tokens (a class for each word)
    text: str = "text"  # column of the text
    text_b: str | None = None  # column of the second text, for tasks on pairs
    label: str = "label"  # column of the class or number
    words: str = "words"  # tokens: column with the list of words
    tags: str = "tags"  # tokens: column with the list of their classes
    metric: str | None = None  # the primary score; none: accuracy, or spearman for regression
    # most training rows, a seeded subset; -1: all. A row of a tokens task is a word, and its sentences stay whole.
    # What the scores are fitted on is chosen among these: probe.max_samples
    max_train_rows: int = -1
    max_test_rows: int = -1  # most evaluation rows; -1: all
    seed: int = 0  # of the subsets

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"task: kind={self.kind}: expected one of {', '.join(KINDS)}")
        if self.kind == "tokens" and self.text_b is not None:
            raise UserError(f"task: text_b={self.text_b}: a tokens task has no pairs")
        known = METRICS["regression" if self.kind == "regression" else "binary"]
        if self.metric is None:
            self.metric = next(iter(known))
        if self.metric not in known:
            raise UserError(f"task: metric={self.metric}: a {self.kind} task has {', '.join(known)}")
        check_limits("task", self)


def check_limits(section: str, args: Any) -> None:
    """Raise UserError unless ``max_train_rows`` and ``max_test_rows`` can be."""
    for key in ("max_train_rows", "max_test_rows"):
        if getattr(args, key) != -1 and getattr(args, key) < 2:
            raise UserError(f"{section}: {key}={getattr(args, key)}: expected -1 (all) or at least 2")


@dataclass
class Split:
    """The rows of one or more files that are used, in their order."""

    files: dict[str, str]  # SHA-256 of the bytes by path
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
    kind: str  # classification | regression | tokens
    metrics: tuple[str, ...]  # what is shown; the first is the primary score
    train: Split
    test: Split
    classes: list[str]  # class numbers are places in it; empty for regression
    average: bool = False  # whether it counts in GLUE's mean
    left_out: dict[str, list[int]] = field(default_factory=dict)  # by file, lines that could not be used


def load_task(name: str, args: TaskArgs) -> Task:
    """Read, check and subset both files.

    Raises:
        UserError: a file that is missing, empty or of an unknown kind; a row that cannot be used, with file
            and line; fewer than two classes or values in the training rows.
    """
    train = load_split(args.train, args, args.max_train_rows)
    test = load_split(args.test, args, args.max_test_rows)
    classes = [] if args.kind == "regression" else sorted({*train.labels, *test.labels})
    if args.metric == "f1" and len(classes) != 2:
        raise UserError(
            f"tasks.{name}.metric=f1: expected two classes, found {len(classes)}; macro_f1 takes any number"
        )
    return number_labels(Task(name, args.kind, (str(args.metric),), train, test, classes))


def number_labels(task: Task) -> Task:
    """Fill ``y`` of both splits. Raises UserError if the labels say nothing, or are not of one task."""
    train, test = task.train, task.test
    kinds, where = set(train.labels), ", ".join(train.files)
    if len(kinds) < 2:
        raise UserError(
            f"{where}: all {len(train.labels)} training rows have the label {kinds.pop()!r}: "
            "expected at least two different ones"
        )
    if task.classes and not kinds & set(test.labels):
        raise UserError(
            f"{', '.join(test.files)}: none of its labels ({_some(test.labels)}) is among those of {where} "
            f"({_some(train.labels)}): is it labelled, and the same task?"
        )
    number = {label: index for index, label in enumerate(task.classes)}
    for split in (train, test):
        if task.classes:
            split.y = np.array([number[label] for label in split.labels], dtype=np.int64)
        else:
            split.y = np.array(split.labels, dtype=np.float64)
    return task


def _some(labels: list[Any]) -> str:
    names = sorted(set(labels))
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def load_split(path: str, args: TaskArgs, max_rows: int) -> Split:
    """Read, check and subset one file, without ``y``. Raises UserError as :func:`load_task` does."""
    read = _token_row if args.kind == "tokens" else _text_row
    rows = [read(row, args, f"{path}, line {line}") for line, row in read_rows(path)]
    if not rows:
        raise UserError(f"{path}: no rows")
    split = Split({path: file_digest(path)}, len(rows))
    rows = [rows[i] for i in whole_groups([row[2] for row in rows], max_rows, args.seed)]
    if args.kind == "tokens":
        split.sentences = [row[0] for row in rows]
        split.labels = [tag for row in rows for tag in row[1]]
    else:
        split.texts = [row[0][0] for row in rows]
        split.pairs = None if args.text_b is None else [row[0][1] for row in rows]
        split.labels = [row[1] for row in rows]
    return split


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
    except (TypeError, ValueError, OverflowError):
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


def describe(args: TaskArgs) -> None:
    """Read a task and print what an evaluation would use."""
    task = load_task("task", args)
    print(f"{task.kind}, primary metric {task.metrics[0]}")
    for name, split in (("train", task.train), ("test", task.test)):
        print(f"{name}: {len(split.labels):,} rows used, {split.rows_in_file:,} in {', '.join(split.files)}")
        if task.classes:
            counts = Counter(split.labels)
            print("  " + ", ".join(f"{label}: {counts[label]:,}" for label in task.classes[:20]))
        else:
            print(f"  {min(split.labels):g} to {max(split.labels):g}, mean {np.mean(split.labels):g}")
        text = " ".join(split.sentences[0]) if split.sentences else split.texts[0]
        print(f"  first: {text[:100]!r} -> {split.labels[0]!r}")


if __name__ == "__main__":
    cli(TaskArgs, describe, "python -m lingua.evaluation.tasks")
