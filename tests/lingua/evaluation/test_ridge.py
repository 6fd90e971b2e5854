"""Ridge against scikit-learn at every setting, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lingua.evaluation import ridge as ridge_module
from lingua.evaluation.probe import ProbeArgs
from lingua.evaluation.ridge import RidgePath
from tests.clusters import clusters


@pytest.mark.parametrize("n", [12, 40, 300], ids=["n<d", "n=d", "n>d"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("standardize", [False, True])
def test_ridge_equals_scikit_learn_at_each_penalty(n: int, intercept: bool, standardize: bool) -> None:
    x, y = clusters(n, 40, 3, seed=0)
    x_test, _ = clusters(50, 40, 3, seed=1)
    targets = np.eye(3)[y]
    args = ProbeArgs(intercept=intercept, standardize=standardize)
    path = RidgePath(
        *(torch.from_numpy(v).double() for v in (x, targets)), intercept=intercept, standardize=standardize
    )
    assert len(args.penalties()) == 9
    predicted = path.predict(torch.from_numpy(x_test).double(), args.penalties())
    for penalty, ours in zip(args.penalties(), predicted, strict=True):
        ridge = Ridge(alpha=penalty, fit_intercept=intercept, solver="svd")
        reference = make_pipeline(StandardScaler(), ridge) if standardize else ridge
        theirs = reference.fit(x.astype(np.float64), targets).predict(x_test.astype(np.float64))
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-7, atol=1e-9)


def test_ridge_is_equation_3() -> None:
    x, y = clusters(100, 7, 4, seed=2)
    x, targets, penalty = x.astype(np.float64), np.eye(4)[y], 31.0
    weights = np.linalg.inv(x.T @ x + penalty * np.eye(7)) @ x.T @ targets
    path = RidgePath(torch.from_numpy(x), torch.from_numpy(targets))
    (ours,) = path.predict(torch.eye(7, dtype=torch.float64), [penalty])
    np.testing.assert_allclose(ours.numpy(), weights, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("standardize", [False, True])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, standardize: bool) -> None:
    x, y = clusters(300, 20, 3, seed=19)
    values = torch.from_numpy(x), torch.from_numpy(np.eye(3)[y])
    whole = RidgePath(*values, intercept=True, standardize=standardize).weights(10.0)
    monkeypatch.setattr(ridge_module, "CHUNK_ROWS", 7)
    parts = RidgePath(*values, intercept=True, standardize=standardize).weights(10.0)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)


def test_float32_features_are_computed_on_in_float64() -> None:
    x, y = clusters(200, 30, 2, seed=20)
    x += 1000.0  # squares that float32 would round by more than what tells the classes apart
    path = RidgePath(torch.from_numpy(x), torch.from_numpy(np.eye(2)[y]), intercept=True)
    reference = Ridge(alpha=1.0, solver="svd").fit(x.astype(np.float64), np.eye(2)[y])
    np.testing.assert_allclose(path.weights(1.0).T.numpy(), reference.coef_, rtol=1e-6, atol=1e-9)
