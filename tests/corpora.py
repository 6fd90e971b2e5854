"""The same documents written in every format that can be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import zstandard


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def _table(texts: list[str]) -> pyarrow.Table:
    return pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_bytes(_jsonl(texts))


def write_gzip(path: Path, texts: list[str]) -> None:
    path.write_bytes(gzip.compress(_jsonl(texts)))


def write_zstd(path: Path, texts: list[str]) -> None:
    """Two frames, as parallel compressors write."""
    data, packer = _jsonl(texts), zstandard.ZstdCompressor()
    middle = len(data) // 2
    path.write_bytes(packer.compress(data[:middle]) + packer.compress(data[middle:]))


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(_table(texts), path, row_group_size=7)


def write_arrow_file(path: Path, texts: list[str]) -> None:
    with pyarrow.ipc.new_file(path, _table(texts).schema) as out:
        out.write_table(_table(texts), max_chunksize=5)


def write_arrow_stream(path: Path, texts: list[str]) -> None:
    with pyarrow.ipc.new_stream(path, _table(texts).schema) as out:
        out.write_table(_table(texts), max_chunksize=5)


WRITERS: dict[str, tuple[str, Callable[[Path, list[str]], None]]] = {
    "jsonl": (".jsonl", write_jsonl),
    "gzip": (".jsonl.gz", write_gzip),
    "zstd": (".jsonl.zst", write_zstd),
    "parquet": (".parquet", write_parquet),
    "arrow_file": (".arrow", write_arrow_file),
    "arrow_stream": (".arrow", write_arrow_stream),
}


def write_formats(folder: Path, files: list[list[str]]) -> dict[str, str]:
    """``{format: path}`` (what ``ReaderArgs.path`` takes) of the documents ``files``, a list for each file."""
    paths = {}
    for name, (ending, write) in WRITERS.items():
        (folder / name).mkdir(parents=True)
        for i, texts in enumerate(files):
            write(folder / name / f"part-{i:05d}{ending}", texts)
        paths[name] = str(folder / name)
    paths["glob"] = f"{folder}/parquet/*.parquet"
    lingua = folder / "lingua"
    lingua.mkdir()
    for i, texts in enumerate(files):
        write_jsonl(lingua / f"mine.chunk.{i:02d}.jsonl", texts)
    write_jsonl(lingua / "mine.val.jsonl", ["held out"])
    paths["lingua"] = str(lingua)
    hub = write_hub(folder / "hub", files)
    paths["hub"] = f"hf:{hub}"
    saved = folder / "saved"
    datasets.Dataset.from_dict({"text": [text for texts in files for text in texts]}).save_to_disk(
        saved, num_shards=len(files)
    )
    return paths | {"saved": str(saved)}


def write_hub(folder: Path, files: list[list[str]]) -> Path:
    """A dataset repository as the hub lays it out, with a test split beside."""
    (folder / "data").mkdir(parents=True)
    for i, texts in enumerate(files):
        write_parquet(folder / "data" / f"train-{i:05d}-of-{len(files):05d}.parquet", texts)
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", ["held out"])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: plain\n  default: true\n  data_files:\n"
        "  - split: train\n    path: data/train-*\n  - split: test\n    path: data/test-*\n---\n"
    )
    return folder
