"""Rows of labelled files: JSON lines, CSV, TSV, parquet and CoNLL columns, each with the line or row it stands at."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.files import PACKED_ENDINGS, is_remote, open_raw, open_text, optional

Row = tuple[int, dict[str, Any]]
CONLL_ENDINGS = (".conll", ".iob", ".iob2", ".bio", ".txt")
DOCUMENT = "-DOCSTART-"  # the word of the lines that open a document


def read_rows(path: str) -> Iterator[Row]:
    """Yield (line number from 1, row) of a labelled file; the kind is told by its ending.

    ``.jsonl``: one object a line. ``.csv``: a line of column names, quotes as in RFC 4180. ``.tsv``: a line of
    column names, quotes are characters like any other. ``.parquet``: rows are counted instead of lines. ``.conll``,
    ``.iob``, ``.iob2``, ``.bio`` or ``.txt``: a word a line with its tags in columns, an empty line after a sentence; a
    row is a sentence with ``words`` (the first column), ``tags`` (the last) and ``column_1`` ... (all but the first).
    UTF-8, without rows for blank lines; ``.gz`` or ``.zst`` behind any but parquet. On a disk or anywhere fsspec
    reaches.

    Raises:
        UserError: no such file, unknown ending, or a line that cannot be read.
    """
    name = path.removesuffix(next((packed for packed in PACKED_ENDINGS if path.endswith(packed)), ""))
    ending = Path(name).suffix
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".tsv": _tsv_rows, **dict.fromkeys(CONLL_ENDINGS, _conll_rows)}
    read = _parquet_rows if path.endswith(".parquet") else readers.get(ending)
    if read is None:
        endings = ", ".join(readers)
        raise UserError(f"{path}: expected a file that ends in {endings} (or those with .gz) or .parquet")
    if not is_remote(path) and not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    yield from read(path)


def file_digest(path: str) -> str:
    """SHA-256 of a file's bytes as stored."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tsv_lines(path: str) -> Iterator[tuple[int, list[str]]]:
    """(line number from 1, fields) of a file of tab-separated fields in which quotes mean nothing."""
    for number, line in enumerate(_lines(path), start=1):
        yield number, line.rstrip("\r\n").split("\t")


def is_blank(values: list[Any]) -> bool:
    """Whether these are the fields of a line with nothing on it but white space; such lines are passed over."""
    return len(values) < 2 and not "".join(map(str, values)).strip()


def _lines(path: str) -> Iterator[str]:
    """Lines with their ends, decoded one at a time so that an error has a line number."""
    number = 0
    try:
        with open_text(path) as file:
            for line in file:
                number += 1
                yield line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path}: cannot be read after line {number}: {error}") from None


def _jsonl_rows(path: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}): {line.strip()[:80]!r}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found {line.strip()[:80]!r}")
        yield number, row


def _csv_rows(path: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit of 131,072 characters is less than a document
    reader = csv.reader(_lines(path), strict=True)
    try:
        yield from _named(path, ((reader.line_num, values) for values in reader))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _tsv_rows(path: str) -> Iterator[Row]:
    return _named(path, tsv_lines(path))


def _conll_rows(path: str) -> Iterator[Row]:
    """Sentences at the line of their first word. Columns are separated by tabs in files with tabs, else by spaces."""
    words: list[list[str]] = []
    first = width = number = 0
    for number, line in enumerate(_lines(path), start=1):
        fields = (line.strip("\r\n").split("\t") if "\t" in line else line.split()) if line.strip() else []
        if fields and fields[0] != DOCUMENT:
            if len(fields) < 2 or len(fields) != (width or len(fields)):
                expected = f"{width} columns, as on the lines before" if width else "a word and its tags in columns"
                raise UserError(f"{path}, line {number}: {line.strip()[:80]!r}: expected {expected}")
            first, width = first or number, len(fields)
            words.append(fields)
        elif words:
            yield first, _sentence(words)
            words, first = [], 0
    if words:
        yield first, _sentence(words)


def _sentence(words: list[list[str]]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*words, strict=True)]
    return {"words": columns[0], "tags": columns[-1], **{f"column_{i}": columns[i] for i in range(1, len(columns))}}


def _named(path: str, lines: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    """Rows of lines of fields, of which the first names the columns."""
    columns: list[str] | None = None
    for number, values in lines:
        if is_blank(values):
            continue
        if columns is None:
            columns = values
            if len(set(columns)) < len(columns):
                raise UserError(f"{path}, line 1: a column name stands twice: {', '.join(columns)}")
        elif len(values) != len(columns):
            raise UserError(f"{path}, line {number}: {len(values)} columns, the first line names {len(columns)}")
        else:
            yield number, dict(zip(columns, values, strict=True))


def _parquet_rows(path: str) -> Iterator[Row]:
    parquet = optional("pyarrow.parquet", "reading parquet files")
    number = 0
    try:
        with open_raw(path) as stream, parquet.ParquetFile(stream) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, ValueError) as error:  # Arrow's errors are of these kinds
        raise UserError(f"{path}: cannot be read after row {number}: {' '.join(str(error).split())}") from None
