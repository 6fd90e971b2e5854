"""Files of a checkpoint on a disk or an object store, with the size and checksum of all that is written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lingua.distributed import World
from lingua.errors import UserError

COMPLETE = "COMPLETE"


def as_path(location: str | Path) -> Path:
    """A ``pathlib`` path for a folder on a disk, its look-alike for a location of fsspec (``s3://bucket/run``)."""
    if "://" not in str(location):
        return Path(location)
    try:
        from upath import UPath

        return UPath(location, use_listings_cache=False)  # other processes write there too
    except ImportError as error:
        raise UserError(f"{location}: needs {error.name}: pip install -r requirements-data.txt") from None
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None


def is_local(path: Path) -> bool:
    """Whether it is a path on a disk, where files can be synced and renamed at once."""
    return isinstance(path, Path)


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Raise UserError where a disk or an object store fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = storage_failure(path, error)
        if cause is None:
            raise
        raise UserError(f"{path}: cannot be reached: {cause}") from None


def storage_failure(path: Path, error: BaseException) -> str | None:
    """What a disk or an object store has against ``path``, if that is what ``error`` is about."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if not is_local(path) and type(error).__module__ != "builtins":  # what lies below fsspec raises types of its own
        return str(error) or type(error).__name__
    return None


def check_shared(folder: Path, world: World) -> None:
    """Make a folder for what all ranks write.

    Raises:
        UserError: it cannot be written to, or the ranks do not see the same folder under its name.
    """
    probe = folder / world.from_first(f"probe.{uuid.uuid4().hex}")
    with reaching(folder):
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text("")
        world.gather(None)
        blind = [rank for rank, sees in enumerate(world.gather(probe.exists())) if not sees]
        if world.is_first:
            probe.unlink()
    if blind:
        raise UserError(
            f"{folder}: rank {blind[0]} does not see what rank 0 writes there; give a dump_dir, or a checkpoint.path, "
            "that all ranks share"
        )


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint folder, ``COMPLETE`` first: one that is half removed must not pass for whole."""
    (folder / COMPLETE).unlink(missing_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    if is_local(folder):  # an object store has no empty folders
        folder.rmdir()


class _Hashed(io.RawIOBase):
    """Passes writes on to a stream and keeps their checksum."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.bytes, self.sha256 = stream, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):  # a stream may write less than it was given
                done += self._stream.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(view)
        self.bytes += len(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


class Files(FileSystemBase):
    """The file layer that PyTorch's distributed checkpoint (DCP) writes and reads through."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}  # by file name: bytes and sha256

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with path.open(mode) as stream:
                yield stream
            return
        with path.open(mode) as stream:
            hashed = _Hashed(stream)
            try:
                yield hashed
            except RuntimeError:  # PyTorch's zip writer hides what went wrong
                if hashed.error is None:
                    raise
                raise hashed.error from None
        self.written[path.name] = {"bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}

    def write_text(self, path: Path, text: str) -> None:
        """Write a small file and sync it to the disk."""
        with self.create_stream(path, "wb") as stream:
            stream.write(text.encode())
            if is_local(path):
                stream.flush()
                os.fsync(stream.fileno())

    def concat_path(self, path: Path, suffix: str) -> Path:
        return path / suffix

    def rename(self, path: Path, new_path: Path) -> None:
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

    def init_path(self, path: Path) -> Path:
        return path

    def mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: Path) -> bool:
        return path.exists()

    def rm_file(self, path: Path) -> None:
        path.unlink()


class _Results(list):
    """What one rank wrote, with its files' checksums; DCP carries it to the first rank."""

    files: dict[str, dict[str, Any]]


class Writer(FileSystemWriter):
    """Writes a checkpoint folder whose last file is ``COMPLETE``, the list of all others.

    Args:
        folder: the checkpoint's.
        texts: small files to put beside the tensors, by name.
        completed: called on the first rank once the checkpoint is whole.
    """

    def __init__(self, folder: Path, texts: dict[str, str], completed: Callable[[], None]) -> None:
        super().__init__("", sync_files=is_local(folder))
        self.fs, self.path = Files(), folder
        self._texts, self._completed = texts, completed

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own would pickle where the folder lies

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP makes the folder here, on every rank; the first has to clear it before

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.path.exists():  # left by a run that died while saving
            remove_folder(self.path)
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.fs.mkdir(self.path)  # on a network file system the first rank's may not be seen here yet
        results = _Results(super().write_data(plan, planner).value())
        results.files = dict(self.fs.written)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for name, text in self._texts.items():
            self.fs.write_text(self.path / name, text)
        files = dict(self.fs.written)
        for rank_results in results:
            files |= rank_results.files  # type: ignore[attr-defined]
        listing = json.dumps(dict(sorted(files.items())), indent=1)
        if is_local(self.path):
            partial = self.path / f"{COMPLETE}.partial"
            self.fs.write_text(partial, listing)
            partial.rename(self.path / COMPLETE)
        else:  # an object appears whole or not at all
            self.fs.write_text(self.path / COMPLETE, listing)
        self._completed()


class Reader(FileSystemReader):
    """Reads what :class:`Writer` wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__("")
        self.fs, self.path = Files(), folder
