"""Texts to encode, row by row in the order of the files, each with the place it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lingua.errors import UserError
from lingua.evaluation.tables import read_rows
from lingua.files import InputFile, check_unchanged, list_files
from lingua.frozen import HALF_PAIR, has_half_pair
from lingua.preparation.readers import EMPTY_LINE, BadLine, ReaderArgs, blocks, parse

TABLE_ENDINGS = (".csv", ".tsv")


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
        is_table = file.path.removesuffix(".gz").removesuffix(".zst").endswith(TABLE_ENDINGS)
        rows = _table_rows(file.path, column) if is_table else _document_rows(file, column)
        for row in rows:
            if not row.bad and not row.text.strip():
                row = Text(row.path, row.line, "", "empty text")
            elif has_half_pair(row.text):
                row = Text(row.path, row.line, "", f"the text has {HALF_PAIR}")
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
                elif row.reason == EMPTY_LINE:  # passed over, as in tables
                    continue
                elif row.line == 1 and row.reason.startswith("no column"):  # so it is with all rows
                    raise UserError(f"{row.path}, line 1: {row.reason}")
                else:
                    yield Text(row.path, row.line, "", _own_name(row.reason))
    except UserError as error:
        raise UserError(_own_name(str(error))) from None


def _own_name(reason: str) -> str:
    """A readers' message, whose field has another name here."""
    return reason.replace("text=COLUMN", "column=COLUMN")


def _table_rows(path: str, column: str) -> Iterator[Text]:
    for line, row in read_rows(path):
        if column not in row:
            raise UserError(f"{path}, line 1: no column {column!r}, found {', '.join(row)}; give column=COLUMN")
        yield Text(path, line, row[column])
