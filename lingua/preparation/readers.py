"""Raw text inputs as documents: JSONL, plain text (also .gz, .zst), parquet, Arrow and hub datasets, anywhere.

Reading has two halves, so that the expensive one can run in worker processes: :func:`blocks` cuts files into
runs of raw documents, :func:`parse` turns one block into texts. :func:`documents` is both.

A document is known by its file's number and its own number in that file. Neither depends on the format, so
the same files with the same rows in another format are the same documents.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from lingua.errors import UserError
from lingua.files import JSONL_ENDINGS, InputFile, check_unchanged, list_files, open_text
from lingua.preparation.columns import arrow_rows, dataset_rows, parquet_rows

FORMATS = ("auto", "jsonl", "text", "parquet", "arrow")
DOCUMENTS = ("file", "paragraph", "line")
BLOCK_BYTES = 1 << 20
EMPTY_LINE = "empty line, expected a JSON object"


@dataclass
class ReaderArgs:
    """Where the raw text of a source lies and how it is read."""

    # file, folder or glob of files (sorted), on any fsspec path, or hf:NAME[:config[:split]] (hub id or local
    # folder); several are separated by commas
    path: str = "???"
    format: str = "auto"  # jsonl | text | parquet | arrow | auto: by the file's name, else text
    text: str = "text"  # the column that holds the text (JSONL, parquet, Arrow)
    document: str = "file"  # what is one document of a plain text file: file | paragraph (blank line) | line
    on_error: str = "fail"  # a document that cannot be read: fail | skip (counted and listed)
    max_document_mb: float = 32.0  # a longer line or document is an error of its own: it must fit in memory

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, FORMATS),
            ("document", self.document, DOCUMENTS),
            ("on_error", self.on_error, ("fail", "skip")),
        ):
            if value not in known:
                raise UserError(f"{name}={value}: expected one of {', '.join(known)}")
        if self.max_document_mb <= 0:
            raise UserError(f"max_document_mb={self.max_document_mb}: expected above 0")


Piece = tuple[int, bytes | str]  # line (or row) from 1, raw bytes of a document or why it cannot be read


@dataclass(frozen=True)
class Block:
    """Consecutive raw documents of one file."""

    file: InputFile
    first_row: int  # number of the first document in its file, from 1
    pieces: list[Piece]


@dataclass(frozen=True)
class Document:
    """One text and the place it comes from."""

    text: str
    file: int  # InputFile.index
    path: str
    line: int  # 1-based line at which the document starts (row, for columns)
    row: int  # 1-based number of the document in its file


@dataclass(frozen=True)
class BadLine:
    """A document that could not be read, its place, and why."""

    path: str
    line: int
    reason: str


@dataclass
class Parsed:
    """What a block gave: its documents, and those that could not be read."""

    documents: list[Document] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)


def documents(args: ReaderArgs) -> Iterator[Document | BadLine]:
    """Every document of the inputs in order; with ``on_error=skip`` also the lines that were left out.

    Raises:
        UserError: no file matches, or (``on_error=fail``) a line that cannot be read, with file and line.
    """
    for file in list_files(args.path):
        for block in blocks(file, args):
            parsed = parse(block, args)
            yield from parsed.documents
            yield from parsed.bad


def blocks(file: InputFile, args: ReaderArgs) -> Iterator[Block]:
    """Cut one file into blocks of about 1 MiB that end where a document ends.

    A damaged file is an error even with ``on_error=skip``: what follows the damage is unknown.

    Raises:
        UserError: the file breaks off, is damaged, lacks the column, or has changed since it was listed.
    """
    pieces: list[Piece] = []
    first, size, line = 1, 0, 0
    try:
        for piece in _pieces(file.path, file.size, args):
            pieces.append(piece)
            line = piece[0]
            size += len(piece[1])
            if size >= BLOCK_BYTES:
                yield Block(file, first, pieces)
                first, size, pieces = first + len(pieces), 0, []
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:  # Arrow's are ValueErrors
        check_unchanged(file)
        raise UserError(
            f"{file.path}: cannot be read after line {line}: {' '.join(str(error).split()) or type(error).__name__}; "
            "the file may be damaged or incomplete: get it again"
        ) from None
    check_unchanged(file)
    if pieces:
        yield Block(file, first, pieces)


def parse(block: Block, args: ReaderArgs) -> Parsed:
    """The documents of a block. Empty texts are documents too. Raises UserError on a bad line
    (``on_error=fail``)."""
    parsed = Parsed()
    is_json = format_of(block.file.path, args) == "jsonl"
    for row, (line, raw) in enumerate(block.pieces, block.first_row):
        try:
            if isinstance(raw, str):
                raise UserError(raw)
            text = _json_text(raw, args.text) if is_json else raw.decode("utf-8")
        except (ValueError, RecursionError) as error:  # UserError, JSON and UTF-8 errors are ValueErrors
            bad = BadLine(block.file.path, line, _reason(error))
            if args.on_error == "fail":
                raise UserError(
                    f"{bad.path}, line {bad.line}: {bad.reason}; mend the file, or set on_error=skip to leave "
                    "such lines out (counted and listed)"
                ) from None
            parsed.bad.append(bad)
            continue
        parsed.documents.append(Document(text, block.file.index, block.file.path, line, row))
    return parsed


def format_of(path: str, args: ReaderArgs) -> str:
    """jsonl | text | parquet | arrow | dataset."""
    if path.startswith("hf:") and not path.startswith("hf://"):
        return "dataset"
    if args.format != "auto":
        return args.format
    endings = {JSONL_ENDINGS: "jsonl", (".parquet",): "parquet", (".arrow",): "arrow"}
    return next((name for ending, name in endings.items() if path.endswith(ending)), "text")


def _pieces(path: str, size: int, args: ReaderArgs) -> Iterator[Piece]:
    limit = int(args.max_document_mb * 1e6)
    kind = format_of(path, args)
    if size == 0 and kind in ("parquet", "arrow"):
        raise EOFError("the file has 0 bytes")
    if kind in ("jsonl", "text"):
        unit = "line" if kind == "jsonl" else args.document
        with open_text(path) as stream:
            yield from {"line": _lines, "paragraph": _paragraphs, "file": _whole}[unit](stream, limit)
        return
    rows = {"parquet": parquet_rows, "arrow": arrow_rows, "dataset": dataset_rows}[kind]
    for row, raw in rows(path, args.text):
        yield row, _too_long(limit) if len(raw) > limit else raw


def _too_long(limit: int) -> str:
    return f"longer than max_document_mb={limit / 1e6:g}: raise it if such a text is meant"


def _lines(stream: BinaryIO, limit: int) -> Iterator[Piece]:
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        if len(line.rstrip(b"\r\n")) <= limit:
            yield number, line.rstrip(b"\r\n")
            continue
        while not line.endswith(b"\n") and (line := stream.readline(limit)):
            pass
        yield number, _too_long(limit)


def _paragraphs(stream: BinaryIO, limit: int) -> Iterator[Piece]:
    """Spans between blank lines, each with the line it starts at."""
    start, lines, size = 0, [], 0
    number, begins = 0, True  # a line over the limit comes in parts
    while line := stream.readline(limit + 2):
        number += begins
        if line.strip() or not begins:
            start = start or number
            size += len(line)
            if size <= limit + 2:
                lines.append(line)
            else:
                lines.clear()
        elif start:
            yield start, b"".join(lines).rstrip(b"\r\n") if lines else _too_long(limit)
            start, lines, size = 0, [], 0
        begins = line.endswith(b"\n")
    if start:
        yield start, b"".join(lines).rstrip(b"\r\n") if lines else _too_long(limit)


def _whole(stream: BinaryIO, limit: int) -> Iterator[Piece]:
    text = stream.read(limit + 1)
    if text:
        while len(text) > limit and stream.read(limit):  # to the end, to find damage there
            pass
        yield 1, text if len(text) <= limit else _too_long(limit)


def _json_text(raw: bytes, column: str) -> str:
    if not raw.strip():
        raise UserError(EMPTY_LINE)
    row: Any = json.loads(raw.decode("utf-8"))
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, found {type(row).__name__}")
    if column not in row:
        raise UserError(f"no column {column!r}, found {', '.join(map(str, row)) or 'none'}; name it with text=COLUMN")
    if not isinstance(row[column], str):
        raise UserError(f"column {column!r}: expected a string, found {type(row[column]).__name__}")
    return row[column]


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start} of the document"
    return str(error)
