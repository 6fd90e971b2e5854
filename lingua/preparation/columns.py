"""The text column of parquet and Arrow files, and of datasets streamed from the Hugging Face hub.

Rows come as ``(row number from 1, UTF-8 bytes, or a str that says why there are none)``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.files import open_raw, optional

ROWS = 1000  # read at a time
ARROW_FILE_MAGIC = b"ARROW1"
ARROW_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"

Row = tuple[int, bytes | str]


def parquet_rows(path: str, column: str) -> Iterator[Row]:
    """Rows of a parquet file, in order."""
    parquet = optional("pyarrow.parquet", "reading parquet files")
    with open_raw(path) as stream:
        file = parquet.ParquetFile(stream)
        _check_column(path, column, file.schema_arrow.names)
        yield from _rows(path, column, file.iter_batches(ROWS, columns=[column]))


def arrow_rows(path: str, column: str) -> Iterator[Row]:
    """Rows of an Arrow IPC file or stream (what ``datasets`` writes), in order."""
    ipc = optional("pyarrow", "reading Arrow files").ipc
    with open_raw(path) as stream:
        if stream.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
            file = ipc.open_file(stream)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            stream.seek(-len(ARROW_STREAM_END), os.SEEK_END)
            if stream.read() != ARROW_STREAM_END:
                raise EOFError("the Arrow stream has no end marker")
            stream.seek(0)
            file = batches = ipc.open_stream(stream)
        _check_column(path, column, file.schema.names)
        yield from _rows(path, column, batches)


def list_dataset(spec: str) -> list[str]:
    """The shards of ``hf:NAME[:config[:split]]``, NAME an id on the hub or a local folder laid out like one.

    Raises UserError if the library cannot find or read it (for want of a network, say).
    """
    return [f"{spec}#{shard:05d}" for shard in range(_dataset(spec).num_shards)]


def dataset_rows(path: str, column: str) -> Iterator[Row]:
    """Rows of one shard of a dataset, named as :func:`list_dataset` names it."""
    spec, _, shard = path.rpartition("#")
    dataset = _dataset(spec)
    rows = dataset.shard(num_shards=dataset.num_shards, index=int(shard)).with_format("arrow")
    try:
        yield from _rows(path, column, rows.iter(batch_size=ROWS))
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # the library and those below it raise types of their own
        raise UserError(f"{path}: cannot be read: {_said(error)}") from None


@functools.lru_cache(maxsize=4)
def _dataset(spec: str) -> Any:
    name, config, split = [*spec.removeprefix("hf:").split(":"), "", ""][:3]
    datasets = optional("datasets", f"reading {spec}")
    if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
        raise UserError(f"{spec}: written by save_to_disk: give the folder of its .arrow files as path, without hf:")
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        hint = "check the name, the config and the split, and the connection to the hub"
        if datasets.config.HF_HUB_OFFLINE:
            hint = "HF_HUB_OFFLINE is set, so only local folders can be read: give hf:FOLDER, or unset it"
        raise UserError(f"{spec}: cannot be opened: {_said(error)}; {hint}") from None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _check_column(path: str, column: str, found: list[str]) -> None:
    if column not in found:
        raise UserError(f"{path}: no column {column!r}, found {', '.join(found) or 'none'}; name it with text=COLUMN")


def _rows(path: str, column: str, batches: Iterable[Any]) -> Iterator[Row]:
    import pyarrow

    types = pyarrow.types
    row = 0
    for batch in batches:
        _check_column(path, column, batch.schema.names)
        values = batch.column(column)
        kind = values.type
        if types.is_dictionary(kind):
            kind = kind.value_type
            values = values.cast(kind)
        if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
            raise UserError(f"{path}: column {column!r}: expected strings, found {kind}")
        # bytes, because one invalid string would make the conversion of the whole batch fail
        for value in values.cast(pyarrow.large_binary()).to_pylist():
            row += 1
            yield row, f"column {column!r} is null" if value is None else value
