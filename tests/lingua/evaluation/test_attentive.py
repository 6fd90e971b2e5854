"""The attentive probe: what it computes, that it finds what a mean hides, and its traps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lingua.errors import UserError
from lingua.evaluation.attentive import AttentiveArgs, AttentiveProbe, TokenStates, attentive_predictions
from lingua.evaluation.probe import ProbeArgs, majority, probe


def hidden_in_one_token(n: int, seed: int) -> tuple[TokenStates, np.ndarray, np.ndarray]:
    """Texts of 5 to 40 tokens: one token, marked by channel 0, says the class; the others say random classes.
    Also the texts' means."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 41, size=n)
    bounds = np.cumsum([0, *lengths])
    x = 0.1 * rng.normal(size=(bounds[-1], 8)).astype(np.float32)
    y = rng.integers(2, size=n)
    said = rng.integers(2, size=bounds[-1])
    for i in range(n):
        marked = bounds[i] + rng.integers(lengths[i])
        x[marked, 0] += 3.0
        said[marked] = y[i]
    x[np.arange(len(x)), 1 + said] += 1.0
    means = np.stack([x[bounds[i] : bounds[i + 1]].mean(0) for i in range(n)])
    return TokenStates(x, bounds), y, means


def test_it_finds_what_the_mean_hides() -> None:
    train, y, means = hidden_in_one_token(400, seed=0)
    test, y_test, test_means = hidden_in_one_token(200, seed=1)
    args = ProbeArgs(kinds=["attentive"], samples=1, attentive=AttentiveArgs(learning_rates=[1e-3, 3e-2], epochs=12))
    found = probe(train, y, test, y_test, args, "accuracy")["attentive"]
    assert found["honest"]["accuracy"] > 0.9
    assert found["honest"]["learning_rate"] == 3e-2
    linear = probe(means, y, test_means, y_test, ProbeArgs(kinds=["ridge"]), "accuracy")["ridge"]
    assert linear["paper"]["accuracy"] < 0.8
    assert probe(train, y, test, y_test, args, "accuracy")["attentive"] == found


def test_it_is_the_softmax_weighted_mean_without_padding() -> None:
    torch.manual_seed(0)
    mean, deviation = torch.randn(6), torch.rand(6) + 0.5
    module = AttentiveProbe(mean, deviation, 3)
    torch.nn.init.normal_(module.query_D)
    torch.nn.init.normal_(module.out.weight)
    texts = [torch.randn(4, 6), torch.randn(2, 6)]
    x = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=99.0)
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    for i, text in enumerate(texts):
        z = (text - mean) / deviation
        weights = torch.exp(z @ module.query_D / 6**0.5)
        expected = module.out((weights[:, None] * z).sum(0) / weights.sum())
        torch.testing.assert_close(module(x, real)[i], expected)


def test_rows_and_masks_pick_texts() -> None:
    texts, _, _ = hidden_in_one_token(10, seed=2)
    some = texts[np.array([7, 2])]
    assert len(some) == 2
    x, real = some.batch([1], "cpu")
    np.testing.assert_array_equal(x[0].numpy(), texts.states_TD[texts.bounds[2] : texts.bounds[3]])
    assert real.all()
    assert texts[np.arange(10) % 2 == 0][np.array([1])].rows.tolist() == [2]


def test_regression_predicts_in_the_targets_units() -> None:
    train, y, _ = hidden_in_one_token(300, seed=3)
    args = AttentiveArgs(learning_rates=[3e-2], epochs=60)
    ((_, predicted),) = attentive_predictions(train, 100.0 + 10.0 * y, train, args, 0, "cpu")
    assert abs(predicted[y == 0].mean() - 100) < 1.5
    assert abs(predicted[y == 1].mean() - 110) < 1.5
    ((_, constant),) = attentive_predictions(train, np.full(300, 7.0), train, args, 0, "cpu")
    np.testing.assert_allclose(constant, 7.0, atol=1e-3)


def test_constant_channels_and_a_missing_class_do_no_harm() -> None:
    train, y, _ = hidden_in_one_token(60, seed=4)
    train.states_TD[:, 5:] = 0.3
    args = ProbeArgs(kinds=["attentive"], samples=1, attentive=AttentiveArgs(learning_rates=[1e-2], epochs=1))
    labels = np.where(y == 0, 0, 2)
    found = probe(train, labels, train, labels, args, "accuracy")["attentive"]["paper"]
    assert found["accuracy"] >= majority(labels, labels)["accuracy"] - 0.2
    ((_, predicted),) = attentive_predictions(train, labels, train, args.attentive, 0, "cpu")
    assert set(predicted) <= {0, 2}


def test_divergence_and_impossible_settings_are_refused() -> None:
    train, y, _ = hidden_in_one_token(20, seed=5)
    train.states_TD[3, 3] = np.inf
    with pytest.raises(UserError, match=r"training diverged at 0.01"):
        list(attentive_predictions(train, y, train, AttentiveArgs(learning_rates=[0.01], epochs=1), 0, "cpu"))
    for bad, message in (
        ({"learning_rates": []}, "probe.attentive.learning_rates"),
        ({"epochs": 0}, "probe.attentive.epochs=0"),
        ({"batch_rows": 0}, "probe.attentive.batch_rows=0"),
        ({"weight_decay": -1.0}, "probe.attentive.weight_decay"),
    ):
        with pytest.raises(UserError, match=message):
            AttentiveArgs(**bad)
