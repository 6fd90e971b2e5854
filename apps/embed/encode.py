"""Vectors of the texts in files: ``python -m apps.embed.encode ckpt=RUN input='texts/*.jsonl' out=vectors``.

Row i of the output belongs to row i of the input. Parts of ``part_rows`` rows are written whole, one after the other,
shared by the processes of torchrun or srun; the same command makes the parts that are not there yet.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apps.embed.models import Model, ModelArgs
from apps.embed.texts import Text, input_stamps, read_texts
from lingua.args import cli
from lingua.distributed import World, start
from lingua.embedder import check_prompt
from lingua.errors import UserError
from lingua.evaluation.results import writable_folder, write_whole
from lingua.files import optional
from lingua.progress import Progress

FORMATS = ("npy", "parquet")
# Readers of folders of parquet files leave names that begin so alone.
MADE = "_made.json"  # in the folder of the parts: what they are parts of
DONE = "_vectors.json"  # there once every part is: what the vectors are
LISTED = 1000  # bad rows that are named one by one
TIMEOUT = 24 * 3600.0  # seconds that a process waits for another


@dataclass
class EncodeArgs(ModelArgs):
    """Encode the texts of files. Several processes (torchrun, srun) share the work."""

    # file, folder or glob of files on any fsspec path, or hf:NAME[:config[:split]]; several are separated by commas.
    # .jsonl, .csv, .tsv, .txt (a text a line), these with .gz or .zst, .parquet, .arrow
    input: str = "???"
    column: str = "text"  # that holds the text; of no matter for .txt
    out: str = "???"  # a folder of parts; or a file that ends in .npy, into which they are joined
    format: str = "npy"  # of the parts: npy [rows, dim] float32 | parquet, with the file and line of each row
    prompt: str | None = None  # query | passage: as the model was trained to read them; none: neither
    # What happens with a row that has no text or cannot be read: fail, with its place | zeros: it keeps its place with
    # a vector of zeros, and is counted and listed
    bad_rows: str = "fail"
    part_rows: int = 50_000  # rows in a part, which are in memory at a time; a kill loses no more

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prompt(self.prompt)
        if self.format not in FORMATS:
            raise UserError(f"format={self.format}: expected one of {', '.join(FORMATS)}")
        if self.out.endswith(".npy") and self.format != "npy":
            raise UserError(f"out={self.out}: a .npy file; give a folder for format={self.format}")
        if self.bad_rows not in ("fail", "zeros"):
            raise UserError(f"bad_rows={self.bad_rows}: expected fail or zeros")
        if self.part_rows < 1:
            raise UserError(f"part_rows={self.part_rows}: expected at least 1")


def encode(args: EncodeArgs) -> dict[str, Any]:
    """Encode, and return what ``_vectors.json`` says.

    Raises:
        UserError: no such model or input, a bad row, or a folder that holds vectors of something else.
    """
    if args.format == "parquet":
        optional("pyarrow", "format=parquet")
    world = start(TIMEOUT)
    target = Path(args.out)
    folder = target.with_name(target.name + ".parts") if args.out.endswith(".npy") else target
    stamps = world.from_first(input_stamps(args.input) if world.is_first else None)
    model = Model(args, str(world.device))
    made = {
        "identity": model.identity(),
        "input": stamps,
        "column": args.column,
        "prompt": args.prompt,
        "bad_rows": args.bad_rows,
        "format": args.format,
        "part_rows": args.part_rows,
    }
    summary = world.from_first(finished(target, made) if world.is_first and target.is_file() else None)
    if summary is None:
        if world.is_first:
            claim(folder, made)
        world.gather(None)  # the folder is there
        n_parts = _make_parts(args, model, folder, world)
        world.gather(None)  # every part is there
        summary = world.from_first(_finish(args, model, made, folder, n_parts) if world.is_first else None)
    if world.is_first:
        _tell(summary, target)
    return summary


def _finish(args: EncodeArgs, model: Model, made: dict[str, Any], folder: Path, n_parts: int) -> dict[str, Any]:
    """The account of all parts, and the parts as one file if that is asked for."""
    if n_parts == 0:
        raise UserError(f"input={args.input}: has no rows")
    parts = [json.loads(_account(folder, i).read_text()) for i in range(n_parts)]
    bad = [row for part in parts for row in part["bad"]]
    summary = {
        "model": model.name,
        **made,
        "rows": sum(part["rows"] for part in parts),
        "dim": model.dim,
        "parts": n_parts,
        "truncated": None if model.truncated is None else sum(part["truncated"] for part in parts),
        "bad": sum(part["n_bad"] for part in parts),
        "bad_listed": bad[:LISTED],
    }
    if args.out.endswith(".npy"):
        _join(folder, Path(args.out), summary)
    else:
        write_whole(folder / DONE, (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def parts_of(rows: Iterator[Text], size: int) -> Iterator[list[Text]]:
    """Runs of ``size`` consecutive rows."""
    while part := list(itertools.islice(rows, size)):
        yield part


def _make_parts(args: EncodeArgs, model: Model, folder: Path, world: World) -> int:
    """Make this process's share of the parts that are missing; returns the number of parts there are."""
    n_parts = 0
    with Progress("encoding", None, "texts") if world.is_first else nullcontext() as progress:
        for index, rows in enumerate(parts_of(read_texts(args.input, args.column), args.part_rows)):
            n_parts += 1
            if args.bad_rows == "fail":
                for row in rows:
                    refuse(row)
            # The vectors are written last, so a part with vectors has its account too.
            if index % world.size == world.rank and not part_file(folder, index, args.format).is_file():
                _make_part(args, model, folder, index, rows)
                if progress is not None:
                    progress.advance(len(rows), len(rows))
    return n_parts


def _make_part(args: EncodeArgs, model: Model, folder: Path, index: int, rows: list[Text]) -> None:
    before = model.truncated or 0
    vectors_ND, empty = model.encode_or_zeros([row.text for row in rows], args.prompt)
    bad = [(rows[i], rows[i].bad or "no token: the tokenizer drops all of it") for i in empty]
    if bad and args.bad_rows == "fail":
        refuse(Text(bad[0][0].path, bad[0][0].line, "", bad[0][1]))
    account = {
        "rows": len(rows),
        "truncated": (model.truncated or 0) - before,
        "n_bad": len(bad),
        "bad": [f"{row.path}, line {row.line}: {reason}" for row, reason in bad[:LISTED]],
    }
    buffer = io.BytesIO()
    if args.format == "npy":
        np.save(buffer, vectors_ND)
    else:
        _write_parquet(buffer, vectors_ND, rows)
    write_whole(_account(folder, index), json.dumps(account).encode())
    write_whole(part_file(folder, index, args.format), buffer.getvalue())


def _write_parquet(buffer: io.BytesIO, vectors_ND: np.ndarray, rows: list[Text]) -> None:
    import pyarrow
    from pyarrow import parquet

    values = pyarrow.array(vectors_ND.reshape(-1))
    columns = {
        "file": pyarrow.array([row.path for row in rows]).dictionary_encode(),
        "line": pyarrow.array([row.line for row in rows], pyarrow.int64()),
        "vector": pyarrow.FixedSizeListArray.from_arrays(values, vectors_ND.shape[1]),
    }
    parquet.write_table(pyarrow.table(columns), buffer)


def part_file(folder: Path, index: int, kind: str) -> Path:
    """Of the part's vectors."""
    return folder / f"part_{index:06d}.{kind}"


def _account(folder: Path, index: int) -> Path:
    return folder / f"_part_{index:06d}.json"


def refuse(row: Text) -> None:
    """Raise UserError if the row is a bad one."""
    if row.bad:
        raise UserError(
            f"{row.path}, line {row.line}: {row.bad}; mend the file, or set bad_rows=zeros to give such rows a vector "
            "of zeros (counted and listed)"
        )


def claim(folder: Path, made: dict[str, Any]) -> None:
    """Make the folder for what is to be made. Raises UserError if it has something else in it."""
    writable_folder(folder)
    told = folder / MADE
    if told.is_file():
        check_same(json.loads(told.read_text()), made, folder)
    elif any(folder.iterdir()):
        raise UserError(f"out={folder}: has files of something else; give a new folder")
    else:
        write_whole(told, (json.dumps(made, indent=1) + "\n").encode())


def check_same(found: dict[str, Any], made: dict[str, Any], where: Path) -> None:
    """Raise UserError if what is there was made of something else than is asked for."""
    differs = [name for name, value in made.items() if found.get(name) != value]
    if differs:
        raise UserError(
            f"out={where}: what is there differs in {', '.join(differs)} "
            f"({str(found.get(differs[0]))[:100]}, asked for {str(made[differs[0]])[:100]}); give another out, or "
            "remove it"
        )


def finished(target: Path, made: dict[str, Any]) -> dict[str, Any]:
    """The account beside a file that is done. Raises UserError if it is of something else."""
    told = target.with_name(target.name + ".json")
    if not told.is_file():
        raise UserError(f"out={target}: is there already, and not of this command; give another file, or remove it")
    summary = json.loads(told.read_text())
    check_same(summary, made, target)
    return summary


def _join(folder: Path, target: Path, summary: dict[str, Any]) -> None:
    """All parts as one file, and the account beside it; the parts go."""
    partial = target.with_name(target.name + ".partial")
    try:
        joined = np.lib.format.open_memmap(
            partial, mode="w+", dtype=np.float32, shape=(summary["rows"], summary["dim"])
        )
        row = 0
        for index in range(summary["parts"]):
            part_ND = np.load(part_file(folder, index, "npy"), mmap_mode="r")
            joined[row : row + len(part_ND)] = part_ND
            row += len(part_ND)
        joined.flush()
        del joined
    except OSError as error:
        raise UserError(f"{partial}: cannot be written: {error.strerror}; the parts stay in {folder}") from None
    write_whole(target.with_name(target.name + ".json"), (json.dumps(summary, indent=1) + "\n").encode())
    partial.replace(target)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _tell(summary: dict[str, Any], target: Path) -> None:
    print(f"{target}: {summary['rows']:,} vectors of {summary['dim']} channels")
    if summary["truncated"]:
        print(f"{summary['truncated']:,} texts were over the length and were cut (max_length)")
    if summary["bad"]:
        shown = "\n".join(f"  {line}" for line in summary["bad_listed"][:10])
        print(f"{summary['bad']:,} rows have a vector of zeros; the first:\n{shown}")


if __name__ == "__main__":
    cli(EncodeArgs, encode, "python -m apps.embed.encode")
