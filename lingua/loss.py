"""Vocabulary cross-entropy, and samples of its softmax, that never hold tokens x vocabulary logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Rows whose logits exist at once. Each chunk costs a pass over the gradient of the output matrix, which is as slow as
# the products of some hundred rows.
CHUNK_ROWS = {"cpu": 1024, "cuda": 2048}
ROW_BYTES = 64  # rows of logits begin at multiples of it: those of 50,265 numbers are written up to 1.5 times as fast
CACHED_LOGITS = 1 << 18  # on a CPU, how many at a time go through the softmax, so that they stay in a core's cache


class LossSum(NamedTuple):
    """A loss summed over prediction targets, and how many they were (both scalars, float32 or wider).

    Sums of micro-batches and ranks add up; the mean of a step is the quotient of its sums, so how a step is
    cut into micro-batches never changes it.
    """

    loss: Tensor
    targets: Tensor

    def figures(self) -> dict[str, float]:
        """What is reported of it, by name."""
        return {"loss": float(self.loss / self.targets)}


Sums = TypeVar("Sums", bound=LossSum)  # or another NamedTuple of sums that has ``loss``, ``targets`` and ``figures``


def add_up(parts: Sequence[Sums]) -> Sums:
    """The sums of several micro-batches, without their graphs."""
    return type(parts[0])(*(sum(value.detach() for value in column) for column in zip(*parts, strict=True)))


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _logits_buffer(rows: int, weight_VD: Tensor) -> Tensor:
    """Uninitialized [rows, V] whose rows begin at multiples of ``ROW_BYTES``."""
    vocabulary, unit = len(weight_VD), ROW_BYTES // weight_VD.element_size()
    return weight_VD.new_empty(rows, -(-vocabulary // unit) * unit)[:, :vocabulary]


def _softmax(logits_NV: Tensor, buffer_NV: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The softmax [N, V] and log-sum-exp [N, 1], both ``wide``.

    On a CPU, where a pass over what is in cache is cheap, in ``buffer_NV``, or in place if that is None; on a GPU,
    where every pass is one over memory, by one kernel.
    """
    if logits_NV.device.type == "cpu":
        x_NV = logits_NV if buffer_NV is None else buffer_NV[: len(logits_NV)].copy_(logits_NV)
        max_N1 = x_NV.amax(dim=1, keepdim=True)
        sum_N1 = x_NV.sub_(max_N1).exp_().sum(dim=1, keepdim=True)
        return x_NV.mul_(1 / sum_N1), max_N1 + sum_N1.log()
    softmax_NV = logits_NV.softmax(dim=1, dtype=wide)
    largest_N1, index_N1 = softmax_NV.max(dim=1, keepdim=True)  # exp(largest logit - log-sum-exp)
    return softmax_NV, logits_NV.gather(1, index_N1).to(wide) - largest_N1.log()


def _sample(softmax_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """The first index of each row at which the cumulative probability exceeds the number; int64 [N]."""
    cumulative_NV = softmax_NV.cumsum(dim=1)
    # The last of them is not quite 1; rounding must not step over it either.
    uniform_N1 = uniform_N1.to(cumulative_NV.dtype) * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, uniform_N1, right=True).squeeze(1).clamp(max=softmax_NV.shape[1] - 1)


def _to_gradient_(
    logits_NV: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    uniform_N: Tensor | None,
    z_loss: float,
    wide: torch.dtype,
    wanted: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The weighted loss of a chunk, and samples if there is ``uniform_N``.

    The logits become their gradients, before weighting, in place if ``wanted``.
    """
    loss = torch.zeros((), dtype=wide, device=logits_NV.device)
    samples: list[Tensor] = []
    rows, buffer_NV = len(logits_NV), None
    if logits_NV.device.type == "cpu":
        rows = max(1, CACHED_LOGITS // logits_NV.shape[1])
        if logits_NV.dtype != wide:
            buffer_NV = torch.empty(rows, logits_NV.shape[1], dtype=wide)
    columns = (targets_N, weights_N, targets_N if uniform_N is None else uniform_N)
    for part_MV, targets_M1, weights_M1, uniform_M1 in zip(
        logits_NV.split(rows), *(column[:, None].split(rows) for column in columns), strict=True
    ):
        target_M1 = part_MV.gather(1, targets_M1).to(wide)
        grad_MV, log_z_M1 = _softmax(part_MV, buffer_NV, wide)
        loss += ((log_z_M1 - target_M1) * weights_M1).sum()
        if uniform_N is not None:
            samples.append(_sample(grad_MV, uniform_M1))
        if z_loss:
            loss += z_loss * (log_z_M1.square() * weights_M1).sum()
        if not wanted:
            continue
        if z_loss:
            grad_MV *= 1 + 2 * z_loss * log_z_M1
        # d loss / d logits = softmax - one-hot, and 2 z log Z softmax.
        grad_MV.scatter_add_(1, targets_M1, torch.full_like(targets_M1, -1, dtype=wide))
        if grad_MV is not part_MV:
            part_MV.copy_(grad_MV)
    return loss, samples


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss, samples and both gradients of a chunk of rows are made while its logits exist, then these are dropped."""

    @staticmethod
    def forward(
        ctx,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        uniform_N: Tensor | None,
        z_loss: float,
    ) -> tuple[Tensor, Tensor | None]:
        device, dtype = x_ND.device.type, _product_dtype(x_ND)
        wide = torch.promote_types(dtype, torch.float32)
        x, weight = x_ND.to(dtype), weight_VD.to(dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_ND) if needs_x else None
        grad_weight = None
        loss = torch.zeros((), dtype=wide, device=x.device)
        samples = [] if uniform_N is None else [targets_N[:0]]
        logits_NV = _logits_buffer(min(CHUNK_ROWS[device], len(x)), weight)
        for start in range(0, len(x), CHUNK_ROWS[device]):
            part = slice(start, start + CHUNK_ROWS[device])
            grad = torch.mm(x[part], weight.T, out=logits_NV[: len(x[part])])
            uniform = None if uniform_N is None else uniform_N[part]
            of_part, drawn = _to_gradient_(
                grad, targets_N[part], weights_N[part], uniform, z_loss, wide, needs_x or needs_weight
            )
            loss += of_part
            samples += drawn
            # Weights go into the narrow factors, not into the gradient, which is as wide as the vocabulary.
            weights = weights_N[part, None].to(dtype)
            if grad_x is not None:
                grad_x[part] = (grad @ weight) * weights
            if needs_weight:
                of_part = grad.T @ (x[part] * weights)
                grad_weight = of_part.to(wide) if grad_weight is None else grad_weight.add_(of_part)
        if needs_weight and grad_weight is None:  # no rows
            grad_weight = torch.zeros_like(weight, dtype=wide)
        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return loss, torch.cat(samples) if samples else None  # of integers, autograd knows that they have no gradient

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: None):
        grad_x, grad_weight = ctx.saved_tensors
        is_one = grad_loss.device.type == "cpu" and bool(grad_loss == 1)  # nearly always; a GPU would be waited for
        if grad_x is not None:
            grad_x = grad_x if is_one else grad_x * grad_loss.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight if is_one else grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float = 0.0
) -> LossSum:
    """Weighted sum of ``-log softmax(x @ weight.T)[target]``, logits in chunks.

    The products run in the autocast precision if one is on, the softmax in float32 (float64 for float64).

    Args:
        x_ND: final states at the positions to predict.
        weight_VD: output matrix.
        targets_N: token ids, int64.
        weights_N: 1.0 for targets, 0.0 for positions that do not count.
        z_loss: weight of ``(log sum exp logits)^2``, which is added at each target and keeps logits from drifting
            (PaLM, section 5).
    """
    loss, _ = _ChunkedCrossEntropy.apply(x_ND, weight_VD, targets_N, weights_N, None, z_loss)
    return LossSum(loss, weights_N.sum())


def cross_entropy_and_samples(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, uniform_N: Tensor, z_loss: float = 0.0
) -> tuple[LossSum, Tensor]:
    """:func:`cross_entropy`, and from the same logits one token id a row, drawn from their softmax; int64 [N].

    Args:
        uniform_N: numbers from 0 up to but not including 1, of which the draw is a function: the first token is
            taken at which the cumulative probability exceeds the number.
    """
    loss, samples_N = _ChunkedCrossEntropy.apply(x_ND, weight_VD, targets_N, weights_N, uniform_N, z_loss)
    return LossSum(loss, weights_N.sum()), samples_N
