"""Attention: one function, whatever computes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention(q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask_B1ST: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, bidirectional.

    Args:
        q_BSHK: queries: batch, query positions, heads, head size.
        k_BTHK, v_BTHK: keys and values at T positions.
        mask_B1ST: True where a query may look; None lets every query see every key, which is the fast path.

    Returns:
        [B, S, H, K], in the dtype of the inputs.
    """
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), attn_mask=mask_B1ST
    )
    return out_BHSK.transpose(1, 2)
