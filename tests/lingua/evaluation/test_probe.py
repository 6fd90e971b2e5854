"""Probes against scikit-learn on the same features, and the traps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from lingua.errors import UserError
from lingua.evaluation.probe import ProbeArgs, check_finite, knn_predictions, majority, probe, ridge_predictions
from lingua.evaluation.samples import held_out, sample_rows
from tests.clusters import clusters


def test_ridge_labels_equal_scikit_learns_argmax() -> None:
    x, y = clusters(200, 10, 5, seed=3)
    x_test, _ = clusters(100, 10, 5, seed=4)
    args = ProbeArgs()
    for setting, ours in ridge_predictions(torch.from_numpy(x).double(), y, torch.from_numpy(x_test).double(), args):
        reference = Ridge(alpha=setting["lambda"], fit_intercept=False).fit(x.astype(np.float64), np.eye(5)[y])
        assert (ours == reference.predict(x_test.astype(np.float64)).argmax(1)).all()


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_knn_equals_scikit_learn_at_each_k(distance: str) -> None:
    x, y = clusters(300, 8, 4, seed=5)
    x_test, _ = clusters(200, 8, 4, seed=6)
    args = ProbeArgs(distances=[distance])
    metric = {"l2": "euclidean", "cosine": "cosine"}[distance]
    found = list(knn_predictions(torch.from_numpy(x).double(), y, torch.from_numpy(x_test).double(), args))
    assert [setting["k"] for setting, _ in found] == [1, 3, 10, 30]
    for setting, ours in found:
        reference = KNeighborsClassifier(setting["k"], metric=metric, algorithm="brute").fit(x, y)
        assert (ours == reference.predict(x_test)).all(), setting
    heights = x[:, 0].astype(np.float64)
    for setting, ours in knn_predictions(
        torch.from_numpy(x).double(), heights, torch.from_numpy(x_test).double(), args
    ):
        reference = KNeighborsRegressor(setting["k"], metric=metric, algorithm="brute").fit(x, heights)
        np.testing.assert_allclose(ours, reference.predict(x_test), rtol=1e-9)


def test_a_tie_in_votes_goes_to_the_lowest_label() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    y = np.array([2, 0, 1])
    ((_, ours),) = knn_predictions(x, y, torch.tensor([[0.1]]).double(), ProbeArgs(neighbours=[3], distances=["l2"]))
    assert ours.tolist() == [0]
    reference = KNeighborsClassifier(3).fit(x.numpy(), y)
    assert reference.predict([[0.1]]).tolist() == [0]


def test_k_above_the_number_of_rows_is_left_out() -> None:
    x, y = clusters(10, 3, 2, seed=7)
    result = probe(x, y, x, y, ProbeArgs(kinds=["knn"]), "accuracy")["knn"]
    assert sorted({entry["k"] for entry in result["grid"]}) == [1, 3, 10]
    assert result["honest"]["k"] <= 8  # two of the ten rows are held out
    with pytest.raises(UserError, match="none is within the 10 training rows less those held out"):
        probe(x, y, x, y, ProbeArgs(kinds=["knn"], neighbours=[30]), "accuracy")


def test_a_class_missing_from_the_training_rows_is_never_predicted() -> None:
    # Class 0 does not occur, and where all targets seen are predicted negative its zero would win.
    x, y = np.array([[1.0], [2.0]]), np.array([1, 2])
    for _, ours in ridge_predictions(torch.from_numpy(x), y, torch.tensor([[-5.0], [4.0]]).double(), ProbeArgs()):
        assert set(ours.tolist()) <= {1, 2}
    result = probe(x, y, np.array([[3.0], [4.0]]), np.array([0, 2]), ProbeArgs(kinds=["ridge"]), "accuracy")
    assert result["ridge"]["paper"]["accuracy"] == 0.5


def test_constant_features_change_nothing_when_standardized() -> None:
    x, y = clusters(80, 5, 3, seed=8)
    with_constant = np.concatenate([x, np.full((80, 1), 0.1, dtype=np.float32)], axis=1)
    args = ProbeArgs(kinds=["ridge"], standardize=True, intercept=True)
    plain, constant = (probe(v, y, v, y, args, "accuracy")["ridge"] for v in (x, with_constant))
    assert plain == constant
    only_constant = probe(np.ones((80, 2)), y, np.ones((80, 2)), y, args, "accuracy")["ridge"]
    assert only_constant["paper"]["accuracy"] == majority(y, y)["accuracy"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_features_are_refused_with_their_row(value: float) -> None:
    x, y = clusters(20, 3, 2, seed=9)
    broken = x.copy()
    broken[7, 1] = value
    with pytest.raises(UserError, match=r"training rows: NaN or infinity in 1 of 20 rows, the first is row 7"):
        probe(broken, y, x, y, ProbeArgs(), "accuracy")
    with pytest.raises(UserError, match="test rows"):
        probe(x, y, broken, y, ProbeArgs(), "accuracy")
    with pytest.raises(UserError, match="targets of the training rows"):
        probe(x, np.where(np.arange(20) == 3, value, 1.0), x, y * 1.0, ProbeArgs(), "spearman")
    check_finite(x, "features")


def test_lengths_that_differ_and_too_few_rows_are_refused() -> None:
    x, y = clusters(20, 3, 2, seed=9)
    with pytest.raises(UserError, match="20 rows of features and 19 targets"):
        probe(x, y[:19], x, y, ProbeArgs(), "accuracy")
    with pytest.raises(UserError, match="at least 2"):
        probe(x[:1], y[:1], x, y, ProbeArgs(), "accuracy")


def test_the_two_scores() -> None:
    """``paper`` is the best of the grid; ``honest`` is the setting that held-out training rows choose."""
    x, y = clusters(60, 20, 3, seed=10)
    x_test, y_test = clusters(200, 20, 3, seed=11)
    args = ProbeArgs(seed=3, lambda_max=1e6)
    result = probe(x, y, x_test, y_test, args, "accuracy")
    assert set(result) == {"ridge", "knn"}
    held = held_out(np.arange(60), 0.2, seed=3)
    assert held.sum() == 12

    def scores(fit: np.ndarray, on: np.ndarray, on_y: np.ndarray, fit_y: np.ndarray) -> list[float]:
        ridges = [Ridge(alpha=a, fit_intercept=False).fit(fit, np.eye(3)[fit_y]) for a in args.penalties()]
        return [float((ridge.predict(on).argmax(1) == on_y).mean()) for ridge in ridges]

    on_test = scores(x, x_test, y_test, y)
    on_held = scores(x[~held], x[held], y[held], y[~held])
    assert [entry["accuracy"] for entry in result["ridge"]["grid"]] == on_test
    assert result["ridge"]["paper"]["accuracy"] == max(on_test)
    choice = int(np.argmax(on_held))
    assert result["ridge"]["honest"]["accuracy"] == on_test[choice]
    assert result["ridge"]["honest"]["lambda"] == args.penalties()[choice]
    assert result["ridge"]["honest"]["held_out_score"] == on_held[choice]
    assert max(on_test) != on_test[choice]  # the case tells the two apart
    assert probe(x, y, x_test, y_test, args, "accuracy") == result


def test_regression_targets_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(12)
    x = rng.normal(size=(100, 6))
    y = x @ rng.normal(size=6) + 0.1 * rng.normal(size=100)
    result = probe(x[:70], y[:70], x[70:], y[70:], ProbeArgs(), "pearson")
    reference = Ridge(alpha=1.0, fit_intercept=False).fit(x[:70], y[:70]).predict(x[70:])
    assert result["ridge"]["grid"][0]["pearson"] == pytest.approx(np.corrcoef(reference, y[70:])[0, 1])
    assert result["ridge"]["honest"]["spearman"] > 0.95
    assert majority(y[:70], y[70:]) == {"spearman": 0.0, "pearson": 0.0}


def test_paper_and_honest_take_a_sample_and_full_takes_all() -> None:
    """Every number against scikit-learn on the rows that each score says it uses."""
    x, y = clusters(300, 20, 3, seed=13)
    x_test, y_test = clusters(150, 20, 3, seed=14)
    args = ProbeArgs(kinds=["ridge"], max_samples=100, samples=3, sample_seeds=[5, 6], seed=3)
    result = probe(x, y, x_test, y_test, args, "accuracy")["ridge"]

    def grid(rows: np.ndarray, on: np.ndarray, on_y: np.ndarray) -> list[float]:
        classes = np.unique(y[rows])
        targets = np.eye(3)[y[rows]][:, classes]
        ridges = [Ridge(alpha=a, fit_intercept=False).fit(x[rows], targets) for a in args.penalties()]
        return [float((classes[ridge.predict(on).reshape(len(on), -1).argmax(1)] == on_y).mean()) for ridge in ridges]

    def honest(rows: np.ndarray) -> float:
        held = held_out(rows, 0.2, seed=3)
        choice = int(np.argmax(grid(rows[~held], x[rows[held]], y[rows[held]])))
        return grid(rows, x_test, y_test)[choice]

    groups, everything = np.arange(300), np.arange(300)
    rows = sample_rows(groups, 100, 5)
    assert len(rows) == 100
    assert result["paper"]["accuracy"] == max(grid(rows, x_test, y_test))
    assert result["honest"]["accuracy"] == honest(rows)
    assert result["full"]["accuracy"] == honest(everything)
    assert result["full"]["accuracy"] != result["honest"]["accuracy"]
    told = [(sample["size"], sample["seed"], sample["rows"]) for sample in result["samples"]]
    assert told == [(1, 5, 1), (1, 6, 1), (10, 5, 10), (10, 6, 10), (100, 5, 100)]
    for sample in result["samples"]:
        few = sample_rows(groups, sample["size"], sample["seed"])
        assert sample["paper"]["accuracy"] == max(grid(few, x_test, y_test))
        if sample["size"] == 1:
            assert sample["honest"] is None
        else:
            assert sample["honest"]["accuracy"] == honest(few)
    off = ProbeArgs(kinds=["ridge"], max_samples=100, samples=1, sample_seeds=[5], seed=3, full=False)
    alone = probe(x, y, x_test, y_test, off, "accuracy")["ridge"]
    assert alone["full"] is None
    assert (alone["paper"], alone["honest"], len(alone["samples"])) == (result["paper"], result["honest"], 1)


def test_few_rows_give_one_sample_and_the_same_full_score() -> None:
    x, y = clusters(30, 5, 2, seed=15)
    result = probe(x, y, x, y, ProbeArgs(sample_seeds=[0, 1]), "accuracy")
    for found in result.values():
        assert found["full"] == found["honest"]
        assert [sample["rows"] for sample in found["samples"]] == [1, 1, 10, 10, 30]
    assert {entry["k"] for entry in result["knn"]["grid"]} == {1, 3, 10, 30}
    assert result["knn"]["samples"][0]["paper"]["k"] == 1
    # k of 10 fits ten rows, but not the eight that are left when two are held out
    only = probe(x, y, x, y, ProbeArgs(kinds=["knn"], neighbours=[10]), "accuracy")["knn"]
    assert only["samples"][1]["paper"]["k"] == 10
    assert only["samples"][1]["honest"] is None
    assert only["samples"][0]["paper"] is None


def test_a_sample_of_one_class_predicts_that_class() -> None:
    x, y = clusters(200, 5, 4, seed=16)
    result = probe(x, y, x, y, ProbeArgs(samples=5), "accuracy")
    first = result["ridge"]["samples"][0]
    only = y[sample_rows(np.arange(200), 1, 0)][0]
    assert first["paper"]["accuracy"] == (y == only).mean()
    assert result["knn"]["samples"][0]["paper"]["accuracy"] == (y == only).mean()


def test_binary_tasks_also_have_f1() -> None:
    x, y = clusters(100, 5, 2, seed=17)
    entry = probe(x, y, x, y, ProbeArgs(kinds=["ridge"]), "f1")["ridge"]["paper"]
    assert set(entry) == {"lambda", "accuracy", "macro_f1", "matthews", "f1"}
    best = max(probe(x, y, x, y, ProbeArgs(kinds=["ridge"]), "accuracy")["ridge"]["grid"], key=lambda e: e["f1"])
    assert entry["f1"] == best["f1"]


def test_half_precision_features_are_taken() -> None:
    x, y = clusters(60, 8, 2, seed=18)
    half = x.astype(np.float16)
    args = ProbeArgs(samples=1)
    found = [probe(v, y, v, y, args, "accuracy") for v in (half, half.astype(np.float64))]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kinds": ["rigde"]}, r"probe.kinds=\['rigde'\]: expected some of ridge, knn, attentive"),
        ({"kinds": []}, "probe.kinds"),
        ({"kinds": ["knn", "knn"]}, "probe.kinds=.* each once"),
        ({"lambda_min": 0.0}, "probe.lambda_min=0.0: expected a penalty above 0"),
        ({"lambda_max": 0.5}, "probe.lambda_max=0.5"),
        ({"lambda_max": np.inf}, "probe.lambda_max=inf: expected a finite penalty"),
        ({"lambdas": 0}, "probe.lambdas=0"),
        ({"neighbours": [0, 1]}, "probe.neighbours"),
        ({"distances": ["l1"]}, "probe.distances"),
        ({"held_out": 1.0}, "probe.held_out=1.0"),
        ({"max_samples": 1}, "probe.max_samples=1: expected at least 2"),
        ({"samples": 0}, "probe.samples=0"),
        ({"sample_seeds": []}, "probe.sample_seeds"),
    ],
)
def test_impossible_settings_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProbeArgs(**bad)
