"""Ranking scores against a hand calculation and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from lingua.evaluation.retrieval import retrieval_scores


def test_by_hand() -> None:
    """Passages at 1 / (rank) by construction: the first query finds its own second, the other not at all."""
    passages_MD = torch.eye(12)
    queries_ND = torch.stack((torch.arange(12.0).flip(0), torch.arange(12.0).flip(0)))
    found = retrieval_scores(queries_ND, passages_MD, [np.array([1]), np.array([11])])
    assert found == pytest.approx({"mrr@10": 0.25, "ndcg@10": 1 / np.log2(3) / 2, "recall@10": 0.5})


def test_ndcg_with_several_relevant_passages_is_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    queries_ND, passages_MD = torch.randn(300, 6, generator=generator), torch.randn(40, 6, generator=generator)
    rng = np.random.default_rng(0)
    relevant = [rng.choice(40, size=rng.integers(1, 15), replace=False) for _ in range(300)]
    truth = np.zeros((300, 40))
    for row, right in enumerate(relevant):
        truth[row, right] = 1
    found = retrieval_scores(queries_ND, passages_MD, relevant)
    scores = (queries_ND @ passages_MD.T).numpy()
    assert found["ndcg@10"] == pytest.approx(ndcg_score(truth, scores, k=10), abs=1e-6)
    order = np.argsort(-scores, axis=1)[:, :10]
    hits = np.take_along_axis(truth, order, 1)
    recall = np.mean([hit.sum() / min(10, len(right)) for hit, right in zip(hits, relevant, strict=True)])
    assert found["recall@10"] == pytest.approx(recall)
    assert found["mrr@10"] == pytest.approx(np.mean([1 / (hit.argmax() + 1) if hit.any() else 0 for hit in hits]))


def test_fewer_passages_than_ten() -> None:
    assert retrieval_scores(torch.eye(3), torch.eye(3), [np.array([0]), np.array([1]), np.array([2])]) == {
        "mrr@10": 1.0,
        "ndcg@10": 1.0,
        "recall@10": 1.0,
    }
