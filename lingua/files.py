"""Input files anywhere fsspec reaches: listed, opened, decompressed, and read on after a lost connection."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec

from lingua.errors import UserError

JSONL_ENDINGS = tuple(f".{kind}{packed}" for kind in ("jsonl", "json", "ndjson") for packed in ("", ".gz", ".zst"))
TEXT_ENDINGS = (".txt", ".txt.gz", ".txt.zst")
COLUMN_ENDINGS = (".parquet", ".arrow")
ENDINGS = (".jsonl", ".json", ".ndjson", ".txt", *COLUMN_ENDINGS)
PACKED_ENDINGS = (".gz", ".zst")
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}  # how compressed files begin
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TRIES = 5  # to read on after a lost connection
FIRST_WAIT = 0.5  # seconds before the second try; doubles with each
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class InputFile:
    """One file of a source."""

    index: int  # place in the sorted list of all files of the source
    path: str
    size: int  # bytes as stored; 0 if unknown (a streamed dataset)
    stamp: str = ""  # changes when the file does


def is_remote(path: str | Path) -> bool:
    """Whether a path is a location like ``s3://bucket/folder`` and not on a disk."""
    return "://" in str(path)


def optional(module: str, purpose: str, requirements: str = "requirements-data.txt") -> Any:
    """Import a package of a requirements file. Raises UserError with the pip line if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}); install it with "
            f"pip install -r {requirements}"
        ) from None


def write_atomically(path: Path, content: str | bytes, keep: bool = False) -> None:
    """Write ``path`` whole or not at all, also where several processes and machines write it at once.

    Args:
        keep: leave a file that is there already, which another process may just have written.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if not keep:
            partial.replace(path)
            return
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def list_files(pattern: str) -> list[InputFile]:
    """The files that ``pattern`` names, sorted by path: files, globs, folders and ``hf:`` datasets, separated by
    commas. Raises UserError naming the part without a match."""
    found: dict[str, tuple[int, str]] = {}
    for part in (part.strip() for part in pattern.split(",")):
        if part.startswith("hf:") and not part.startswith("hf://"):
            from lingua.preparation.columns import list_dataset

            found |= dict.fromkeys(list_dataset(part), (0, ""))
        elif part:
            found |= _matches(part)
    if not found:
        raise UserError("the path of a source is empty: give a file, a glob, a folder or hf:NAME")
    return [InputFile(i, path, *found[path]) for i, path in enumerate(sorted(found))]


def _matches(glob: str) -> dict[str, tuple[int, str]]:
    try:
        system, root = fsspec.core.url_to_fs(glob)
        paths = [root] if system.isfile(root) else system.glob(root)
        infos = {path: system.info(path) for path in paths}
        if len(paths) == 1 and infos[paths[0]]["type"] == "directory":
            infos = _folder(glob, system.find(paths[0], detail=True))
    except UserError:
        raise
    except Exception as error:  # what lies below fsspec raises types of its own
        raise UserError(f"cannot list {glob}: {error or type(error).__name__}") from None
    files = {system.unstrip_protocol(path): info for path, info in infos.items() if info["type"] != "directory"}
    if not files:
        raise UserError(_nothing(glob, system, root))
    return {path.removeprefix("file://"): (int(info["size"] or 0), _stamp(info)) for path, info in files.items()}


def _nothing(glob: str, system: Any, root: str) -> str:
    """Why no file was found: an unknown kind of files, a server that does not answer, or simply nothing there."""
    reason = ""
    try:
        if system.isdir(root):
            others = [PurePosixPath(path).name for path in sorted(system.find(root))[:3]]
            hint = (
                f"there are {', '.join(others)}: give a glob, and format= if they are text" if others else "it is empty"
            )
            return f"no file in {glob} ends in {', '.join(ENDINGS)} (or these with .gz, .zst): {hint}"
        if "://" in glob and not fsspec.core.has_magic(root):
            system.info(root)
    except Exception as error:  # what lies below fsspec raises types of its own
        reason = f" ({error.__cause__ or error})"
    return f"no file matches {glob}{reason}: check the path and the pattern"


def _folder(folder: str, infos: dict[str, dict]) -> dict[str, dict]:
    """The data files among all files of a folder. Lingua keeps training text in NAME.chunk.NN.jsonl beside a
    NAME.val.jsonl, so where there are chunks only they count."""
    endings = (*JSONL_ENDINGS, *TEXT_ENDINGS, *COLUMN_ENDINGS)
    metadata = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
    names = {path: PurePosixPath(path).name for path in infos}
    data = [path for path, name in names.items() if name.endswith(endings) and name not in metadata]
    chunks = [path for path in data if re.search(r"\.chunk\.\d+\.jsonl", names[path])]
    splits = {m[0] for path in data if (m := re.match("train|test|valid|dev", names[path]))}
    if not chunks and len(splits) > 1:
        raise UserError(
            f"{folder}: holds several splits ({', '.join(sorted(splits))}...); name one with "
            f"hf:{folder}::train or a glob such as '{folder.rstrip('/')}/**/train*'"
        )
    return {path: infos[path] for path in chunks or data}


def _stamp(info: dict[str, Any]) -> str:
    tags = ("ETag",) if info.get("ETag") else ("mtime", "LastModified", "last_modified")
    return " ".join(f"{key}={info[key]}" for key in ("size", *tags) if info.get(key))


def check_unchanged(file: InputFile) -> None:
    """Raise UserError if ``file`` is not as it was when it was listed, or if that cannot be told."""
    if not file.stamp:
        return
    system, path = fsspec.core.url_to_fs(file.path)
    system.invalidate_cache()
    try:
        info = tried(lambda: system.info(path), lambda reason: connection_lost(file.path, file.size, reason))
        now = _stamp(info)
    except FileNotFoundError as error:
        now = str(error)
    if now != file.stamp:
        raise UserError(
            f"{file.path}: changed while being read (was {file.stamp}, now {now}): wait until it is complete, then "
            "prepare again"
        )


def tried(action: Callable[[], Any], failed: Callable[[str], str]) -> Any:
    """``action()``, after an exception tried again a few times, each after a longer wait.

    Raises:
        FileNotFoundError: at once.
        UserError: the last try failed too; ``failed`` makes the message from the reason.
    """
    reason = ""
    for attempt in range(TRIES):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # botocore and aiohttp raise types of their own
            reason = f"{type(error).__name__}: {error}"
        if attempt + 1 < TRIES:
            time.sleep(FIRST_WAIT * 2**attempt)
    raise UserError(failed(reason))


def connection_lost(path: str, byte: int, reason: str) -> str:
    """What is said of a remote file when all tries failed."""
    return (
        f"{path}: the connection was lost at byte {byte} and {TRIES} tries did not bring it back ({reason}); check the "
        "network and run the same command again: finished work is kept"
    )


def open_raw(path: str) -> BinaryIO:
    """The stored bytes of a file, seekable; a remote one is read on after a lost connection."""
    system, inner = fsspec.core.url_to_fs(path)
    if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
        return open(inner, "rb")
    return io.BufferedReader(_Retrying(system, path, inner), CHUNK_BYTES)  # type: ignore[return-value]


def open_text(path: str) -> BinaryIO:
    """The bytes of a file without its compression (.gz, .zst) and without a byte order mark."""
    text = _unpacked(path)
    if text.peek(3)[:3] == BYTE_ORDER_MARK:  # type: ignore[attr-defined]
        text.read(3)
    return text


def _unpacked(path: str) -> BinaryIO:
    raw = open_raw(path)
    if not path.endswith(PACKED_ENDINGS):
        head = raw.peek(4)  # type: ignore[attr-defined]
        for magic, ending in MAGIC.items():
            if head.startswith(magic):
                raise UserError(f"{path}: compressed, but its name does not end in {ending}: rename it")
        return raw
    if not raw.read(1):
        raise EOFError("the file has 0 bytes")
    raw.seek(0)
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(raw), CHUNK_BYTES)  # type: ignore[return-value]


class _Retrying(io.RawIOBase):
    def __init__(self, system: Any, path: str, inner: str) -> None:
        self._system, self._path, self._inner = system, path, inner
        self._stream: Any = None
        self._at = 0
        self._size = tried(lambda: system.size(inner), self._lost)  # None if a web server does not tell

    def readinto(self, buffer: Any) -> int:
        data = tried(lambda: self._read(len(buffer)), self._lost)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._system.open(self._inner, "rb")
                self._stream.seek(self._at)
            data = self._stream.read(size)
            if not data and self._size is not None and self._at < self._size:
                raise EOFError(f"it ended before byte {self._size}")
        except Exception:
            self._stream = None  # the next try opens another
            raise
        return data

    def _lost(self, reason: str) -> str:
        return connection_lost(self._path, self._at, reason)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size or 0}[whence]
        if base + offset != self._at:
            self._at = base + offset
            if self._stream is not None:
                self._stream.seek(self._at)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class _Zstd(io.RawIOBase):
    """Decompressed bytes, frame after frame. zstandard's own reader takes a cut file for a finished one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._zstandard = optional("zstandard", "reading .zst files")
        self._raw = raw
        self._frame: Any = None
        self._out = memoryview(b"")
        self._unused = b""

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            data = self._unused or self._raw.read(CHUNK_BYTES)
            self._unused = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("compressed data ended before its end marker")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._out = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            if self._frame.eof:
                self._unused, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._out))
        buffer[:size] = self._out[:size]
        self._out = self._out[size:]
        return size

    def readable(self) -> bool:
        return True
