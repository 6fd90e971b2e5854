"""The training stream from a server of the S3 protocol on loopback: speed, requests and bytes.

python -m benchmarks.object_store out=FILE.json

Requests and bytes are counted by the server, which is moto's in a process of its own. It is not fast, so the speed is
that of the server; requests and bytes are the same with any. One epoch of the same made-up shards as in
:mod:`benchmarks.data` is read in four ways: the first epoch with an empty cache and with a full one, and a later epoch
with a cache that holds the data and with one that holds a tenth of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from benchmarks.common import command, environment, write_result
from benchmarks.made_up import TOKENS_BYTES, epoch_rows, write_shards
from lingua.data import DataArgs, TokenStream
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table
from lingua.files import optional
from lingua.remote import BLOCK_BYTES
from lingua.tokenizer import RobertaTokenizer, Tokenizer

READINGS = {  # name: epoch, share of the shards that the cache holds, is the cache empty
    "first epoch, empty cache": (0, 2.0, True),
    "first epoch, full cache": (0, 2.0, False),
    "later epoch, empty cache": (1, 2.0, True),
    "later epoch, cache of a tenth": (1, 0.1, True),
}


@dataclass
class ObjectStoreArgs:
    """Rows of the training stream from a server of the S3 protocol on loopback."""

    out: str = "???"  # JSON file to write
    megabytes: int = 200  # of token shards
    seq_len: int = 512  # tokens in a row
    batch_rows: int = 768  # rows asked for at a time

    def __post_init__(self) -> None:
        for name in ("megabytes", "seq_len", "batch_rows"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")


class Server:
    """What a running server has answered so far."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def so_far(self) -> tuple[int, int]:
        """Requests, and bytes of the answers' bodies."""
        return self._counts[0], self._counts[1]


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """A server with an empty bucket ``shards``, to which ``s3://`` leads in this process while it runs. Raises
    UserError if moto is missing."""
    optional("moto.server", "the object-store benchmark", "requirements-dev.txt")
    optional("s3fs", "reading s3://")
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, counts), daemon=True)
    process.start()
    before = dict(fsspec.config.conf)
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        fsspec.config.conf["s3"] = {"endpoint_url": url, "key": "x", "secret": "x"}
        fsspec.filesystem("s3").mkdir("shards")
        yield Server(counts)
    finally:
        fsspec.config.conf.clear()
        fsspec.config.conf.update(before)
        process.terminate()
        process.join()


def _serve(pipe: Any, counts: Any) -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    answer = DomainDispatcherApplication(create_backend_app)

    def counted(request: dict[str, Any], start: Any) -> Iterable[bytes]:
        with counts.get_lock():
            counts[0] += 1
        for part in answer(request, start):
            with counts.get_lock():
                counts[1] += len(part)
            yield part

    server = make_server("127.0.0.1", 0, counted, threaded=True)
    pipe.send(server.server_port)
    server.serve_forever()


def object_store_rate(megabytes: int, seq_len: int, batch_rows: int) -> dict[str, Any]:
    """Tokens per second, and requests and bytes per million tokens, for each of :data:`READINGS`.

    ``opening`` are the requests before the first row; ``needed`` is the size of the shards over what was fetched.
    """
    tokenizer = RobertaTokenizer()
    readings = []
    with tempfile.TemporaryDirectory() as name, s3_server() as server:
        root = Path(name) / "shards"
        write_shards(root, round(megabytes * 1e6) // TOKENS_BYTES, tokenizer)
        fsspec.filesystem("s3").put(f"{root}/", "shards/", recursive=True)
        shard_bytes = sum(path.stat().st_size for path in root.rglob("*.tokens"))
        for number, (reading, (epoch, share, is_empty)) in enumerate(READINGS.items()):
            cache = Path(name) / f"cache_{number if is_empty else number - 1}"
            cache_gb = max(share * shard_bytes, 8 * BLOCK_BYTES) / 1e9
            data = DataArgs(root_dir="s3://shards", seq_len=seq_len, cache_dir=str(cache), cache_gb=cache_gb)
            readings.append({"reading": reading, **_read(server, data, tokenizer, epoch, batch_rows)})
            fetched = readings[-1].pop("bytes")
            readings[-1]["needed"] = shard_bytes / fetched if fetched else None
    return {
        "unit": "tokens/s of TokenStream.rows in one process; requests and bytes of the server per million tokens",
        "server": f"moto in another process of the same machine ({os.cpu_count()} CPUs)",
        "shard_bytes": shard_bytes,
        "block_bytes": BLOCK_BYTES,
        "seq_len": seq_len,
        "batch_rows": batch_rows,
        "readings": readings,
    }


def _read(server: Server, data: DataArgs, tokenizer: Tokenizer, epoch: int, batch_rows: int) -> dict[str, Any]:
    before = server.so_far()
    stream = TokenStream(data, tokenizer, seed=0)
    first, n_rows = epoch_rows(stream, epoch)
    opened, begun = server.so_far(), time.perf_counter()
    for start in range(first, first + n_rows, batch_rows):
        stream.rows(np.arange(start, min(start + batch_rows, first + n_rows)))
    seconds, after = time.perf_counter() - begun, server.so_far()
    millions = n_rows * data.seq_len / 1e6
    return {
        "tokens_per_second": millions * 1e6 / seconds,
        "opening": opened[0] - before[0],
        "requests_per_million": (after[0] - opened[0]) / millions,
        "bytes_per_million": (after[1] - opened[1]) / millions,
        "bytes": after[1] - opened[1],
    }


def object_store_table(result: dict[str, Any]) -> str:
    """The readings as Markdown."""
    rows = [
        [
            reading["reading"],
            f"{reading['tokens_per_second'] / 1e6:,.1f}",
            f"{reading['requests_per_million']:,.2f}",
            f"{reading['bytes_per_million'] / 1e6:,.2f}",
        ]
        for reading in result["readings"]
    ]
    return markdown_table(["object store", "million tokens/s", "requests", "MB a million tokens"], rows)


def main(args: ObjectStoreArgs) -> None:
    """Measure, print a table, and write the JSON."""
    result = object_store_rate(args.megabytes, args.seq_len, args.batch_rows)
    write_result(args.out, {**environment("numpy", "fsspec", "s3fs", "moto"), **result})
    print("\n" + object_store_table(result))


if __name__ == "__main__":
    command(ObjectStoreArgs, main, "python -m benchmarks.object_store")
