"""Rotary positions by hand, and their scaling against what ``transformers`` computes."""

from __future__ import annotations

from dataclasses import asdict
from math import inf, nan

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lingua.errors import UserError
from lingua.predictor import Predictor, PredictorArgs
from lingua.rotary import RopeScaling, apply_rotary, rotary_angles, rotary_frequencies
from lingua.transformer import Encoder, TransformerArgs, init_weights

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 50, "init_std": 0.2}


def test_angles_by_hand() -> None:
    # Position 3, head size 4, theta 100: angles 3 and 3 / 10, turning channel pairs (0, 2) and (1, 3).
    cos, sin = rotary_angles(torch.tensor([3]), 4, 100.0)
    turned = apply_rotary(torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4), cos, sin).flatten()
    c, s = torch.tensor([3.0, 0.3]).cos(), torch.tensor([3.0, 0.3]).sin()
    expected = torch.stack((c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + s[0], 4 * c[1] + 2 * s[1]))
    torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize(
    ("head_dim", "theta", "scaling"),
    [
        (128, 500000.0, RopeScaling(factor=8.0)),  # Llama 3.1 8B
        (64, 500000.0, RopeScaling(factor=32.0)),  # Llama 3.2 1B
        (16, 100.0, RopeScaling(3.0, 0.5, 2.5, 40)),
        (16, 100.0, RopeScaling(8.0, original_max_position_embeddings=1)),  # all slow
        (16, 100.0, RopeScaling(8.0, original_max_position_embeddings=10**6)),  # none
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(head_dim: int, theta: float, scaling: RopeScaling) -> None:
    rope = {"rope_type": "llama3", "rope_theta": theta, **asdict(scaling)}
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=10**7, rope_parameters=rope)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config)
    assert factor == 1.0
    torch.testing.assert_close(rotary_frequencies(head_dim, theta, scaling), expected, rtol=1e-6, atol=0)


def test_scaling_is_off_bit_by_bit_unless_asked_for() -> None:
    plain = rotary_frequencies(64, 1e4)
    assert torch.equal(plain, 1e4 ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    for off in (RopeScaling(), RopeScaling(1.0, 2.0, 3.0, 5), TransformerArgs().rope_scaling):
        assert torch.equal(rotary_frequencies(64, 1e4, off), plain)
    assert not torch.equal(rotary_frequencies(64, 1e4, RopeScaling(2.0)), plain)


@torch.no_grad()
def test_encoder_and_predictor_are_scaled_alike() -> None:
    """Where all channels turn 4 times slower, positions 4 times as far apart are the same positions."""
    slow = RopeScaling(4.0, original_max_position_embeddings=1)
    found = {}
    for scaling, step in ((RopeScaling(), 1), (slow, 4), (slow, 1)):
        args = TransformerArgs(**SHAPE, rope_scaling=scaling)
        model = torch.nn.ModuleDict({"encoder": Encoder(args), "predictor": Predictor(PredictorArgs(n_layers=1), args)})
        init_weights(model, args, seed=0)
        tokens_BT, visible_BT, hidden_BM = torch.tensor([[7, 8, 9]]), torch.tensor([[0, 5, 9]]), torch.tensor([[2, 6]])
        states = model["encoder"](tokens_BT, step * visible_BT)
        same = found.setdefault("states", torch.randn(states.shape))  # the predictor by itself
        found[step, scaling.is_on] = states, model["predictor"](same, step * visible_BT, step * hidden_BM)
    for plain, scaled, other in zip(found[1, False], found[4, True], found[1, True], strict=True):
        torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-5)
        assert (other - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"factor": bad}, rf"model\.rope_scaling\.factor={bad}: expected a finite") for bad in (0.5, -8.0, inf, nan)),
        *(({"low_freq_factor": bad}, rf"low_freq_factor={bad}: expected") for bad in (0.0, -1.0, nan)),
        *(({"high_freq_factor": bad}, rf"{bad}: .* above low_freq_factor=1\.0") for bad in (1.0, 0.5, inf, nan)),
        ({"original_max_position_embeddings": 0}, r"original_max_position_embeddings=0: expected at least 1"),
    ],
)
def test_impossible_scalings_are_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RopeScaling(**values)
