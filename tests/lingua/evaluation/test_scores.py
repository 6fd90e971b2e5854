"""Every score against scikit-learn or SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from lingua.evaluation.scores import accuracy, all_metrics, f1, kind_of, macro_f1, matthews, pearson, spearman


@pytest.mark.parametrize("classes", [2, 5])
def test_classification_scores_equal_scikit_learns(classes: int) -> None:
    rng = np.random.default_rng(classes)
    target = rng.integers(classes, size=200)
    predicted = np.where(rng.random(200) < 0.6, target, rng.integers(classes, size=200))
    predicted[:3] = classes + 4  # a class that never is right, and numbers with a gap
    assert accuracy(target, predicted) == metrics.accuracy_score(target, predicted)
    assert macro_f1(target, predicted) == pytest.approx(metrics.f1_score(target, predicted, average="macro"))
    assert matthews(target, predicted) == pytest.approx(metrics.matthews_corrcoef(target, predicted))


def test_f1_is_that_of_class_1() -> None:
    rng = np.random.default_rng(3)
    target, predicted = rng.integers(2, size=100), rng.integers(2, size=100)
    assert f1(target, predicted) == pytest.approx(metrics.f1_score(target, predicted))
    assert f1(np.zeros(3, dtype=int), np.zeros(3, dtype=int)) == 0.0


def test_kinds() -> None:
    assert kind_of(np.array([0, 1]), np.array([0])) == "binary"
    assert kind_of(np.array([0, 1]), np.array([2])) == "classification"
    assert kind_of(np.array([0.0, 1.0])) == "regression"


def test_correlations_equal_scipys_with_ties() -> None:
    rng = np.random.default_rng(0)
    target = rng.integers(6, size=150) / 2.0
    predicted = np.round(target + rng.normal(size=150), 1)
    assert pearson(target, predicted) == pytest.approx(stats.pearsonr(target, predicted).statistic)
    assert spearman(target, predicted) == pytest.approx(stats.spearmanr(target, predicted).statistic)


def test_undefined_correlations_are_zero() -> None:
    constant, varied = np.full(4, 0.1), np.array([1.0, 2.0, 3.0, 4.0])
    assert pearson(varied, constant) == 0.0
    assert spearman(constant, varied) == 0.0
    assert matthews(np.array([0, 1, 1]), np.array([1, 1, 1])) == 0.0
    assert metrics.matthews_corrcoef([0, 1, 1], [1, 1, 1]) == 0.0
    assert macro_f1(np.array([0, 0]), np.array([0, 0])) == 1.0


def test_all_metrics_by_kind() -> None:
    assert all_metrics(np.array([0, 1]), np.array([0, 1]), "classification") == {
        "accuracy": 1.0,
        "macro_f1": 1.0,
        "matthews": 1.0,
    }
    assert set(all_metrics(np.array([0.0, 1.0]), np.array([0.5, 1.0]), "regression")) == {
        "spearman",
        "pearson",
    }
