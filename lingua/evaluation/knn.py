"""Nearest neighbours by brute force, in float64 and bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 4096  # rows searched in at a time: with their products they stay in a processor's cache
CHUNK_NUMBERS = 1 << 24  # distances in memory at a time


def nearest(
    x_ND: Tensor,
    x_MD: Tensor,
    k: int,
    distance: str,
    tile_rows: int = TILE_ROWS,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> Tensor:
    """Indices [M, k] of the nearest of ``x_ND`` for each row of ``x_MD``, nearest first, lower index on ties.

    ``distance`` is ``l2`` or ``cosine``; a zero vector is at cosine distance 1 from all, as in scikit-learn.
    Beside the queries in float64 there are ``tile_rows`` rows and ``chunk_numbers`` distances (or those of one
    query) in memory at a time.
    """
    # For l2: leaves distances as they are, and keeps |a|^2 - 2ab small
    center_D = sum(tile.double().sum(0) for tile in x_ND.split(tile_rows)) / len(x_ND)

    def placed(x: Tensor) -> Tensor:
        x = x.double()
        return x / x.norm(dim=1, keepdim=True).clamp(min=1e-300) if distance == "cosine" else x - center_D

    x_MD = placed(x_MD)
    far_MK = x_MD.new_full((len(x_MD), k), torch.inf)
    index_MK = torch.zeros_like(far_MK, dtype=torch.int64)
    for start in range(0, len(x_ND), tile_rows):
        tile_TD = placed(x_ND[start : start + tile_rows])
        norms_T = tile_TD.square().sum(1) if distance == "l2" else tile_TD.new_zeros(len(tile_TD))
        for rows in torch.arange(len(x_MD), device=x_MD.device).split(max(1, chunk_numbers // len(tile_TD))):
            # |a - b|^2 less the constant |b|^2
            far_BT = torch.addmm(norms_T[None], x_MD[rows], tile_TD.T, alpha=-2.0)
            found_BK = _smallest(far_BT, min(k, len(tile_TD)))
            # Stable, and earlier tiles stand first: of equal distances the lower index stays.
            far = torch.cat([far_MK[rows], far_BT.gather(1, found_BK)], 1)
            index = torch.cat([index_MK[rows], found_BK + start], 1)
            order_BK = far.sort(dim=1, stable=True).indices[:, :k]
            far_MK[rows], index_MK[rows] = far.gather(1, order_BK), index.gather(1, order_BK)
    return index_MK


def _smallest(far_BT: Tensor, k: int) -> Tensor:
    """Indices [B, k] of the smallest numbers of each row, smallest first, lower index on ties."""
    value, index = far_BT.topk(min(k + 1, far_BT.shape[1]), largest=False)
    value_BK, index_BK = value[:, :k], index[:, :k].contiguous()
    # topk breaks ties as it likes. Where they cross k, take all that are nearer and the first of the tied.
    kth_B1 = value_BK[:, -1:]
    crossing_B = (value[:, k:] == kth_B1).any(1)
    if crossing_B.any():
        far, kth = far_BT[crossing_B], kth_B1[crossing_B]
        place_T = torch.arange(far_BT.shape[1], device=far.device)
        rank = torch.where(far == kth, place_T, torch.where(far < kth, -1, far_BT.shape[1]))
        index_BK[crossing_B] = rank.topk(k, largest=False).indices
    index_BK = index_BK.sort(1).values  # then by distance, equal distances staying in this order
    return index_BK.gather(1, far_BT.gather(1, index_BK).sort(dim=1, stable=True).indices)
