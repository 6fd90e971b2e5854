"""InfoNCE on cosine similarity with hard, in-batch and cross-rank negatives, and GradCache.

Suffixes: N queries, M passages, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.distributed import sync_gradients, with_last
from lingua.errors import UserError, check_fields


@dataclass
class ContrastiveArgs:
    """Which passages a query's own is told apart from, and how sharply."""

    own_negatives: bool = True  # the hard negatives of the query itself (equation 5)
    in_batch: bool = True  # passages and hard negatives of the other queries that this rank has
    cross_rank: bool = True  # and of those of all ranks, so that their number changes nothing
    temperature: float = 0.05  # cosines are divided by it; 1: equation 5 as printed
    learn_temperature: bool = False  # train it, from there on
    # Also train the first so many channels by themselves, such as [256, 64]; the loss is the mean over all lengths.
    matryoshka: list[int] = field(default_factory=list)
    # Leave out negatives whose cosine exceeds that of the query's own passage by more than this; none: keep all.
    false_negative_margin: float | None = None

    def __post_init__(self) -> None:
        margin = self.false_negative_margin
        checks = {
            "temperature": (0.0 < self.temperature < math.inf, "a finite number above 0"),
            "in_batch": (self.in_batch or self.own_negatives, "true, or loss.own_negatives=true: there are no others"),
            "cross_rank": (self.in_batch or not self.cross_rank, "false where loss.in_batch is false"),
            "matryoshka": (all(dim >= 1 for dim in self.matryoshka), "numbers of channels"),
            "false_negative_margin": (margin is None or abs(margin) <= 2, "a difference of cosines, or none"),
        }
        check_fields("loss", self, checks)


class Candidates(NamedTuple):
    """What belongs together in a batch. Queries are known by their place in the whole batch of all ranks."""

    query_N: Tensor  # int64, the queries of this rank
    weight_N: Tensor  # 0.0 for queries that only fill up the batch
    owner_M: Tensor  # int64, the query that a passage came with
    positive_M: Tensor  # bool, whether it is the one to be found
    real_M: Tensor  # bool, False for passages that only fill up the batch


class ContrastiveSum(NamedTuple):
    """Sums over the queries of a batch; see :class:`lingua.loss.LossSum`."""

    loss: Tensor
    targets: Tensor  # queries
    negatives: Tensor  # passages that they were told apart from
    left_out: Tensor  # negatives that the margin left out
    found: Tensor  # queries whose own passage was the nearest

    def figures(self) -> dict[str, float]:
        """What is reported, each of a query."""
        names = {"loss": self.loss, "negatives": self.negatives, "found": self.found}
        if float(self.left_out):
            names["left_out_negatives"] = self.left_out
        return {name: float(value / self.targets) for name, value in names.items()}


def info_nce(
    queries_ND: Tensor, passages_MD: Tensor, candidates: Candidates, args: ContrastiveArgs, temperature: Tensor | float
) -> ContrastiveSum:
    """Sum over queries of ``-log(exp(s+ / t) / (exp(s+ / t) + sum of exp(s- / t)))``, s the cosine.

    With own negatives alone and t = 1 this is equation 5; with in-batch negatives it is what is known as
    MultipleNegativesRankingLoss.
    """
    own_NM = candidates.query_N[:, None] == candidates.owner_M
    positive_NM = own_NM & candidates.positive_M
    negative_NM = (own_NM & ~candidates.positive_M) if args.own_negatives else torch.zeros_like(own_NM)
    if args.in_batch:
        negative_NM = negative_NM | ~own_NM
    negative_NM = negative_NM & candidates.real_M
    place_N1 = positive_NM.int().argmax(1, keepdim=True)
    weight_N = candidates.weight_N.to(queries_ND.dtype)
    count_N, left_out = negative_NM.sum(1), queries_ND.new_zeros(())
    losses = []
    for dim in [queries_ND.shape[1], *args.matryoshka]:
        cosine_NM = F.normalize(queries_ND[:, :dim], dim=1) @ F.normalize(passages_MD[:, :dim], dim=1).T
        positive_N1 = cosine_NM.gather(1, place_N1)
        if not losses:  # all channels decide what is left out and what is found
            nearer_NM = negative_NM & (cosine_NM >= positive_N1)
            if args.false_negative_margin is not None:
                false_NM = negative_NM & (cosine_NM > positive_N1 + args.false_negative_margin)
                negative_NM = negative_NM & ~false_NM
                left_out = (false_NM.sum(1) * weight_N).sum()
                count_N = negative_NM.sum(1)
        logits_NM = (cosine_NM / temperature).masked_fill(~(negative_NM | positive_NM), -torch.inf)
        losses.append((logits_NM.logsumexp(1) - positive_N1.squeeze(1) / temperature) @ weight_N)
    return ContrastiveSum(
        torch.stack(losses).mean(),
        weight_N.sum(),
        (count_N * weight_N).sum(),
        left_out,
        (~nearer_NM.any(1) * weight_N).sum(),
    )


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor) -> Tensor:
        parts = [torch.empty_like(x_ND) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x_ND.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # every rank's loss depends on every rank's rows
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather_rows(x_ND: Tensor) -> Tensor:
    """Equally many rows of every rank one after another, with gradient: that of the sum of all ranks' losses."""
    return _GatherRows.apply(x_ND) if dist.is_initialized() else x_ND


def backward_in_parts(
    model: nn.Module,
    parts: Sequence[Sequence[Any]],
    loss: Callable[[Tensor, Tensor], ContrastiveSum],
    precision: Callable[[], AbstractContextManager],
) -> ContrastiveSum:
    """Add the gradient of a loss of many texts' vectors to the model's, however few texts fit into memory.

    One part is one plain pass. Several take GradCache (Gao et al. 2021): vectors without graph, the loss's gradient for
    them, and a second pass through the model part by part; the result is the same. The model must give a text the
    same vector twice: no dropout.

    Args:
        model: gives (vectors [n, D], temperature [1]) of the ``arguments()`` of texts.
        parts: what is in memory together, as batches of texts; all ranks have equally many of both.
        loss: of all vectors, batch after batch, and the temperature.
        precision: context of the forward pass.
    """

    def forward(part: Sequence[Any]) -> tuple[Tensor, Tensor]:
        with precision():
            found = [model(*texts.arguments()) for texts in part]
        return torch.cat([x_ND for x_ND, _ in found]), found[0][1]

    if len(parts) == 1:
        sync_gradients(model, when=True)
        total = loss(*forward(parts[0]))
        total.loss.backward()
        return total
    with torch.no_grad():
        found = [forward(part) for part in parts]
    vectors = torch.cat([x_ND for x_ND, _ in found]).requires_grad_()
    temperature = found[0][1].detach().requires_grad_()
    total = loss(vectors, temperature)
    total.loss.backward()
    grads = vectors.grad.split([len(x_ND) for x_ND, _ in found])
    for (part, grad_ND), is_last in with_last(list(zip(parts, grads, strict=True))):
        sync_gradients(model, when=is_last)
        x_ND, t = forward(part)
        product = (x_ND * grad_ND).sum()
        if is_last and t.requires_grad:
            product = product + (t * temperature.grad).sum()
        product.backward()
    return total


def check_matryoshka(args: ContrastiveArgs, dim: int) -> None:
    """Raise UserError unless a vector of ``dim`` channels has as many and more."""
    for length in args.matryoshka:
        if length >= dim:
            raise UserError(f"loss.matryoshka has {length}: the vectors have {dim} channels, which are trained anyhow")
