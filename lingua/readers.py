"""Raw text inputs: JSONL and plain text, also gzipped, on any fsspec path, as documents.

Reading has two halves, so that the expensive one can run in worker processes: :func:`blocks` cuts files into
runs of raw lines, :func:`parse` turns one block into documents. :func:`documents` is both.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec

from lingua.errors import UserError

FORMATS = ("auto", "jsonl", "text")
DOCUMENTS = ("file", "paragraph", "line")
JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".ndjson.gz")
BLOCK_BYTES = 1 << 20


@dataclass
class ReaderArgs:
    # file, or glob of files (sorted), on any fsspec path; several are separated by commas
    path: str = "???"
    format: str = "auto"  # jsonl | text | auto: jsonl if the name says so, else text
    text: str = "text"  # the JSONL column that holds the text
    document: str = "file"  # what is one document of a plain text file: file | paragraph (blank line) | line
    on_error: str = "fail"  # a line that cannot be read: fail | skip (counted and listed)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, FORMATS),
            ("document", self.document, DOCUMENTS),
            ("on_error", self.on_error, ("fail", "skip")),
        ):
            if value not in known:
                raise UserError(f"{name}={value}: expected one of {', '.join(known)}")


@dataclass(frozen=True)
class InputFile:
    index: int  # place in the sorted list of all files of the source
    path: str
    size: int  # bytes as stored


@dataclass(frozen=True)
class Block:
    """Consecutive raw lines of one file."""

    file: InputFile
    first_line: int  # 1-based
    lines: list[bytes]


@dataclass(frozen=True)
class Document:
    text: str
    file: int  # InputFile.index
    path: str
    line: int  # 1-based line at which the document starts


@dataclass(frozen=True)
class BadLine:
    path: str
    line: int
    reason: str


@dataclass
class Parsed:
    documents: list[Document] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)


def list_files(pattern: str) -> list[InputFile]:
    """The files that ``pattern`` matches, sorted by path. Raises UserError naming a glob without a match."""
    found: dict[str, int] = {}
    for glob in (part.strip() for part in pattern.split(",")):
        if not glob:
            continue
        try:
            system, root = fsspec.core.url_to_fs(glob)
            paths = [path for path in system.glob(root) if system.isfile(path)]
            sizes = {system.unstrip_protocol(path): system.size(path) for path in paths}
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"cannot list {glob}: {error}") from None
        if not sizes:
            raise UserError(f"no file matches {glob}: check the path and the pattern")
        found |= {path.removeprefix("file://"): size for path, size in sizes.items()}
    if not found:
        raise UserError("the path of a source is empty: give a file or a glob")
    return [InputFile(i, path, found[path]) for i, path in enumerate(sorted(found))]


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

    A gzipped file that breaks off is an error even with ``on_error=skip``: what follows is unknown.
    """
    unit = "line" if _is_jsonl(file.path, args) else args.document
    lines: list[bytes] = []
    first, size = 1, 0
    try:
        with fsspec.open(file.path, "rb", compression="gzip" if file.path.endswith(".gz") else None) as stream:
            for line in stream:
                lines.append(line)
                size += len(line)
                ends_document = unit == "line" or (unit == "paragraph" and not line.strip())
                if size >= BLOCK_BYTES and ends_document:
                    yield Block(file, first, lines)
                    first, size, lines = first + len(lines), 0, []
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{file.path}: cannot be read after line {first + len(lines) - 1}: {error or type(error).__name__}; "
            "the file may be damaged or incomplete: get it again"
        ) from None
    if lines:
        yield Block(file, first, lines)


def parse(block: Block, args: ReaderArgs) -> Parsed:
    """The documents of a block. Empty texts are documents too. Raises UserError on a bad line
    (``on_error=fail``)."""
    parsed = Parsed()
    is_jsonl = _is_jsonl(block.file.path, args)
    pieces = _lines(block) if is_jsonl or args.document == "line" else _spans(block, args.document)
    for line, raw in pieces:
        try:
            text = _json_text(raw, args.text) if is_jsonl else raw.decode("utf-8")
        except (ValueError, RecursionError) as error:  # UserError, JSON and UTF-8 errors are ValueErrors
            bad = BadLine(block.file.path, line, _reason(error))
            if args.on_error == "fail":
                raise UserError(
                    f"{bad.path}, line {bad.line}: {bad.reason}; mend the file, or set on_error=skip to leave "
                    "such lines out (counted and listed)"
                ) from None
            parsed.bad.append(bad)
            continue
        parsed.documents.append(Document(text, block.file.index, block.file.path, line))
    return parsed


def _is_jsonl(path: str, args: ReaderArgs) -> bool:
    return args.format == "jsonl" or (args.format == "auto" and path.endswith(JSONL_ENDINGS))


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(block.lines, block.first_line):
        yield number, line.rstrip(b"\r\n")


def _spans(block: Block, document: str) -> Iterator[tuple[int, bytes]]:
    """Whole file, or paragraphs between blank lines, each with the line it starts at."""
    if document == "file":
        yield block.first_line, b"".join(block.lines)
        return
    start, span = block.first_line, b""
    for number, line in enumerate(block.lines, block.first_line):
        if line.strip():
            start = start if span else number
            span += line
        elif span:
            yield start, span.rstrip(b"\r\n")
            span = b""
    if span:
        yield start, span.rstrip(b"\r\n")


def _json_text(raw: bytes, column: str) -> str:
    if not raw.strip():
        raise UserError("empty line, expected a JSON object")
    row: Any = json.loads(raw.decode("utf-8"))
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, found {type(row).__name__}")
    if column not in row:
        raise UserError(f"no column {column!r}, found {', '.join(map(str, row)) or 'none'}")
    if not isinstance(row[column], str):
        raise UserError(f"column {column!r}: expected a string, found {type(row[column]).__name__}")
    return row[column]


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start} of the document"
    return str(error)
