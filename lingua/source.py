"""Token shards as endless rows: one source, and a weighted mix of several."""

from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path

import numpy as np

from lingua.errors import UserError
from lingua.files import is_remote
from lingua.hashing import permutation, text_hash
from lingua.manifest import Manifest, load_manifest
from lingua.remote import DEFAULT_GB, BlockCache, load_remote_manifest
from lingua.tokenizer import Tokenizer

PERIOD = 1024  # source weights are rounded to 1/1024: the interleave repeats after this many rows
BLOCK_BYTES = 4 << 20  # later epochs shuffle blocks of this size, so that disks see large reads


class TokenSource:
    """One folder of token shards, read as endless epochs of rows.

    Row ``i`` holds the tokens from ``start + i * S`` on, counted over all epochs. Epoch 0 is the shards in
    order. In epoch ``e`` the corpus is cut into rows of S from another offset, so that the tail of epoch
    ``e - 1`` shorter than a row and the head of epoch ``e`` make one row: every token appears exactly once an
    epoch. Blocks of rows, and the rows in each block, are permuted.

    Args:
        folder: of a prepared split.
        seq_len: S.
        seed: of the order of later epochs.
        tokenizer: refuse shards that another one wrote; None: do not look.
        start: tokens that were used before the first row.
        cache: of blocks, for a folder on an object store.
    """

    def __init__(
        self,
        folder: str | Path,
        seq_len: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
        start: int = 0,
        cache: BlockCache | None = None,
    ) -> None:
        if is_remote(folder):
            manifest: Manifest = load_remote_manifest(str(folder), cache or BlockCache(None, DEFAULT_GB))
        else:
            manifest = load_manifest(folder)
        if tokenizer is not None:
            manifest.check_tokenizer(tokenizer)
        self.seq_len, self.seed, self.start = seq_len, seed, start
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
        checksums = "".join(shard.tokens_sha256 for shard in manifest.shards)
        self.fingerprint = hashlib.sha256(checksums.encode()).hexdigest()  # of all its tokens, in their order
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
        first = self.start + np.asarray(indices, dtype=np.int64) * self.seq_len
        for row, (epoch, offset) in enumerate(zip(*np.divmod(first, self.tokens), strict=True)):
            self._fill(out[row], int(epoch), int(offset))
        return out

    def _fill(self, row: np.ndarray, epoch: int, offset: int) -> None:
        head = (self.start - epoch * self.tokens) % self.seq_len  # tokens that end the row begun in the last epoch
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

    def progress(self, used: int) -> dict[str, float]:
        """Epochs and documents in the first ``used`` tokens (documents exact in epoch 0, in proportion later)."""
        epoch, offset = divmod(used, self.tokens)
        if epoch == 0:
            documents = int(np.searchsorted(self._document_ends, offset, side="right"))
        else:
            documents = round((epoch + offset / self.tokens) * self.documents)
        return {"epoch": used / self.tokens, "documents": documents}


def interleave(weights: list[float]) -> np.ndarray:
    """One period of source numbers, int64 [1024], each source spread evenly.

    Weights are rounded to 1/1024 by largest remainder; every source gets at least one row.
    """
    if len(weights) > PERIOD:
        raise UserError(f"data.sources: {len(weights)} sources, at most {PERIOD} can be mixed")
    if not (min(weights) > 0 and math.isfinite(sum(weights))):
        raise UserError(f"data.sources: weights {', '.join(map(str, weights))}: expected finite numbers above 0")
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


class Mix:
    """Several sources by weight. Row ``i`` of the mix is a function of ``i``.

    Args:
        sources: by name, all of one row length.
        weights: one a source, any positive numbers.
    """

    def __init__(self, sources: dict[str, TokenSource], weights: list[float]) -> None:
        self.sources, self._list = sources, list(sources.values())
        self._which = interleave(weights)
        self._counts = np.bincount(self._which, minlength=len(sources))
        self._nth = np.zeros(PERIOD, dtype=np.int64)  # how many rows of the same source stand before it in the period
        for source in range(len(sources)):
            places = np.flatnonzero(self._which == source)
            self._nth[places] = np.arange(len(places))

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Tokens [n, S], in the widest dtype of the sources."""
        periods, slots = np.divmod(np.asarray(indices, dtype=np.int64), PERIOD)
        which = self._which[slots]
        own = periods * self._counts[which] + self._nth[slots]
        if len(self._list) == 1:
            return self._list[0].rows(own)
        parts = {source: self._list[source].rows(own[which == source]) for source in np.unique(which)}
        out = np.empty((len(which), self._list[0].seq_len), dtype=np.result_type(*parts.values()))
        for source, part in parts.items():
            out[which == source] = part
        return out

    def used(self, rows: int) -> dict[str, int]:
        """Tokens of each source that are used up after ``rows`` rows of the mix."""
        periods, slot = divmod(rows, PERIOD)
        before = periods * self._counts + np.bincount(self._which[:slot], minlength=len(self._list))
        return {
            name: source.start + int(n) * source.seq_len
            for (name, source), n in zip(self.sources.items(), before, strict=True)
        }
