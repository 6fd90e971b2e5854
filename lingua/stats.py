"""Statistics of weights, gradients, activations and attention while a model trains (Lingua's ``probe.py``).

Off, nothing of this touches the model: no hook is registered. In a step that is due, one more forward pass of the
step's first micro-batch, without gradients and not compiled, is looked at just before the optimizer's update, and
gradients and weights are read as they stand there. So what is trained stays the same bit for bit, compiled or not.

What is recorded, under ``stats/``:

- ``weight/NAME/norm``, ``.../max``, ``gradient/NAME/...``: L2 norm and largest absolute value of each parameter, whole
  even if it is sharded. Gradients are those the optimizer gets: of the mean loss, after clipping.
- ``activation/MODULE/rms``, ``.../max``: output of each block (the residual stream) and of its parts.
- ``attention/MODULE/entropy``: in nats, mean over heads and queries; ``.../entropy_lowest_head``: that of the head
  whose attention is narrowest; ``.../logit_max``: largest absolute scaled product of a query and a key.
- ``output/logit_rms``, ``output/logit_max``: of the vocabulary logits at some positions; ``output/log_z``: largest
  absolute log-partition of their softmax. Logits of attention or output that grow without end announce a spike;
  ``model.qk_norm`` and ``model.z_loss`` hold them.

The last three are of this process's own micro-batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from lingua import transformer
from lingua.attention import Mask, dense_mask
from lingua.errors import UserError

log = logging.getLogger(__name__)
OUTPUT_POSITIONS = 64  # of one row, whose vocabulary logits are looked at


@dataclass
class StatsArgs:
    """Statistics of weights, gradients, activations and attention in metrics.jsonl."""

    every: int = 0  # steps between statistics; 0: off

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"stats.every={self.every}: expected a number of steps, or 0 for none")


class Stats:
    """Takes the statistics of a training loop.

    Args:
        model: what the loop calls for its loss.
        optimizer: the one whose ``step`` updates the model, once a training step.
        precision: gives the context of the forward pass.
        write: gets the record: ``step`` and the numbers.
    """

    def __init__(
        self,
        args: StatsArgs,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Callable[[], contextlib.AbstractContextManager],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args, self.model, self.optimizer, self.precision, self.write = args, model, optimizer, precision, write

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """Context around a whole optimizer step, on every rank."""
        if not self.args.every or step % self.args.every:
            return contextlib.nullcontext()
        return self._due(step)

    @contextlib.contextmanager
    def _due(self, step: int) -> Iterator[None]:
        first_call: list[tuple[tuple, dict[str, Any]]] = []

        def keep_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if not first_call:
                first_call.append((args, kwargs))

        def take(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
            if not first_call:
                log.warning("step %d: no activation statistics: the loop does not call the model itself", step)
            numbers = forward_statistics(self.model, *first_call[0], self.precision) if first_call else {}
            numbers |= parameter_statistics(self.model)
            self.write({"step": step, **{f"stats/{name}": value for name, value in numbers.items()}})

        handles = [
            self.model.register_forward_pre_hook(keep_inputs, with_kwargs=True),
            self.optimizer.register_step_pre_hook(take),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def parameter_statistics(model: nn.Module) -> dict[str, float]:
    """Norm and largest absolute value of every parameter and gradient; a collective call if they are sharded."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        if parameter.grad is not None:
            tensors[f"gradient/{name}"] = parameter.grad
    groups: dict[tuple, list[str]] = {}  # tensors that lie on the devices in the same way, for one reduction of all
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (), []).append(
            name
        )
    results: dict[str, float] = {}
    for layout, names in groups.items():
        parts = [tensors[name].to_local() if layout else tensors[name] for name in names]
        wide = [torch.promote_types(part.dtype, torch.float32) for part in parts]
        norms = [torch.linalg.vector_norm(part, dtype=dtype) for part, dtype in zip(parts, wide, strict=True)]
        squares = torch.stack([norm.double().square() for norm in norms])
        # a rank may hold nothing of a small parameter
        maxima = torch.stack([part.abs().amax().double() if part.numel() else squares.new_zeros(()) for part in parts])
        if layout:
            squares, maxima = _over_shards(squares, *layout, "sum"), _over_shards(maxima, *layout, "max")
        for name, square, maximum in zip(names, squares.tolist(), maxima.tolist(), strict=True):
            results |= {f"{name}/norm": square**0.5, f"{name}/max": maximum}
    return results


def _over_shards(values: Tensor, mesh: Any, placements: tuple, reduction: str) -> Tensor:
    partial = [Partial(reduction) if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(values, mesh, partial, run_check=False).full_tensor()


@torch.no_grad()
def forward_statistics(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    precision: Callable[[], contextlib.AbstractContextManager],
) -> dict[str, float]:
    """Statistics of activations and attention in ``model(*args, **kwargs)``; a collective call if it is sharded."""
    found: dict[str, Tensor] = {}
    inside = ""  # the part of a block that runs
    handles = []

    def enter(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            nonlocal inside
            inside = name

        return hook

    def leave(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            found[f"activation/{name}/rms"], found[f"activation/{name}/max"] = _rms_and_max(output)

        return hook

    def see_attention(q_BSHK: Tensor, k_BTHK: Tensor, mask: Mask | None) -> None:
        names = ("entropy", "entropy_lowest_head", "logit_max")
        values = attention_statistics(q_BSHK, k_BTHK, mask)
        found.update({f"attention/{inside}/{name}": value for name, value in zip(names, values, strict=True)})

    def see_states(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 3 and output.shape[-1] == embedding.embedding_dim:
            logits = output[0, :OUTPUT_POSITIONS].float() @ embedding.weight.float().T
            found["output/logit_rms"], found["output/logit_max"] = _rms_and_max(logits)
            found["output/log_z"] = logits.logsumexp(dim=-1).abs().amax()

    for name, part, is_block in _parts(model):
        handles.append(part.register_forward_hook(leave(name)))
        if not is_block:
            handles.append(part.register_forward_pre_hook(enter(name)))
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if getattr(getattr(model, "encoder", None), "output", None) is not None:  # not tied
        embedding = model.encoder.output
    if embedding is not None:  # the states that logits are made of come out of the child that runs last
        # (of an ELECTRA out of its generator, which is the part that predicts tokens).
        predicting = [model.generator] if hasattr(model, "generator") else model.children()
        handles += [child.register_forward_hook(see_states) for child in predicting]
    try:
        # Compiled blocks would neither run hooks nor accept them without compiling. (As a decorator this would import
        # the compiler wherever statistics are imported.)
        with torch.compiler.set_stance("force_eager"), precision(), _attention_seen_by(see_attention):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root would keep whole weights, and train on with them after the update
    values = torch.stack([value.double() for value in found.values()]).tolist() if found else []
    return dict(zip(found, values, strict=True))


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Blocks (what stands in a ModuleList) and their parts, as (name, module, whether it is a block)."""
    for list_name, modules in model.named_modules():
        if isinstance(modules, nn.ModuleList):
            for index, block in modules.named_children():
                yield f"{list_name}.{index}", block, True
                for name, part in block.named_children():
                    yield f"{list_name}.{index}.{name}", part, False


def _rms_and_max(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return torch.linalg.vector_norm(x) / x.numel() ** 0.5, x.abs().amax()


def attention_statistics(q_BSHK: Tensor, k_BTHK: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the attention that :func:`lingua.attention.attention` computes from the same arguments.

    Queries that may look nowhere are left out.

    Returns:
        scalars: mean entropy in nats over queries and heads; that of the head where it is lowest; largest absolute
        logit.
    """
    mask = dense_mask(mask, q_BSHK.shape[1], k_BTHK.shape[1], q_BSHK.device)
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    entropy_H = torch.zeros(q_BSHK.shape[2], dtype=wide, device=q_BSHK.device)
    queries, largest = torch.zeros_like(entropy_H[0]), torch.zeros_like(entropy_H[0])
    for row in range(len(q_BSHK)):  # row by row, for the memory
        q_SHK, k_THK = q_BSHK[row].to(wide), k_BTHK[row].to(wide)
        logits_HST = torch.einsum("shk,thk->hst", q_SHK, k_THK) * q_SHK.shape[-1] ** -0.5
        mask_ST = torch.ones_like(logits_HST[0], dtype=torch.bool)
        if mask is not None:
            mask_ST = mask[min(row, len(mask) - 1), 0].expand_as(mask_ST)  # one mask may stand for all rows
        looks_S = mask_ST.any(dim=1)
        largest = torch.maximum(largest, logits_HST.masked_fill(~mask_ST, 0.0).abs().amax())
        logits_HST = logits_HST.masked_fill(~mask_ST, -torch.inf)
        entropy_HS = torch.special.entr(logits_HST.softmax(dim=-1)).sum(dim=-1)
        entropy_H += entropy_HS.masked_fill(~looks_S, 0.0).sum(dim=1)
        queries += looks_S.sum()
    entropy_H = entropy_H / queries
    return entropy_H.mean(), entropy_H.min(), largest


@contextlib.contextmanager
def _attention_seen_by(see: Callable[[Tensor, Tensor, Tensor | None], None]) -> Iterator[None]:
    """Show queries, keys and mask of every attention to ``see``; the blocks know no hook for what is inside them."""
    computed = transformer.attention

    def seen(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, *args: Any, **kwargs: Any) -> Tensor:
        see(q, k, mask)
        return computed(q, k, v, mask, *args, **kwargs)

    transformer.attention = seen
    try:
        yield
    finally:
        transformer.attention = computed
