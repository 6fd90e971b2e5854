"""Neighbours against sorting all distances: ties, zero vectors, and that tiles and chunks change nothing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from lingua.evaluation.knn import nearest
from tests.support import run_command


def test_nearest_breaks_ties_by_index_and_does_not_depend_on_the_chunks() -> None:
    rng = np.random.default_rng(0)
    half = torch.from_numpy(rng.integers(-1, 2, size=(200, 2)).astype(np.float64))  # nine points, many times
    x = torch.cat([half, -half])  # a mean of exactly 0: any other rounds equal distances apart
    queries = torch.from_numpy(rng.integers(-1, 2, size=(40, 2)).astype(np.float64))
    squared = (queries[:, None] - x[None]).square().sum(-1)
    expected = squared.sort(dim=1, stable=True).indices[:, :30]
    for tile_rows in (1, 37, 1000):
        for chunk_numbers in (1, 1000, 1 << 20):
            assert torch.equal(nearest(x, queries, 30, "l2", tile_rows, chunk_numbers), expected)


def test_zero_vectors_under_cosine_are_at_distance_one() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    queries = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert nearest(x, queries, 3, "cosine").tolist() == [[1, 0, 2], [0, 1, 2]]
    reference = KNeighborsClassifier(1, metric="cosine", algorithm="brute").fit(x.numpy(), [0, 1, 2])
    assert reference.predict(queries.numpy()).tolist() == [1, 0]


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_tiles_change_nothing(distance: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, queries = (torch.randn(n, 6, generator=generator) for n in (500, 60))
    whole = nearest(x, queries, 9, distance)
    assert torch.equal(nearest(x, queries, 9, distance, tile_rows=50, chunk_numbers=333), whole)
    far = torch.cdist(queries.double(), x.double())
    if distance == "cosine":
        normed = [torch.nn.functional.normalize(v.double(), dim=1) for v in (queries, x)]
        far = -normed[0] @ normed[1].T
    assert torch.equal(whole, far.sort(dim=1, stable=True).indices[:, :9])


def test_k_may_be_all_rows() -> None:
    x = torch.tensor([[3.0], [1.0], [2.0]])
    assert nearest(x, torch.tensor([[0.0]]), 3, "l2", tile_rows=2).tolist() == [[1, 2, 0]]


MEMORY = """
import resource, torch
from lingua.evaluation.knn import nearest
from tests.support import run_command
torch.set_num_threads(1)
x, queries = torch.rand(60_000, 8), torch.rand(4_000, 8)
nearest(x[:20_000], queries[:100], 10, "l2")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = nearest(x, queries, 10, "l2")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, found[17].tolist())
assert torch.equal(found[17], (x.double() - queries[17].double()).square().sum(1).sort(stable=True).indices[:10])
"""


def test_all_distances_are_never_in_memory_at_once() -> None:
    """60,000 x 4,000 of them would take 1.9 GB."""
    done = run_command([sys.executable, "-c", MEMORY])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) < 500_000  # KiB
