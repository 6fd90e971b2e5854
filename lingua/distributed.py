"""Where and in what precision a model computes."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from lingua.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def pick_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


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


def parallelize(model: nn.Module, device: torch.device, dtype: torch.dtype, compile: bool) -> nn.Module:
    """Move a model to its device and precision and compile its blocks, in place."""
    model.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if compile:
        # Block by block: the same code is compiled once for all layers, and starts in seconds.
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    block.compile(fullgraph=True, dynamic=False)
    return model
