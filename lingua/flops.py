"""FLOPs and parameters: as the paper counts them, and as the hardware sees them.

The paper's ``F = 6 N + 12 d L S`` per token (Appendix, Tables 10 and 11), forward and backward, has N the parameters
of the blocks and S the length of a whole row, and leaves out the output head. Tokens are view tokens: each view of a
row counts S. Budgets and scaling laws use it.

What a device really computes is another number: attention at the lengths it has (a CrossBERT's encoder sees the
visible tokens only), and logits, at the predicted positions only. Model FLOPs utilization (MFU) is that number over
what the device could do; hardware FLOPs utilization (HFU) also counts activations that are computed again in the
backward pass (Chowdhery et al. 2022, appendix B). A product of [n, k] and [k, m] is 2 n k m FLOPs, and a backward
pass costs twice the forward. Norms, rotary positions, softmax and the like are not counted.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

import torch
from torch import nn

log = logging.getLogger(__name__)


def matrix_parameters(module: nn.Module) -> int:
    """Number of weights in matrices (norms and vectors are left out, as in the paper's counts)."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)


def block_flops(layers: nn.ModuleList, width: int, seq_len: int) -> float:
    """``F`` of a stack of blocks per token.

    Args:
        layers: the blocks, also on the meta device.
        width: total width of the attention heads.
        seq_len: S.
    """
    return 6 * matrix_parameters(layers) + 12 * width * len(layers) * seq_len


class ForwardFlops(NamedTuple):
    """FLOPs of a forward pass, by what a recomputation may or may not repeat."""

    linear: float = 0.0  # projections and feed-forward layers of the blocks
    attention: float = 0.0  # queries times keys, probabilities times values
    head: float = 0.0  # what follows the blocks: logits, and the predictor's output projection
    closing: float = 0.0  # each block's last product, a part of ``linear``

    def __add__(self, other: ForwardFlops) -> ForwardFlops:  # type: ignore[override]
        return ForwardFlops(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: ForwardFlops) -> ForwardFlops:
        return self + other * -1

    def __mul__(self, times: float) -> ForwardFlops:  # type: ignore[override]
        return ForwardFlops(*(part * times for part in self))

    @property
    def training(self) -> float:
        """Forward and backward: model FLOPs, the numerator of MFU."""
        return 3 * (self.linear + self.attention + self.head)


def stack_flops(layers: nn.ModuleList, width: int, queries: int, keys: int | None = None) -> ForwardFlops:
    """Forward FLOPs of a stack of blocks for one sequence.

    Attention is counted over all pairs of positions. Kernels that skip pairs of different documents do less.

    Args:
        layers: the blocks; parameters may be sharded or on the meta device.
        width: total width of the attention heads.
        queries: positions of the sequence.
        keys: positions of the other sequence that cross-attention reads (the ``wkv`` of each block runs on these);
            None: the same sequence.
    """
    of_keys = sum(matrix_parameters(layer.attention.wkv) for layer in layers) if keys is not None else 0
    keys = queries if keys is None else keys
    linear = 2 * (matrix_parameters(layers) - of_keys) * queries + 2 * of_keys * keys
    closing = 2 * sum(matrix_parameters(layer.ffn.w2) for layer in layers) * queries
    return ForwardFlops(linear, attention=4 * width * len(layers) * queries * keys, closing=closing)


def product_flops(weight_shape: tuple[int, ...] | torch.Size, positions: int) -> ForwardFlops:
    """Forward FLOPs of one matrix after the blocks, such as the output matrix, at ``positions`` positions."""
    return ForwardFlops(head=2 * weight_shape[0] * weight_shape[1] * positions)


# Dense peaks in TFLOP/s (half of what data sheets print "with sparsity"), accumulating in fp32, from the vendors' data
# sheets and architecture white papers. The first pattern found in the device's name counts.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_PEAKS: list[tuple[str, dict[torch.dtype, float]]] = [
    (r"\bGB200\b", {BF16: 2500.0, FP16: 2500.0, FP32: 80.0}),
    (r"\bB[23]00\b", {BF16: 2250.0, FP16: 2250.0, FP32: 75.0}),
    (r"\bGH200\b", {BF16: 989.4, FP16: 989.4, FP32: 66.9}),
    (r"\bH[12]00 NVL\b", {BF16: 835.5, FP16: 835.5, FP32: 60.0}),
    (r"\bH[18]00 PCIe\b", {BF16: 756.5, FP16: 756.5, FP32: 51.2}),
    (r"\bH(100|200|800)\b", {BF16: 989.4, FP16: 989.4, FP32: 66.9}),  # SXM: "NVIDIA H100 80GB HBM3"
    (r"\bH20\b", {BF16: 148.0, FP16: 148.0, FP32: 44.0}),
    (r"\bA[18]00\b", {BF16: 312.0, FP16: 312.0, FP32: 19.5}),
    (r"\bA30\b", {BF16: 165.0, FP16: 165.0, FP32: 10.3}),
    (r"\bA40\b", {BF16: 149.7, FP16: 149.7, FP32: 37.4}),
    (r"\bA10\b", {BF16: 125.0, FP16: 125.0, FP32: 31.2}),
    (r"\bRTX A6000\b", {BF16: 154.8, FP16: 154.8, FP32: 38.7}),
    (r"\bL40S\b", {BF16: 362.05, FP16: 362.05, FP32: 91.6}),
    (r"\bL40\b", {BF16: 181.05, FP16: 181.05, FP32: 90.5}),
    (r"\bL4\b", {BF16: 121.0, FP16: 121.0, FP32: 30.3}),
    (r"\bRTX 3090$", {BF16: 71.0, FP16: 71.0, FP32: 35.6}),
    (r"\bRTX 4090$", {BF16: 165.2, FP16: 165.2, FP32: 82.6}),
    (r"\bRTX 5090$", {BF16: 209.5, FP16: 209.5, FP32: 104.8}),
    (r"\bV100-PCIE\b", {FP16: 112.0, FP32: 14.0}),  # no bf16 units before Ampere
    (r"\bV100-SXM2\b", {FP16: 125.0, FP32: 15.7}),
    (r"\bT4\b", {FP16: 65.0, FP32: 8.1}),
    # PyTorch sees each of the two dies of a MI250 as a device of its own.
    (r"\bMI250X\b", {BF16: 191.5, FP16: 191.5, FP32: 47.85}),
    (r"\bMI250\b", {BF16: 181.05, FP16: 181.05, FP32: 45.25}),
    (r"\bMI210\b", {BF16: 181.0, FP16: 181.0, FP32: 45.3}),
    (r"\bMI300A\b", {BF16: 980.6, FP16: 980.6, FP32: 122.6}),
    (r"\bMI3(00|25)X\b", {BF16: 1307.4, FP16: 1307.4, FP32: 163.4}),
]


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that a device could do at most, dense, or None if the table has no figure.

    Args:
        name: as ``torch.cuda.get_device_name`` gives it. A MIG slice of a device has no figure.
        dtype: of the products; float32 means float32, not TF32.
    """
    if re.search(r"\bMIG\b", name):
        return None
    peaks = next((peaks for pattern, peaks in _PEAKS if re.search(pattern, name)), {})
    return peaks[dtype] * 1e12 if dtype in peaks else None


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """:func:`peak_flops` of a device of this machine. Says so in the log if a GPU is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, dtype)
    if peak is None:
        log.info(
            "no peak is known of %s in %s: mfu and hfu are not logged (lingua/flops.py has the table)", name, dtype
        )
    return peak


# What is computed a second time, by mode of activation checkpointing: a whole block but for its last product, whose
# result nothing in the backward pass asks for; or nothing counted here, where the results of products are kept.
RECOMPUTED = {
    "none": lambda forward: 0.0,
    "selective": lambda forward: 0.0,
    "block": lambda forward: forward.linear - forward.closing + forward.attention,
}


def utilization(
    forward: ForwardFlops,
    paper: float,
    seconds: float,
    devices: int = 1,
    peak: float | None = None,
    recompute: str = "none",
) -> dict[str, float]:
    """What to log of the speed of an interval.

    Args:
        forward: forward FLOPs of all its rows, on all devices; rows that only pad a batch do not count.
        paper: the paper's FLOPs of the same steps (forward and backward).
        seconds: how long it took.
        peak: FLOP/s of one device (:func:`device_peak`).
        recompute: the run's ``distributed.activation_checkpointing``. That a fused attention kernel recomputes scores
            inside its backward pass is not counted.

    Returns:
        ``tflops`` and ``paper_tflops`` (TFLOP/s of one device, training); with a ``peak`` also ``mfu`` and ``hfu``
        (shares of it) and ``paper_mfu``.
    """
    device_seconds = seconds * devices
    result = {
        "tflops": forward.training / device_seconds / 1e12,
        "paper_tflops": paper / device_seconds / 1e12,
    }
    if peak is not None:
        again = RECOMPUTED[recompute](forward)
        result["mfu"] = forward.training / device_seconds / peak
        result["hfu"] = (forward.training + again) / device_seconds / peak
        result["paper_mfu"] = paper / device_seconds / peak
    return result
