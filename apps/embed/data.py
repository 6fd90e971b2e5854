"""Training rows read and checked: a query, its passage, and hard negatives, as texts or as ids of texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lingua.errors import UserError, check_fields
from lingua.evaluation.tables import is_blank, read_rows, tsv_lines
from lingua.files import PACKED_ENDINGS, check_unchanged, list_files
from lingua.frozen import HALF_PAIR, has_half_pair

QUERY = ("query", "anchor", "query_id", "qid")
POSITIVE = ("positive", "positive_id", "pid")
NEGATIVES = ("negatives", "negative_ids")
NEGATIVE = re.compile(r"negative(_id)?(_?\d+)?(_id)?")
TEXT_ENDINGS = (".jsonl", ".csv", ".tsv")
ENDINGS = (*(ending + packed for ending in TEXT_ENDINGS for packed in ("", *PACKED_ENDINGS)), ".parquet")
EXAMPLES = 20  # bad rows whose places are kept


@dataclass
class LengthArgs:
    """Most tokens of a text, its prompt and special tokens included; what is longer is cut, and counted."""

    query: int = 64
    passage: int = 256

    def __post_init__(self) -> None:
        for name in ("query", "passage"):
            if getattr(self, name) < 6:
                raise UserError(f"data.max_length.{name}={getattr(self, name)}: expected at least 6")


@dataclass
class PromptArgs:
    """What stands before a text, in training and whenever the model is used."""

    query: str = ""
    passage: str = ""


@dataclass
class PairArgs:
    """Rows to learn from, and what to hold out."""

    # Files, a glob or a folder of JSONL, CSV, TSV or parquet on any fsspec path (hf://datasets/... is the hub), with
    # columns query (or anchor), positive, and negative, negative_1, ... or a list in negatives
    path: str = "???"
    # If the rows hold ids: files of lines `id<tab>text` (queries.tsv and collection.tsv of MS MARCO), or of any other
    # kind above with an id in the first column and the text in the second
    queries: str | None = None
    collection: str | None = None
    negatives: int = -1  # hard negatives of each query in a step, by lot in each epoch; -1: all that a row has
    max_length: LengthArgs = field(default_factory=LengthArgs)
    prompt: PromptArgs = field(default_factory=PromptArgs)
    on_error: str = "fail"  # a row without a text, or whose passage is among its negatives: fail, or skip and count
    no_duplicates: bool = False  # no batch has a text twice; rows that would wait for a later one
    hold_out: int = 0  # queries, drawn by lot, whose rows are kept from training, to validate on
    validation: dict[str, str] = field(default_factory=dict)  # name: path of more rows, to validate on
    cache_dir: str | None = None  # where texts are kept as tokens, once read; none: DUMP_DIR/data

    def __post_init__(self) -> None:
        checks = {
            "negatives": (self.negatives >= -1, "a number of passages, or -1 for all"),
            "on_error": (self.on_error in ("fail", "skip"), "fail or skip"),
            "hold_out": (self.hold_out >= 0, "a number of queries"),
        }
        check_fields("data", self, checks)
        if (self.queries is None) != (self.collection is None):
            raise UserError("data.queries and data.collection go together: rows hold ids of both, or texts")
        if "held_out" in self.validation:
            raise UserError("data.validation.held_out: that name is taken by data.hold_out; use another")


@dataclass(frozen=True)
class Row:
    """A row as it stands in the file: texts, or ids."""

    place: str  # file and line
    query: str
    positive: str
    negatives: tuple[str, ...]


class BadRows:
    """Rows that cannot be trained on: the first ends the run, or all are counted.

    Attributes:
        counts: by reason.
        examples: the places of the first ones.
        repeated: negatives that stood in their row before, and count once.
    """

    def __init__(self, on_error: str, option: str = "data.on_error") -> None:
        """
        Args:
            option: what the command calls ``on_error``.
        """
        self.repeated, self.option = 0, option
        self.on_error, self.counts, self.examples = on_error, Counter[str](), list[str]()

    def add(self, place: str, reason: str, kind: str) -> None:
        """One more. Raises UserError if there may be none."""
        if self.on_error == "fail":
            raise UserError(f"{place}: {reason}; mend it, or leave such rows out with {self.option}=skip")
        self.counts[kind] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{place}: {reason}")


def read_pairs(path: str, bad: BadRows) -> Iterator[Row]:
    """Every row of the files, in order, but for bad ones.

    Raises:
        UserError: no file, no such column in a whole file, or a file that is damaged.
    """
    for file in list_files(path):
        if not file.path.endswith(ENDINGS):
            raise UserError(f"{file.path}: rows are read from .jsonl, .csv, .tsv (these with .gz or .zst) or .parquet")
        columns: tuple[str, str, list[str]] | None = None
        for line, row in read_rows(file.path):
            place = f"{file.path}, line {line}"
            columns = columns or _columns(row, place)
            found = _row(row, columns, place, bad)
            if found is not None:
                yield found
        check_unchanged(file)


def _columns(row: dict[str, Any], place: str) -> tuple[str, str, list[str]]:
    """Of query, positive and negatives, told by the first row of a file."""
    found = []
    for role, names in (("query", QUERY), ("positive", POSITIVE)):
        there = [name for name in names if name in row]
        if len(there) != 1:
            raise UserError(
                f"{place}: expected one column of {', '.join(names)} for the {role}, found "
                f"{', '.join(there) or 'none'} among {', '.join(map(str, row)) or 'no columns'}"
            )
        found += there
    return found[0], found[1], [name for name in row if _is_negative(name)]


def _is_negative(name: str) -> bool:
    return name in NEGATIVES or NEGATIVE.fullmatch(str(name)) is not None


def _row(row: dict[str, Any], columns: tuple[str, str, list[str]], place: str, bad: BadRows) -> Row | None:
    query, positive, negatives = columns
    texts: list[str] = []
    for name in row:
        if name not in (query, positive, *negatives) and (name in (*QUERY, *POSITIVE) or _is_negative(name)):
            reason = f"a column {name} that the file's first row does not have: give it to all or none"
            return bad.add(place, reason, f"{name} in some rows only")
    for name in (query, positive, *negatives):
        values = row.get(name)
        for value in values if isinstance(values, list) and name not in (query, positive) else [values]:
            if value is None or isinstance(value, bool) or not isinstance(value, str | int):
                missing = name not in row or value is None
                reason = f"no {name}" if missing else f"{name} is {type(value).__name__}: expected a text or an id"
                return bad.add(place, reason, f"no {name}")
            if not str(value).strip():
                return bad.add(place, f"{name} is empty", f"{name} is empty")
            if isinstance(value, str) and has_half_pair(value):
                return bad.add(place, f"{name} has {HALF_PAIR}", f"{name} with half a character")
            texts.append(str(value))
    found = Row(place, texts[0], texts[1], tuple(dict.fromkeys(texts[2:])))
    bad.repeated += len(texts) - 2 - len(found.negatives)
    if found.positive in found.negatives:
        return bad.add(place, "the positive is also a negative", "positive among negatives")
    return found


def read_ids(path: str) -> Iterator[tuple[str, str, str]]:
    """(place, id, text) of each line of ``id<tab>text`` files without column names, or of files with them.

    Raises:
        UserError: a line of another form.
    """
    for file in list_files(path):
        is_tsv = re.search(r"\.tsv(\.gz|\.zst)?$", file.path)
        lines: Iterable[tuple[int, list[Any]]] = (
            tsv_lines(file.path) if is_tsv else ((line, list(row.values())) for line, row in read_rows(file.path))
        )
        for line, values in lines:
            if is_tsv and is_blank(values):
                continue
            if len(values) < 2 or not isinstance(values[1], str):
                raise UserError(f"{file.path}, line {line}: expected an id and a text, found {str(values)[:80]}")
            yield f"{file.path}, line {line}", str(values[0]), values[1]
        check_unchanged(file)
