"""The training stream: row ``i`` is a function of ``(config, seed, i)``, whoever asks for it.

Token shards were shuffled when they were written (:mod:`lingua.shuffle`), so the first epoch reads them in
order. The position to resume from is one integer, the number of steps done; the same global batches come
out on any number of ranks and with any accumulation.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.hashing import permutation, text_hash
from lingua.manifest import load_manifest
from lingua.tokenizer import Tokenizer, TokenizerArgs

PERIOD = 1024  # source weights are rounded to 1/1024: the interleave repeats after this many rows
BLOCK_BYTES = 4 << 20  # later epochs shuffle blocks of this size, so that disks see large reads


@dataclass
class DataArgs:
    """Where the token shards lie and how rows are drawn from them."""

    root_dir: str = "???"  # folder made by setup/prepare_data.py
    sources: dict[str, float] = field(default_factory=dict)  # weight of each source; none: all, by size
    seq_len: int = 512  # tokens in a row
    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    validation: dict[str, str] = field(default_factory=dict)  # name: folder of a prepared split
    prefetch: int = 2  # steps read ahead by a background thread

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"data.seq_len={self.seq_len}: a row needs at least 2 tokens")
        if self.prefetch < 1:
            raise UserError(f"data.prefetch={self.prefetch}: expected at least 1")
        for name, weight in self.sources.items():
            if not weight > 0:
                raise UserError(f"data.sources.{name}={weight}: a weight must be above 0; leave the source out instead")


class TokenSource:
    """One folder of token shards, read as endless epochs of rows.

    Epoch 0 is the shards in order. In epoch ``e`` the corpus is cut into rows of S from another offset, so
    that the tail of epoch ``e - 1`` shorter than a row and the head of epoch ``e`` make one row: every token
    appears exactly once an epoch. Blocks of rows, and the rows in each block, are permuted.
    """

    def __init__(self, folder: str | Path, seq_len: int, seed: int, tokenizer: Tokenizer | None = None) -> None:
        manifest = load_manifest(folder)
        if tokenizer is not None:
            manifest.check_tokenizer(tokenizer)
        self.seq_len, self.seed = seq_len, seed
        self.tokens, self.documents = manifest.tokens, manifest.documents
        if self.tokens < seq_len:
            raise UserError(
                f"{folder}: holds {self.tokens} tokens, fewer than one row (data.seq_len={seq_len}): "
                "add text or shorten the rows"
            )
        self._shards = [manifest.open_tokens(i) for i in range(len(manifest.shards))]
        self._starts = np.cumsum([0] + [len(shard) for shard in self._shards])
        self._block_rows = max(1, BLOCK_BYTES // (np.dtype(manifest.dtype).itemsize * seq_len))
        self._manifest = manifest
        # Caches of this source alone: they go when it goes, and do not push out those of other sources.
        self._block_order = functools.lru_cache(maxsize=2)(self._block_order)
        self._row_order = functools.lru_cache(maxsize=2)(self._row_order)

    @functools.cached_property
    def _document_ends(self) -> np.ndarray:
        """Where each document ends, in tokens from the start of the corpus (read when first asked for)."""
        ends = [self._manifest.open_docs(i).astype(np.int64) + start for i, start in enumerate(self._starts[:-1])]
        return np.concatenate(ends)

    def row(self, index: int) -> np.ndarray:
        """Tokens [S] of row ``index`` (any integer >= 0), in the dtype of the shards."""
        return self.rows(np.array([index]))[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Tokens [n, S] of many rows at once."""
        out = np.empty((len(indices), self.seq_len), dtype=self._shards[0].dtype)
        first = np.asarray(indices, dtype=np.int64) * self.seq_len
        for row, (epoch, offset) in enumerate(zip(*np.divmod(first, self.tokens), strict=True)):
            self._fill(out[row], int(epoch), int(offset))
        return out

    def _fill(self, row: np.ndarray, epoch: int, offset: int) -> None:
        head = -epoch * self.tokens % self.seq_len  # tokens of this epoch that end the row begun in the last
        n_rows = (self.tokens - head) // self.seq_len
        unit = (offset - head) // self.seq_len  # `offset` is a row's start, so a whole number of rows after `head`
        if unit < n_rows:
            start = head + self.seq_len * (unit if epoch == 0 else self._permuted(epoch, n_rows, unit))
            self._read(row, start)
            return
        tail = self.tokens - offset
        self._read(row[:tail], offset)
        self._read(row[tail:], 0)  # the next epoch's head

    def _read(self, out: np.ndarray, start: int) -> None:
        """Copy ``len(out)`` tokens of the corpus from ``start``, across shards where needed."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            begin = start + done - self._starts[shard]
            piece = self._shards[shard][begin : begin + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1

    def _permuted(self, epoch: int, n_rows: int, unit: int) -> int:
        order, ends = self._block_order(epoch, n_rows)
        place = int(np.searchsorted(ends, unit, side="right"))
        block = int(order[place])
        begin = block * self._block_rows
        size = min(self._block_rows, n_rows - begin)
        return begin + int(self._row_order(epoch, block, size)[unit - (int(ends[place]) - size)])

    def _block_order(self, epoch: int, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch in the order they are read, and the row count up to the end of each."""
        n_blocks = -(-n_rows // self._block_rows)
        order = permutation(n_blocks, self.seed, text_hash("block"), epoch)
        sizes = np.minimum(self._block_rows, n_rows - order * self._block_rows)
        return order, np.cumsum(sizes)

    def _row_order(self, epoch: int, block: int, size: int) -> np.ndarray:
        return permutation(size, self.seed, text_hash("row"), epoch, block)

    def progress(self, rows: int) -> dict[str, float]:
        """Epochs and documents seen after ``rows`` rows (documents exact in epoch 0, in proportion later)."""
        epoch, offset = divmod(rows * self.seq_len, self.tokens)
        if epoch == 0:
            documents = int(np.searchsorted(self._document_ends, offset, side="right"))
        else:
            documents = round((epoch + offset / self.tokens) * self.documents)
        return {"epoch": rows * self.seq_len / self.tokens, "documents": documents}


def interleave(weights: list[float]) -> np.ndarray:
    """One period of source numbers, int64 [1024], each source spread evenly.

    Weights are rounded to 1/1024 by largest remainder; every source gets at least one row.
    """
    if len(weights) > PERIOD:
        raise UserError(f"data.sources: {len(weights)} sources, at most {PERIOD} can be mixed")
    exact = np.array(weights, dtype=np.float64) / sum(weights) * PERIOD
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while (missing := PERIOD - int(counts.sum())) != 0:
        change = 1 if missing > 0 else -1
        gap = (exact - counts) * change
        if change < 0:
            gap[counts == 1] = -np.inf
        counts[int(np.argmax(gap))] += change
    places = [((np.arange(n) + 0.5) / n, np.full(n, source)) for source, n in enumerate(counts)]
    when, which = (np.concatenate(parts) for parts in zip(*places, strict=True))
    return which[np.argsort(when, kind="stable")]


@dataclass
class Rows:
    """A micro-batch of this rank.

    ``index_B`` are global row numbers (what masks are a function of); ``weight_B`` is 0.0 for rows that only
    fill up the last micro-batch of a step.
    """

    tokens_BS: Tensor
    index_B: Tensor
    weight_B: Tensor
    last: bool

    def to(self, device: torch.device) -> Rows:
        """The same rows on ``device``; copies do not wait."""
        tensors = (t.to(device, non_blocking=True) for t in (self.tokens_BS, self.index_B, self.weight_B))
        return Rows(*tensors, last=self.last)


class TokenStream:
    """The mix of all sources, as rows and as this rank's share of each optimizer step."""

    def __init__(
        self,
        args: DataArgs,
        tokenizer: Tokenizer,
        seed: int,
        rows_per_step: int = 1,
        micro_rows: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        root = Path(args.root_dir)
        if not root.is_dir():
            raise UserError(f"data.root_dir={root}: no such folder; setup/prepare_data.py makes one from raw text")
        found = sorted(path.parent.name for path in root.glob("*/train"))
        names = list(args.sources) or found
        if not names:
            raise UserError(f"data.root_dir={root}: holds no source (a folder SOURCE/train); see setup/prepare_data.py")
        for name in args.sources:
            if name not in found:
                raise UserError(f"data.sources.{name}: no folder {root / name / 'train'}; sources there: {found}")
        self.args = args
        self.sources = {
            name: TokenSource(root / name / "train", args.seq_len, seed ^ text_hash(name), tokenizer) for name in names
        }
        self._list = list(self.sources.values())
        weights = [args.sources[name] if args.sources else source.tokens for name, source in self.sources.items()]
        self._which = interleave(weights)
        self._counts = np.bincount(self._which, minlength=len(names))
        self._nth = np.zeros(PERIOD, dtype=np.int64)  # how many rows of the same source stand before it in the period
        for source in range(len(names)):
            places = np.flatnonzero(self._which == source)
            self._nth[places] = np.arange(len(places))
        self.rows_per_step = rows_per_step
        self.rank, self.world_size = rank, world_size
        self.micro_rows = min(micro_rows, -(-rows_per_step // world_size))

    def row(self, index: int) -> np.ndarray:
        """Tokens [S] of global row ``index``."""
        return self.rows(np.array([index]))[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Tokens [n, S] of global rows, in the widest dtype of the sources."""
        periods, slots = np.divmod(np.asarray(indices, dtype=np.int64), PERIOD)
        which = self._which[slots]
        own = periods * self._counts[which] + self._nth[slots]
        if len(self._list) == 1:
            return self._list[0].rows(own)
        parts = {source: self._list[source].rows(own[which == source]) for source in np.unique(which)}
        out = np.empty((len(which), self.args.seq_len), dtype=np.result_type(*parts.values()))
        for source, part in parts.items():
            out[which == source] = part
        return out

    def progress(self, rows: int) -> dict[str, float]:
        """``epoch/SOURCE`` and ``documents/SOURCE`` after ``rows`` global rows."""
        periods, slot = divmod(rows, PERIOD)
        before = np.bincount(self._which[:slot], minlength=len(self._list))
        metrics = {}
        for i, (name, source) in enumerate(self.sources.items()):
            for key, value in source.progress(int(periods * self._counts[i] + before[i])).items():
                metrics[f"{key}/{name}"] = value
        return metrics

    def step_rows(self, step: int) -> list[Rows]:
        """This rank's micro-batches of optimizer step ``step`` (the first is 1), on the CPU.

        Every rank gets the same number of micro-batches of the same shape; rows that are missing for that
        are repeats of weight zero.
        """
        per_rank = -(-self.rows_per_step // self.world_size)
        padded = -(-per_rank // self.micro_rows) * self.micro_rows
        first = (step - 1) * self.rows_per_step
        own = np.arange(first + self.rank, first + self.rows_per_step, self.world_size)
        index = np.concatenate((own, np.full(padded - len(own), first)))
        weight = (np.arange(padded) < len(own)).astype(np.float32)
        tokens = self.rows(index).astype(np.int64)
        batches = []
        for start in range(0, padded, self.micro_rows):
            part = slice(start, start + self.micro_rows)
            tensors = (torch.from_numpy(array[part]) for array in (tokens, index, weight))
            batches.append(Rows(*tensors, last=start + self.micro_rows >= padded))
        return batches

    def steps(self, first: int, last: int) -> Iterator[list[Rows]]:
        """Micro-batches of steps ``first`` to ``last``, read ahead by a background thread."""
        ready: queue.Queue = queue.Queue(maxsize=self.args.prefetch)
        closed = threading.Event()

        def put(item: object) -> None:
            while not closed.is_set():
                try:
                    return ready.put(item, timeout=0.2)
                except queue.Full:
                    continue

        def read() -> None:
            try:
                for step in range(first, last + 1):
                    if closed.is_set():
                        return
                    put(self.step_rows(step))
            except BaseException as error:  # handed to the thread that asks
                put(error)

        threading.Thread(target=read, daemon=True, name="data").start()
        try:
            for _ in range(first, last + 1):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
