"""Rotary positions (RoPE), in the half-split layout of Hugging Face, and Llama 3's scaling of them.

Shapes as in :mod:`lingua.transformer`; P pairs of channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lingua.errors import check_fields


@dataclass
class RopeScaling:
    """Slower rotary positions as Llama 3.1 has them (``rope_type`` "llama3"), by the names in its config."""

    factor: float = 1.0  # the slow pairs of channels turn so many times slower; 1: off, whatever the others say
    low_freq_factor: float = 1.0  # slow: fewer turns than this over the original row
    high_freq_factor: float = 4.0  # more turns than this: left alone; in between: partly slower
    original_max_position_embeddings: int = 8192  # tokens of the rows before they were scaled

    def __post_init__(self) -> None:
        low, length = self.low_freq_factor, self.original_max_position_embeddings
        checks = {
            "factor": (1.0 <= self.factor < math.inf, "a finite number, 1 (off) or more"),
            "low_freq_factor": (0.0 < low < math.inf, "a finite number above 0"),
            "high_freq_factor": (
                low < self.high_freq_factor < math.inf,
                f"a finite number above low_freq_factor={low}",
            ),
            "original_max_position_embeddings": (length >= 1, "at least 1"),
        }
        check_fields("model.rope_scaling", self, checks)

    @property
    def is_on(self) -> bool:
        return self.factor != 1.0

    def scaled(self, frequencies_P: Tensor) -> Tensor:
        """The frequencies, radians a position, of this scaling."""
        turns_P = self.original_max_position_embeddings * frequencies_P / (2 * math.pi)
        kept_P = ((turns_P - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies_P * (kept_P + (1 - kept_P) / self.factor)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians that each pair of channels turns by from one position to the next: [head_dim / 2], float32."""
    frequencies_P = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    return frequencies_P if scaling is None or not scaling.is_on else scaling.scaled(frequencies_P)


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, float32, as :func:`apply_rotary` wants them.

    Args:
        positions: [S] for positions shared by all rows, or [B, S]; int64.

    Returns:
        two tensors [S, 1, K] or [B, S, 1, K], to broadcast over heads; the sine is that of the negative angle for the
        first channel of each pair.
    """
    angles = positions[..., None, None].float() * rotary_frequencies(head_dim, theta, scaling, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels (k, k + K/2) by its angle; same dtype as ``x``."""
    # Not cut and put together again: the compiler makes one pass of this.
    swapped = x_BSHK.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x_BSHK * cos.to(x_BSHK.dtype) + swapped * sin.to(x_BSHK.dtype)
