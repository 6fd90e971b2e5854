"""Which rows a step trains on, and with which negatives: a function of (seed, epoch, place), on any number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from apps.embed.store import Store
from lingua.contrastive import Candidates
from lingua.errors import UserError
from lingua.frozen import length_buckets
from lingua.hashing import counter_hash, permutation

ORDER, NEGATIVES, HELD_OUT = 1, 2, 3  # what a hash is for


@dataclass
class Texts:
    """Texts of one pass through the model: the arguments of its forward pass."""

    tokens_BS: Tensor
    lengths_B: Tensor
    types_BS: Tensor | None = None
    states_BSD: Tensor | None = None  # what a frozen encoder gives for them, if it is known

    def to(self, device: torch.device) -> Texts:
        """The same on ``device``."""
        tensors = (self.tokens_BS, self.lengths_B, self.types_BS, self.states_BSD)
        return Texts(*(None if t is None else t.to(device, non_blocking=True) for t in tensors))

    def arguments(self) -> tuple[Tensor | None, ...]:
        """For the model."""
        return self.tokens_BS, self.lengths_B, self.types_BS, self.states_BSD


@dataclass
class Batch:
    """This rank's share of a step: its texts in parts of like lengths, and what belongs together.

    The vectors of the texts, as they stand in the parts, are at ``place_T`` in order: queries first, then passages.
    """

    parts: list[list[Texts]]
    place_T: Tensor
    n_queries: int
    candidates: Candidates  # of this rank's queries; its passages, or those of all ranks

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        candidates = Candidates(*(tensor.to(device) for tensor in self.candidates))
        parts = [[texts.to(device) for texts in part] for part in self.parts]
        return Batch(parts, self.place_T.to(device), self.n_queries, candidates)


class States:
    """What a frozen encoder gives for each token of a store's texts: [tokens, D], float32, mapped."""

    def __init__(self, states_TD: np.ndarray, lengths: Sequence[int]) -> None:
        self.states_TD, self.bounds = states_TD, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def of(self, number: int) -> Tensor:
        """[S, D] of a text."""
        return torch.from_numpy(np.array(self.states_TD[self.bounds[number] : self.bounds[number + 1]]))


def texts_of(store: Store, numbers: Sequence[int], pad_id: int, types: bool, states: States | None = None) -> Texts:
    """Padded rows of texts, on the CPU.

    Args:
        types: whether the model wants token types, which are all 0.
    """
    rows = [torch.from_numpy(store.tokens(int(number))) for number in numbers]
    tokens_BS = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    states_BSD = None
    if states is not None:
        states_BSD = nn.utils.rnn.pad_sequence([states.of(int(number)) for number in numbers], batch_first=True)
    lengths_B = torch.tensor([len(row) for row in rows])
    return Texts(tokens_BS, lengths_B, torch.zeros_like(tokens_BS) if types else None, states_BSD)


def held_out(rows: np.ndarray, queries: int) -> np.ndarray:
    """Mask of the rows whose query is among ``queries`` drawn by lot. Raises UserError if there are not more."""
    different = np.unique(rows[:, 0]).astype(np.int64)
    if queries >= len(different):
        raise UserError(
            f"data.hold_out={queries}: the rows have {len(different)} different queries, none would be left"
        )
    lot = np.argsort(counter_hash(HELD_OUT, different), kind="stable")[:queries]
    return np.isin(rows[:, 0], different[lot])


def spread_duplicates(order_N: np.ndarray, rows: np.ndarray, batch: int) -> np.ndarray:
    """Rows in nearly the order given, so that no ``batch`` of them one after another has a text twice.

    A row that would bring a text a second time waits for the next batch. Rows that do not fit at the end are left out.
    """
    waiting, chosen = deque(order_N.tolist()), []
    while len(waiting) >= batch:
        taken, passed, seen = [], [], set[int]()
        while waiting and len(taken) < batch:
            row = waiting.popleft()
            texts = {int(rows[row, 0]), *(int(number) for number in rows[row, 1:] if number >= 0)}
            (passed if seen & texts else taken).append(row)
            if taken and taken[-1] == row:
                seen |= texts
        if len(taken) < batch:
            break
        chosen += taken
        waiting.extendleft(reversed(passed))
    return np.array(chosen, dtype=np.int64)


class Batches:
    """The steps of a run.

    Args:
        rows: numbers of the store's rows to train on.
        batch: queries of a step, over all ranks.
        negatives: hard negatives of a query in a step.
        seed: of the order and of the negatives.
    """

    def __init__(
        self, store: Store, rows: np.ndarray, batch: int, negatives: int, no_duplicates: bool, seed: int
    ) -> None:
        if negatives > store.negatives:
            raise UserError(f"data.negatives={negatives}: no row has more than {store.negatives}")
        self.store, self.kept, self.batch, self.seed = store, rows, batch, seed
        self.negatives = store.negatives if negatives == -1 else negatives
        self.no_duplicates = no_duplicates
        self._orders: dict[int, np.ndarray] = {}
        self._steps: list[int] = []  # of each epoch so far
        if len(rows) < batch:
            raise UserError(f"batch_queries={batch}: the data has {len(rows)} rows to train on, which is less")
        if not self.epoch_steps(0):
            raise UserError(
                f"data.no_duplicates=true: no {batch} rows (batch_queries) without a common text were found"
            )

    def order(self, epoch: int) -> np.ndarray:
        """Rows of an epoch one after another, whole batches only."""
        if epoch not in self._orders:
            order_N = self.kept[permutation(len(self.kept), self.seed, ORDER, epoch)]
            if self.no_duplicates:
                order_N = spread_duplicates(order_N, self.store.rows, self.batch)
            self._orders = {epoch: order_N[: len(order_N) // self.batch * self.batch]}
        return self._orders[epoch]

    def epoch_steps(self, epoch: int) -> int:
        """Steps of an epoch. Rows that do not fill a batch are left out of it."""
        while len(self._steps) <= epoch:
            self._steps.append(len(self.order(len(self._steps))) // self.batch)
        return self._steps[epoch]

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, and place in it, of a step; the first is 1."""
        epoch, step = 0, step - 1
        while step >= self.epoch_steps(epoch):
            step -= self.epoch_steps(epoch)
            epoch += 1
        return epoch, step

    def numbers(self, step: int) -> np.ndarray:
        """[batch, 2 + negatives]: texts of all ranks' queries; -1 for negatives that a row lacks."""
        epoch, place = self.position(step)
        rows = self.order(epoch)[place * self.batch : (place + 1) * self.batch]
        found = self.store.rows[rows].astype(np.int64)
        negatives = found[:, 2:]
        if self.negatives < self.store.negatives:
            lot = counter_hash(self.seed, NEGATIVES, epoch, rows[:, None], np.arange(negatives.shape[1])[None])
            lot = np.where(negatives < 0, np.iinfo(np.int64).max, lot)
            chosen = np.argsort(lot, axis=1, kind="stable")[:, : self.negatives]
            negatives = np.take_along_axis(negatives, chosen, axis=1)
        return np.concatenate([found[:, :2], negatives], axis=1)


def share(numbers: np.ndarray, rank: int, size: int, cross_rank: bool) -> tuple[np.ndarray, int, Candidates]:
    """A rank's texts of a step, how many of them are queries, and what belongs together.

    All ranks have equally many texts: a query that is missing for that, and a negative that a row lacks, is another
    text, which counts nothing.

    Args:
        numbers: as :meth:`Batches.numbers` gives them.
        cross_rank: the passages are those of all ranks, in their order.
    """
    batch, per_rank = len(numbers), -(-len(numbers) // size)

    def queries_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
        own = np.arange(rank, batch, size)
        return np.append(own, np.full(per_rank - len(own), -1)), np.arange(per_rank) < len(own)

    owners, positive, real = [], [], []
    for other in range(size) if cross_rank else [rank]:
        query_N, counts_N = queries_of(other)
        owners.append(np.repeat(query_N[None], numbers.shape[1] - 1, axis=0).flatten())
        positive.append(np.arange(len(owners[-1])) < per_rank)
        real.append((counts_N & (numbers[query_N, 1:].T >= 0)).flatten())
    query_N, counts_N = queries_of(rank)
    own = numbers[query_N]
    texts = np.where(own < 0, own[:, 1:2], own).T.flatten()  # queries, positives, first negatives, ...
    found = (
        query_N,
        counts_N.astype(np.float32),
        np.concatenate(owners),
        np.concatenate(positive),
        np.concatenate(real),
    )
    return texts, per_rank, Candidates(*map(torch.from_numpy, found))


def parts_of(lengths: np.ndarray, micro_rows: int, alone: bool) -> list[list[np.ndarray]]:
    """Places of the texts of each part of ``micro_rows`` at most, like lengths together, longest first.

    Args:
        alone: a part is several batches with little padding; else one, so that all ranks have equally many.
    """
    order, parts = np.argsort(-lengths, kind="stable"), []
    for start in range(0, len(order), micro_rows):
        places = order[start : start + micro_rows]
        tokens = int(lengths[places].sum()) + 1
        parts.append([places[bucket] for bucket in length_buckets(lengths[places], tokens)] if alone else [places])
    return parts
