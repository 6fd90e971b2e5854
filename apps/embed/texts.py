"""Texts to encode, row by row in the order of the files, each with the place it comes from."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lingua.errors import UserError
from lingua.files import InputFile, check_unchanged, list_files, open_text
from lingua.preparation.readers import BadLine, ReaderArgs, blocks, parse

CSV_ENDINGS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Text:
    """One row of the input."""

    path: str
    line: int  # from 1; of parquet files the row
    text: str  # empty if it cannot be read
    bad: str = ""  # why it cannot be encoded


def read_texts(path: str, column: str) -> Iterator[Text]:
    """Every row of the files that ``path`` names, in order; what cannot be encoded comes too, with the reason.

    JSONL, CSV (RFC 4180, the first line names the columns; ``.tsv`` with tabs and without quoting), parquet, Arrow,
    plain text (a text a line), each packed with gzip or zstd where it is text; ``hf:`` datasets.

    Raises:
        UserError: no file, no such column, or a file that is damaged or changes while it is read.
    """
    for file in list_files(path):
        rows = _csv_rows(file, column) if _delimiter(file.path) else _document_rows(file, column)
        for row in rows:
            if not row.bad and not row.text.strip():
                row = Text(row.path, row.line, "", "empty text")
            yield row
        check_unchanged(file)


def input_stamps(path: str) -> list[str]:
    """What changes when a file of the input does."""
    return [f"{file.path} {file.stamp or file.size}" for file in list_files(path)]


def _document_rows(file: InputFile, column: str) -> Iterator[Text]:
    args = ReaderArgs(path=file.path, text=column, document="line", on_error="skip")
    try:
        for block in blocks(file, args):
            parsed = parse(block, args)
            for row in sorted([*parsed.documents, *parsed.bad], key=lambda row: row.line):
                if not isinstance(row, BadLine):
                    yield Text(row.path, row.line, row.text)
                elif row.line == 1 and row.reason.startswith("no column"):  # so it is with all rows
                    raise UserError(f"{row.path}, line 1: {row.reason}")
                else:
                    yield Text(row.path, row.line, "", row.reason)
    except UserError as error:  # the readers' own field has another name
        raise UserError(str(error).replace("text=COLUMN", "column=COLUMN")) from None


def _delimiter(path: str) -> str | None:
    name = path.removesuffix(".gz").removesuffix(".zst")
    return next((sign for ending, sign in CSV_ENDINGS.items() if name.endswith(ending)), None)


def _csv_rows(file: InputFile, column: str) -> Iterator[Text]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit of 131,072 characters is less than a document
    delimiter = _delimiter(file.path)
    quoting = {"quoting": csv.QUOTE_NONE} if delimiter == "\t" else {"strict": True}
    line = 1
    try:
        with open_text(file.path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as text:
            reader = csv.reader(text, delimiter=delimiter, **quoting)
            columns = next(reader, [])
            if column not in columns:
                found = ", ".join(columns) or "none"
                raise UserError(f"{file.path}, line 1: no column {column!r}, found {found}; give column=COLUMN")
            place = columns.index(column)
            line = reader.line_num + 1
            for values in reader:
                if len(values) != len(columns):
                    yield Text(file.path, line, "", f"{len(values)} columns, the first line names {len(columns)}")
                else:
                    yield Text(file.path, line, values[place])
                line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError, OSError, EOFError) as error:
        raise UserError(f"{file.path}: cannot be read after line {line}: {' '.join(str(error).split())}") from None
