"""Scores of ranked passages: MRR, NDCG and recall at 10."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

QUERIES = 256  # scored at once


def retrieval_scores(
    queries_ND: Tensor, passages_MD: Tensor, relevant: Sequence[np.ndarray], k: int = 10
) -> dict[str, float]:
    """Means over queries of ``mrr@k``, ``ndcg@k`` and ``recall@k``, every query ranking every passage by dot product.

    Recall counts the right ones among the ``k`` best, over as many as could be: ``min(k, right ones)``.

    Args:
        relevant: numbers of the passages that answer each query, at least one; all count the same.
    """
    k_found = min(k, len(passages_MD))
    discount_K = 1 / np.log2(np.arange(2, k + 2))
    totals = np.zeros(3)
    for start in range(0, len(queries_ND), QUERIES):
        best_NK = (queries_ND[start : start + QUERIES] @ passages_MD.T).topk(k_found).indices.cpu().numpy()
        for best_K, right in zip(best_NK, relevant[start:], strict=False):
            hit_K = np.isin(best_K, right)
            first = hit_K.argmax() if hit_K.any() else np.inf
            ideal = discount_K[: min(k, len(right))].sum()
            totals += [1 / (first + 1), hit_K @ discount_K[: len(hit_K)] / ideal, hit_K.sum() / min(k, len(right))]
    return dict(zip((f"mrr@{k}", f"ndcg@{k}", f"recall@{k}"), (totals / len(queries_ND)).tolist(), strict=True))
