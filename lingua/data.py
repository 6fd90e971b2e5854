"""The training stream: row ``i`` is a function of ``(config, seed, i)``, whoever asks for it.

Token shards were shuffled when they were written (:mod:`lingua.preparation.shuffle`), so the first epoch reads them in
order. The position to resume from is one integer, the number of steps done; the same global batches come
out on any number of ranks and with any accumulation.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.hashing import text_hash
from lingua.remote import DEFAULT_GB, BlockCache, list_sources
from lingua.source import Mix, TokenSource
from lingua.tokenizer import Tokenizer, TokenizerArgs


@dataclass
class PhaseArgs:
    """A change of the mix or of the row length in the middle of a run, for annealing and longer context."""

    from_tokens: float = "???"  # type: ignore[assignment]  # view tokens of the run at which it begins
    sources: dict[str, float] = field(default_factory=dict)  # weights from then on; none: data.sources
    seq_len: int | None = None  # tokens in a row from then on; none: data.seq_len

    def __post_init__(self) -> None:
        check_weights("data.phases: sources", self.sources)


def check_weights(name: str, weights: dict[str, float]) -> None:
    """Raise UserError unless every weight is above 0."""
    for source, weight in weights.items():
        if not weight > 0:
            raise UserError(f"{name}.{source}={weight}: a weight must be above 0; leave the source out instead")


@dataclass
class DataArgs:
    """Where the token shards lie and how rows are drawn from them."""

    root_dir: str = "???"  # folder made by setup/prepare_data.py, on a disk or anywhere fsspec reaches (s3://...)
    sources: dict[str, float] = field(default_factory=dict)  # weight of each source; none: all, by size
    seq_len: int = 512  # tokens in a row
    tokenizer: TokenizerArgs = field(default_factory=TokenizerArgs)
    isolate_documents: bool = False  # tokens attend only within their document; a row may hold several
    phases: list[PhaseArgs] = field(default_factory=list)  # later phases, in order; the fields above are the first
    validation: dict[str, str] = field(default_factory=dict)  # name: folder of a prepared split
    cache_dir: str | None = None  # local copies of the blocks of remote shards; none: below the temporary folder
    cache_gb: float = DEFAULT_GB  # most that they take; the least recently used go
    prefetch: int = 2  # steps read ahead by a background thread

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"data.seq_len={self.seq_len}: a row needs at least 2 tokens")
        if self.prefetch < 1:
            raise UserError(f"data.prefetch={self.prefetch}: expected at least 1")
        check_weights("data.sources", self.sources)

    def seq_lens(self) -> list[int]:
        """Row length of every phase."""
        return [self.seq_len, *(phase.seq_len or self.seq_len for phase in self.phases)]


@dataclass
class Rows:
    """A micro-batch of this rank.

    ``index_B`` are global row numbers (what masks are a function of); ``weight_B`` is 0.0 for rows that only
    fill up the last micro-batch of a step, ``last``.
    """

    tokens_BS: Tensor
    index_B: Tensor
    weight_B: Tensor
    last: bool = True

    def to(self, device: torch.device) -> Rows:
        """The same rows on ``device``; copies do not wait."""
        tensors = (t.to(device, non_blocking=True) for t in (self.tokens_BS, self.index_B, self.weight_B))
        return Rows(*tensors, self.last)

    def pinned(self) -> Rows:
        """The same rows in memory from which a GPU can copy without waiting."""
        return Rows(*(t.pin_memory() for t in (self.tokens_BS, self.index_B, self.weight_B)), self.last)


@dataclass
class _Phase:
    """A stretch of steps with one mix and one row length."""

    first_step: int  # 1 is the first step of the run
    first_row: int  # global number of its first row
    seq_len: int
    rows_per_step: int
    micro_rows: int
    mix: Mix


@dataclass
class Position:
    """How far a run is in its data: the next global row, and the tokens of each source that are used up."""

    row: int = 0
    used: dict[str, int] = field(default_factory=dict)


class TokenStream:
    """The mix of all sources, phase after phase, as rows and as this rank's share of each optimizer step.

    Args:
        rows_per_step, micro_rows: of the first phase; phases of longer rows have fewer, of the same tokens.
        views: how many views of each row are trained on; ``data.phases`` begin at view tokens.
        start: where another run ended, to go on from there.
    """

    def __init__(
        self,
        args: DataArgs,
        tokenizer: Tokenizer,
        seed: int,
        rows_per_step: int = 1,
        micro_rows: int = 1,
        rank: int = 0,
        world_size: int = 1,
        views: int = 1,
        start: Position | None = None,
    ) -> None:
        self._start = start or Position()
        self.cache = BlockCache(args.cache_dir, args.cache_gb)
        self.args, self._tokenizer, self._seed = args, tokenizer, seed
        self.rank, self.world_size = rank, world_size
        self.step_tokens, self._micro_tokens = rows_per_step * args.seq_len, micro_rows * args.seq_len
        self.phases: list[_Phase] = []
        self._add_phase(1, args.sources, args.seq_len)
        for phase in args.phases:
            first_step = math.ceil(phase.from_tokens / (self.step_tokens * views)) + 1
            if first_step <= self.phases[-1].first_step:
                raise UserError(
                    f"data.phases: the one from_tokens={phase.from_tokens:g} begins at step {first_step}, not after "
                    f"the one before it (step {self.phases[-1].first_step}): list them in order, a step or more apart"
                )
            self._add_phase(first_step, phase.sources or args.sources, phase.seq_len or args.seq_len)

    def _add_phase(self, first_step: int, weights: dict[str, float], seq_len: int) -> None:
        if self.step_tokens % seq_len:
            raise UserError(
                f"data.phases: seq_len={seq_len} does not divide the {self.step_tokens} text tokens of a step "
                "(batch_tokens over views): choose lengths that do"
            )
        root = self.args.root_dir.rstrip("/")
        found = list_sources(root)
        names = list(weights) or found
        if not names:
            raise UserError(f"data.root_dir={root}: holds no source (a folder SOURCE/train); see setup/prepare_data.py")
        for name in weights:
            if name not in found:
                raise UserError(f"data.sources.{name}: no folder {root}/{name}/train; sources there: {found}")
        used = self.used(first_step - 1)
        sources = {
            name: TokenSource(
                f"{root}/{name}/train",
                seq_len,
                self._seed ^ text_hash(name),
                self._tokenizer,
                used.get(name, 0),
                self.cache,
            )
            for name in names
        }
        mix = Mix(sources, [weights[name] if weights else source.tokens for name, source in sources.items()])
        rows_per_step = self.step_tokens // seq_len
        most = -(-rows_per_step // self.world_size)
        micro_rows = min(max(1, self._micro_tokens // seq_len), most)
        last = self.phases[-1] if self.phases else None
        first_row = last.first_row + (first_step - last.first_step) * last.rows_per_step if last else self._start.row
        self.phases.append(_Phase(first_step, first_row, seq_len, rows_per_step, micro_rows, mix))

    def phase(self, step: int) -> _Phase:
        """The phase that step ``step`` belongs to."""
        return next(phase for phase in reversed(self.phases) if phase.first_step <= max(step, 1))

    def row(self, index: int) -> np.ndarray:
        """Tokens [S] of global row ``index``."""
        return self.rows(np.array([index]))[0]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Tokens [n, S] of global rows, all of one phase, in the widest dtype of its sources."""
        first = int(np.min(indices))
        phase = next(phase for phase in reversed(self.phases) if phase.first_row <= first)
        return phase.mix.rows(np.asarray(indices) - phase.first_row)

    def phase_steps(self, step: int) -> Iterator[tuple[_Phase, int]]:
        """Each phase with the number of its steps among the first ``step`` of the run."""
        for phase, following in zip_longest(self.phases, self.phases[1:]):
            end = step if following is None else min(step, following.first_step - 1)
            yield phase, max(0, end - phase.first_step + 1)

    def used(self, step: int) -> dict[str, int]:
        """Tokens of each source that are used up after ``step`` steps, over all phases so far."""
        used = dict(self._start.used)
        for phase, steps in self.phase_steps(step):
            if steps or phase.first_step == 1:
                used |= phase.mix.used(steps * phase.rows_per_step)
        return used

    def position(self, step: int) -> Position:
        """Where the run is after ``step`` steps."""
        rows = sum(steps * phase.rows_per_step for phase, steps in self.phase_steps(step))
        return Position(self._start.row + rows, self.used(step))

    def fingerprints(self) -> dict[str, str]:
        """What each source holds, as a hash of its shards' checksums."""
        return {name: source.fingerprint for phase in self.phases for name, source in phase.mix.sources.items()}

    def progress(self, step: int) -> dict[str, float]:
        """``epoch/SOURCE`` and ``documents/SOURCE`` after ``step`` steps."""
        sources = {name: source for phase in self.phases for name, source in phase.mix.sources.items()}
        return {
            f"{key}/{name}": value
            for name, used in self.used(step).items()
            if name in sources
            for key, value in sources[name].progress(used).items()
        }

    def step_rows(self, step: int) -> list[Rows]:
        """This rank's micro-batches of optimizer step ``step`` (the first is 1), on the CPU.

        Every rank gets the same number of micro-batches of the same shape; rows that are missing for that
        are repeats of weight zero.
        """
        phase = self.phase(step)
        per_rank = -(-phase.rows_per_step // self.world_size)
        padded = -(-per_rank // phase.micro_rows) * phase.micro_rows
        first = phase.first_row + (step - phase.first_step) * phase.rows_per_step
        own = np.arange(first + self.rank, first + phase.rows_per_step, self.world_size)
        index = np.concatenate((own, np.full(padded - len(own), first)))
        weight = (np.arange(padded) < len(own)).astype(np.float32)
        tokens = self.rows(index).astype(np.int64)
        if tokens.max() >= self._tokenizer.vocab_size:
            raise UserError(
                f"step {step}: the shards of {', '.join(phase.mix.sources)} hold token id {tokens.max()}, but the "
                f"tokenizer has {self._tokenizer.vocab_size} ids: a shard is corrupt; prepare the source again"
            )
        batches = []
        for start in range(0, padded, phase.micro_rows):
            part = slice(start, start + phase.micro_rows)
            tensors = (torch.from_numpy(array[part]) for array in (tokens, index, weight))
            batches.append(Rows(*tensors, last=start + phase.micro_rows >= padded))
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
                    batches = self.step_rows(step)
                    put([rows.pinned() for rows in batches] if torch.cuda.is_available() else batches)
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
