"""Ranks, devices and precision, and one function that makes any model parallel."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lingua.errors import UserError
from lingua.loss import Sums

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
# Of torch.compile, without those that record CUDA graphs: they were never tried on blocks that are compiled one by one.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class DistributedArgs:
    """How a run spreads over the ranks it has. Nothing here changes the mathematics."""

    # Ranks that share the parameters of one copy of the model; the copies are world size / dp_shard.
    # 1: every rank has a whole copy; -1: all ranks share one; else groups, such as the GPUs of a node.
    dp_shard: int = 1
    reshard_after_forward: bool = True  # drop a block's gathered parameters until the backward pass (less memory)
    activation_checkpointing: str = "none"  # recompute in the backward pass: none, selective (all but products), block
    compile_mode: str = "default"  # with compile=true; max-autotune-no-cudagraphs tries more kernels, for minutes
    timeout: float = 600.0  # seconds without progress after which the run ends and says which rank stood where
    requeue: bool = False  # under SLURM, on SIGUSR2: put the job back into the queue once all is saved

    def __post_init__(self) -> None:
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise UserError(f"distributed.dp_shard={self.dp_shard}: expected -1 (all ranks) or at least 1")
        if self.activation_checkpointing not in ("none", "selective", "block"):
            raise UserError(
                f"distributed.activation_checkpointing={self.activation_checkpointing}: "
                "expected none, selective or block"
            )
        if self.compile_mode not in COMPILE_MODES:
            raise UserError(f"distributed.compile_mode={self.compile_mode}: expected one of {', '.join(COMPILE_MODES)}")
        if not 0 < self.timeout <= 1e6:
            raise UserError(f"distributed.timeout={self.timeout}: expected seconds, above 0 and at most 1e6")


@dataclass(frozen=True)
class World:
    """This process among those of the run.

    ``control`` and ``saving`` are process groups on the CPU for what the hosts agree on and for checkpoints; None
    alone, where there is no process group at all.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's ``value``."""
        return self.gather(value if self.is_first else None)[0]

    def check_same(self, facts: dict[str, dict[str, Any]]) -> None:
        """Raise UserError on every rank if the ranks differ in ``facts``, flat dicts by topic."""
        everyone = self.gather((socket.gethostname(), facts))
        host, first = everyone[0]
        for rank, (other_host, other) in enumerate(everyone):
            for topic, values in first.items():
                for key in sorted(values.keys() | other[topic].keys()):
                    ours, theirs = values.get(key), other[topic].get(key)
                    if ours != theirs:
                        raise UserError(
                            f"the ranks disagree on {topic}: {key} is {ours!r} on rank 0 ({host}) and {theirs!r} on "
                            f"rank {rank} ({other_host}); start all of them with the same command and the same files"
                        )


def find_ranks() -> tuple[int, int, int, dict[str, str]]:
    """What the environment says of this process.

    Returns:
        rank, world size, rank on this machine, and what ``env://`` needs to meet the others: from ``torchrun``
        (RANK, ...), from ``srun`` (SLURM_PROCID, ... with the step's first node as the meeting point), or alone.

    Raises:
        UserError: the variables are incomplete or make no sense.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in env]
        if missing:
            raise UserError(
                f"the environment has {'RANK' if 'RANK' in env else 'WORLD_SIZE'} but not {', '.join(missing)}: start "
                "with torchrun, which sets them all, or unset it to run alone"
            )
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if rank >= size:
            raise UserError(f"the environment has RANK={rank} and WORLD_SIZE={size}: expected 0 to {size - 1}")
        return rank, size, _number("LOCAL_RANK" if "LOCAL_RANK" in env else "RANK"), {}
    # SLURM_NTASKS also stands in a batch script, where one process runs; SLURM_STEP_NUM_TASKS only below srun.
    size = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if size > 1 and "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        step = int(env.get("SLURM_STEP_ID", 0)) if env.get("SLURM_STEP_ID", "0").isdigit() else 0
        port = 20000 + (int(env.get("SLURM_JOB_ID", 0)) * 7 + step) % 20000
        meeting = {
            "MASTER_ADDR": env.get("MASTER_ADDR", first_host(nodes)),
            "MASTER_PORT": env.get("MASTER_PORT", str(port)),
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": str(size),
        }
        return int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID", 0)), meeting
    return 0, 1, 0, {}


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise UserError(f"the environment has {name}={value!r}: expected a whole number; torchrun sets it")
    return int(value)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as ``gpu[07-09,12],login1``."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group() if head else nodes)


def start(timeout: float, patience: float | None = None) -> World:
    """Meet the other ranks of the run, if there are others, and take this rank's device.

    Args:
        timeout: seconds after which a collective that does not come to its end fails.
        patience: seconds to wait for the other ranks to come; ``timeout`` if not given.

    Raises:
        UserError: they did not come, or the environment makes no sense.
    """
    rank, size, local_rank, meeting = find_ranks()
    device = pick_device(local_rank)
    if size == 1:
        return World(device)
    if not dist.is_initialized():
        os.environ.update(meeting)
        try:
            patience = timedelta(seconds=timeout if patience is None else patience)
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=patience))
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
        except (dist.DistError, ValueError, RuntimeError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"rank {rank} of {size} could not meet the others at {where}: {str(error).splitlines()[0]}"
            ) from error
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) for _ in range(2)]
    return World(device, rank, size, *groups)


def pick_device(local_rank: int = 0) -> torch.device:
    """This rank's GPU if there is one, else the CPU, for which freed memory is kept (:func:`keep_freed_memory`)."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    count = torch.cuda.device_count()  # one where the launcher gives each process its own
    if count > 1 and local_rank >= count:
        raise UserError(
            f"local rank {local_rank} on {socket.gethostname()} has no GPU: {count} are visible; "
            "start one process a GPU"
        )
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what tensors free for the next ones, as PyTorch itself does on a GPU (glibc only).

    As it is, glibc maps every large tensor anew and gives it back, and the kernel hands out its pages one by one, all
    zeros: a quarter of the time of a small model's step. A process then keeps the most memory it ever had.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute precision that ``auto``, ``bf16``, ``fp32`` or ``fp64`` means on ``device``.

    ``auto`` is bf16 where the hardware multiplies in it (2.3 times fp32 on a CPU with AVX-512 bf16), else fp32.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UserError(f"dtype={name}: expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def precision(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager:
    """Context in which the forward pass computes in ``dtype``; weights stay in fp32 (fp64 for fp64)."""
    if dtype == torch.bfloat16:
        return torch.autocast(device.type, dtype=dtype)
    return contextlib.nullcontext()


def parallelize(model: nn.Module, world: World, args: DistributedArgs, dtype: torch.dtype, compile: bool) -> nn.Module:
    """Put a model on its device and spread it over the ranks, in place.

    Every block of every ``nn.ModuleList`` is checkpointed, compiled and sharded on its own; what is outside of them
    (embedding, final norm, ...) is one more shard, in full precision, so that a tied embedding stays one tensor.

    Args:
        model: on the meta device, with a method ``init_weights()`` that fills it; the weights are the same for every
            number of ranks.
        dtype: of computation. Parameters, gradients and their sums over ranks are fp32 (fp64 for fp64).
    """
    if compile:
        check_compiler(world.device)
    blocks = [block for stack in model.modules() if isinstance(stack, nn.ModuleList) for block in stack]
    for block in blocks:
        if args.activation_checkpointing != "none":
            block.forward = _checkpointed(block.forward, args.activation_checkpointing)
        if compile:
            # Block by block: the same code is compiled once for all layers, and starts in seconds. The forward pass
            # alone, so that the hooks that gather and shard parameters stay outside of the graph.
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, mode=args.compile_mode)
    model.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if dist.is_initialized():  # also by who wants a single rank sharded
        _shard(model, blocks, world, args, dtype)
    model.to_empty(device=world.device)
    model.init_weights()  # type: ignore[operator]
    return model


def check_compiler(device: torch.device) -> None:
    """Raise UserError if blocks cannot be compiled for a CPU for want of a C++ compiler."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "compile=true needs a C++ compiler on a CPU, and neither $CXX nor g++ is one: apt install g++, set CXX, or "
            "give compile=false"
        ) from None


def is_product(op: Any) -> bool:
    """Whether an operator multiplies matrices or computes attention by any of :mod:`lingua.attention`'s kernels."""
    aten = torch.ops.aten
    known = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
    ]
    # varlen_attn's operators, and those of xFormers, are there after their first use only.
    return op in known or getattr(op, "namespace", "").startswith(("torch_attn", "xformers"))


def _checkpointed(forward: Any, mode: str) -> Any:
    """A forward pass whose activations are computed again in the backward pass."""
    context = {}
    if mode == "selective":

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if is_product(op) else CheckpointPolicy.PREFER_RECOMPUTE

        context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}

    def checkpointed(*args: Any, **kwargs: Any) -> Any:  # torch.compile would skip a partial of checkpoint
        # There is no dropout, so no random state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context, **kwargs)

    return checkpointed


def _shard(model: nn.Module, blocks: list[nn.Module], world: World, args: DistributedArgs, dtype: torch.dtype) -> None:
    shard = world.size if args.dp_shard == -1 else args.dp_shard
    if world.size % shard:
        raise UserError(f"distributed.dp_shard={shard} does not divide the {world.size} ranks of this run")
    mesh = init_device_mesh(world.device.type, (world.size // shard, shard), mesh_dim_names=("replicate", "shard"))
    wide = torch.promote_types(dtype, torch.float32)
    # Blocks are gathered in the compute precision, which halves the traffic; the residual stream stays as it is.
    low = MixedPrecisionPolicy(
        param_dtype=dtype if dtype == torch.bfloat16 else None, reduce_dtype=wide, cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=low, reshard_after_forward=args.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # losses are sums over targets, so gradients are sums over ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sync_gradients(model: nn.Module, when: bool) -> None:
    """Whether the next backward pass adds the gradients up over the ranks; else they add up on each for themselves."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)


def sum_over_ranks(part: Sums) -> Sums:
    """The sum of each rank's part, in the loss's precision and without graph; waits for nothing on a GPU."""
    values = all_sum(torch.stack([value.detach().double() for value in part]))
    return type(part)(*values.to(part.loss.dtype))


def all_sum(values: Tensor) -> Tensor:
    """The sum of each rank's values, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def full(tensor: Tensor) -> Tensor:
    """A tensor whole, if it is spread over ranks. Every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be spread over ranks."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def with_last(items: list[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last."""
    for number, item in enumerate(items, 1):
        yield item, number == len(items)
