"""FLOPs and parameters as the paper counts them (Appendix, Tables 10 and 11).

``F = 6 N + 12 d L S`` per token, forward and backward, with N the parameters of the blocks and S the length
of a whole row. The output head is not in F. Tokens are view tokens: each view of a row counts S.
"""

from __future__ import annotations

from torch import nn


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
