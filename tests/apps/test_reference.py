"""Encoder, predictor and loss against plain float64 loops over positions and heads that share only the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.masking import View
from lingua.predictor import PredictorArgs

SHAPE = {"dim": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "init_std": 0.3}
SHAPE |= {"norm_eps": 0.02, "rope_theta": 50.0}  # not the defaults
SPECIAL = (0, 2)
VISIBLE = torch.tensor([[1, 2, 5, 11, 17], [0, 3, 4, 9, 18]])
HIDDEN = torch.tensor([[0, 7, 8, 16], [1, 6, 12, 19]])
# The library's rotary angles are float32, these float64: the angles are below 20, so they differ by 1e-6.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
Weights = dict[str, np.ndarray]


def tokens() -> torch.Tensor:
    ids = torch.randint(0, 40, (2, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 7] = 2  # a special token among the hidden ones
    return ids


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """In float64, with norm weights that are not all one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.empty_like(parameter).normal_(std=0.3, generator=generator)
    return model.double().eval()


def under(model: torch.nn.Module, prefix: str) -> Weights:
    """Weights whose names start with ``prefix``, without it."""
    named = model.state_dict().items()
    return {name.removeprefix(prefix): w.numpy() for name, w in named if name.startswith(prefix)}


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(sum(value**2 for value in x) / len(x) + SHAPE["norm_eps"])


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    """Channels k and k + K/2 are one complex number, turned by the angle of pair k."""
    half = len(x) // 2
    angles = [position * SHAPE["rope_theta"] ** (-2 * k / len(x)) for k in range(half)]
    turned = [complex(x[k], x[k + half]) * np.exp(1j * angle) for k, angle in enumerate(angles)]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def attend(
    x: list, source: list, positions: list[int], source_positions: list[int], n_heads: int,
    wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, wo: np.ndarray,
) -> list:  # fmt: skip
    size, out = len(wq) // n_heads, []
    for query, position in zip(x, positions, strict=True):
        heads = []
        for head in range(n_heads):
            rows = slice(head * size, (head + 1) * size)
            q = rotate(wq[rows] @ query, position)
            keys = [rotate(wk[rows] @ s, p) for s, p in zip(source, source_positions, strict=True)]
            strengths = [np.exp(q @ key / size**0.5) for key in keys]
            values = [strength * (wv[rows] @ s) for strength, s in zip(strengths, source, strict=True)]
            heads.append(sum(values) / sum(strengths))
        out.append(wo @ np.concatenate(heads))
    return out


def feed_forward(x: np.ndarray, w: Weights) -> np.ndarray:
    gate, up = np.split(w["ffn.w13.weight"] @ x, 2)
    return w["ffn.w2.weight"] @ (gate / (1 + np.exp(-gate)) * up)


def encoder(model: torch.nn.Module, ids: list[int], positions: list[int]) -> list:
    """States of one row."""
    table = under(model, "encoder.embedding.")["weight"]
    x = [table[i] for i in ids]
    for layer in range(SHAPE["n_layers"]):
        w = under(model, f"encoder.layers.{layer}.")
        normed = [rms_norm(state, w["attention_norm.weight"]) for state in x]
        wq, wk, wv = np.split(w["attention.wqkv.weight"], 3)
        wo = w["attention.wo.weight"]
        brought = attend(normed, normed, positions, positions, SHAPE["n_heads"], wq, wk, wv, wo)
        x = [state + new for state, new in zip(x, brought, strict=True)]
        x = [state + feed_forward(rms_norm(state, w["ffn_norm.weight"]), w) for state in x]
    return [rms_norm(state, under(model, "encoder.norm.")["weight"]) for state in x]


def predictor(model: CrossBert, visible: list, visible_at: list[int], hidden_at: list[int], n_heads: int) -> list:
    """Predicted states of one row, as wide as the encoder's."""
    whole = under(model, "predictor.")
    x = [whole["mask_vector"]] * len(hidden_at)
    for layer in range(model.args.predictor.n_layers):
        w = under(model, f"predictor.layers.{layer}.")
        normed = [rms_norm(state, w["attention_norm.weight"]) for state in x]
        wk, wv = np.split(w["attention.wkv.weight"], 2)
        wq, wo = w["attention.wq.weight"], w["attention.wo.weight"]
        brought = attend(normed, visible, hidden_at, visible_at, n_heads, wq, wk, wv, wo)
        x = [state + new for state, new in zip(x, brought, strict=True)]
        x = [state + feed_forward(rms_norm(state, w["ffn_norm.weight"]), w) for state in x]
    x = [rms_norm(state, whole["norm.weight"]) for state in x]
    return [whole["out.weight"] @ state for state in x] if "out.weight" in whole else x


def loss_of(model: torch.nn.Module, states: list, targets: list[int]) -> float:
    """Cross-entropy of one row, summed over the targets that are not special."""
    table, total = under(model, "encoder.embedding.")["weight"], 0.0
    for state, target in zip(states, targets, strict=True):
        if target not in SPECIAL:
            logits = table @ state
            total += np.log(sum(np.exp(logit) for logit in logits)) - logits[target]
    return total


@torch.no_grad()
@pytest.mark.parametrize(
    ("args", "n_heads"), [(PredictorArgs(n_layers=2), 2), (PredictorArgs(dim=24, n_layers=2, n_heads=3), 3)]
)
def test_crossbert_equals_plain_loops_at_scattered_positions(args: PredictorArgs, n_heads: int) -> None:
    model = perturbed(CrossBert(CrossBertArgs(**SHAPE, predictor=args), SPECIAL, seed=3))
    ids = tokens()
    seen = model.encoder(ids.gather(1, VISIBLE), VISIBLE)
    predicted = model.predictor(seen, VISIBLE, HIDDEN)
    loss = 0.0
    for row in range(2):
        at, hidden_at = VISIBLE[row].tolist(), HIDDEN[row].tolist()
        states = encoder(model, ids[row, at].tolist(), at)
        np.testing.assert_allclose(seen[row].numpy(), states, **CLOSE)
        expected = predictor(model, states, at, hidden_at, n_heads)
        np.testing.assert_allclose(predicted[row].numpy(), expected, **CLOSE)
        loss += loss_of(model, expected, ids[row, hidden_at].tolist())
    assert model(ids, View(VISIBLE, HIDDEN)).loss.item() == pytest.approx(loss, rel=1e-5)


@torch.no_grad()
def test_bert_equals_plain_loops() -> None:
    model = perturbed(Bert(BertArgs(**SHAPE), SPECIAL, seed=3))
    ids = tokens()
    loss, found = 0.0, model.encoder(ids)
    for row in range(2):
        states = encoder(model, ids[row].tolist(), list(range(20)))
        np.testing.assert_allclose(found[row].numpy(), states, **CLOSE)
        hidden_at = HIDDEN[row].tolist()
        loss += loss_of(model, [states[position] for position in hidden_at], ids[row, hidden_at].tolist())
    assert model(ids, ids, View(VISIBLE, HIDDEN)).loss.item() == pytest.approx(loss, rel=1e-5)
