"""Labelled points for the tests of probes."""

from __future__ import annotations

import numpy as np


def clusters(n: int, d: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping Gaussian clusters away from the origin, features of very different scales."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, d))
    y = rng.integers(classes, size=n)
    x = (centers[y] + 1.5 * rng.normal(size=(n, d)) + 3.0) * np.geomspace(0.1, 10, d)
    return x.astype(np.float32), y
