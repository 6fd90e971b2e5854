"""The pooler against the predictor it starts from, and against a plain loop over texts without padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lingua.errors import UserError
from lingua.pooler import Pooler, PoolerArgs
from lingua.predictor import Predictor, PredictorArgs
from lingua.transformer import Encoder, TransformerArgs, init_weights

SHAPE = TransformerArgs(dim=16, n_layers=2, n_heads=2, vocab_size=50, init_std=0.3)
SHAPES = {
    "plain": PredictorArgs(n_layers=2),
    "narrow": PredictorArgs(n_layers=2, dim=8),
    "switches": PredictorArgs(n_layers=2, self_attention=True, mix_layers=True),
}
TOKENS_BS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
REAL_BS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    init_weights(module, SHAPE, seed)
    if getattr(module, "mix", None) is not None:
        with torch.no_grad():
            for mix in module.mix:
                mix.normal_(generator=torch.Generator().manual_seed(seed))
    return module.eval()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("position", "n_layers"), [(0, -1), (7, -1), (7, 1)])
def test_a_warm_start_is_the_predictor_at_the_query_position(name: str, position: int, n_layers: int) -> None:
    """After its final norm, and ``out`` where widths differ; each text alone, without padding."""
    encoder, predictor = filled(Encoder(SHAPE)), filled(Predictor(SHAPES[name], SHAPE), 1)
    pooler = Pooler(PoolerArgs(warm_start=True, position=position, n_layers=n_layers), SHAPE, SHAPES[name]).eval()
    pooler.load_state_dict(pooler.warm_start(predictor.state_dict()))
    predictor.layers = predictor.layers[: None if n_layers == -1 else n_layers]
    predictor.mix = predictor.mix and predictor.mix[: len(predictor.layers)]
    with torch.no_grad():
        mask = REAL_BS[:, None, None, :]
        found_BD = pooler(pooler.read(encoder, TOKENS_BS, mask), REAL_BS)
        for row, length in enumerate((5, 3)):
            tokens, places = TOKENS_BS[row : row + 1, :length], torch.arange(length)[None]
            expected_BMD = predictor(predictor.read(encoder, tokens, places), places, torch.tensor([[position]]))
            torch.testing.assert_close(found_BD[row], expected_BMD[0, 0], atol=1e-5, rtol=0)
    assert (found_BD[0] - found_BD[1]).abs().max() > 0.01


def test_queries_start_as_copies_told_apart_by_position_and_are_averaged() -> None:
    encoder, predictor = filled(Encoder(SHAPE)), filled(Predictor(SHAPES["plain"], SHAPE), 1)
    pooler = Pooler(PoolerArgs(warm_start=True, n_queries=3, position=4), SHAPE, SHAPES["plain"]).eval()
    pooler.load_state_dict(pooler.warm_start(predictor.state_dict()))
    tokens, places = TOKENS_BS[:1], torch.arange(5)[None]
    with torch.no_grad():
        expected_BMD = predictor(encoder(tokens), places, torch.tensor([[4, 5, 6]]))
        found_BD = pooler(encoder(tokens), REAL_BS[:1])
    torch.testing.assert_close(found_BD, expected_BMD.mean(1), atol=1e-5, rtol=0)
    assert (expected_BMD[0, 0] - expected_BMD[0, 1]).abs().max() > 1e-3


def test_a_cold_pooler_has_the_predictors_shape_and_a_bert_gets_two_blocks() -> None:
    cold = Pooler(PoolerArgs(), SHAPE, SHAPES["narrow"])
    assert [tuple(p.shape) for p in cold.predictor.parameters()][1:] == [
        tuple(p.shape) for p in Predictor(SHAPES["narrow"], SHAPE).parameters()
    ][1:]
    assert len(Pooler(PoolerArgs(), SHAPE).predictor.layers) == 2
    assert len(Pooler(PoolerArgs(n_layers=3), SHAPE, SHAPES["plain"]).predictor.layers) == 3


@pytest.mark.parametrize("kind", ["mean", "first", "last", "max"])
def test_plain_poolings_have_no_weights_and_leave_padding_out(kind: str) -> None:
    x_BSD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    pooler = Pooler(PoolerArgs(kind))
    assert not list(pooler.parameters())
    alone = {"mean": x_BSD[1, :3].mean(0), "first": x_BSD[1, 0], "last": x_BSD[1, 2], "max": x_BSD[1, :3].amax(0)}
    torch.testing.assert_close(pooler(x_BSD, REAL_BS)[1], alone[kind])


def test_impossible_poolers_are_named() -> None:
    with pytest.raises(UserError, match=r"warm_start=true needs a CrossBERT"):
        Pooler(PoolerArgs(warm_start=True), SHAPE)
    with pytest.raises(UserError, match=r"n_layers=3: the predictor has 2 blocks"):
        Pooler(PoolerArgs(warm_start=True, n_layers=3), SHAPE, SHAPES["plain"])
    bad = ({"kind": "median"}, {"n_queries": 0}, {"n_layers": 0}, {"kind": "mean", "warm_start": True})
    for change in (*bad, {"position": -1}):
        with pytest.raises(UserError, match=rf"pooler\.{list(change)[-1]}="):
            replace(PoolerArgs(), **change)
