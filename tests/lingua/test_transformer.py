from __future__ import annotations

from dataclasses import asdict
from math import inf, nan

import pytest
import torch

from apps.bert.model import Bert, BertArgs
from lingua.errors import UserError
from lingua.optim import parameter_groups
from lingua.predictor import PredictorArgs
from lingua.rotary import RopeScaling, apply_rotary, rotary_angles
from lingua.transformer import CrossAttention, Encoder, TransformerArgs, ffn_width, init_weights

SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 211}


def eurobert_like(model: Bert) -> torch.nn.Module:
    """transformers' EuroBertForMaskedLM holding the same weights."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    args = model.args
    config = EuroBertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=ffn_width(args.dim),
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_heads,
        rms_norm_eps=args.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        tie_word_embeddings=True,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 1),
        attn_implementation="sdpa",
    )
    theirs = EuroBertForMaskedLM(config).eval()
    weights = {
        "model.embed_tokens.weight": model.encoder.embedding.weight,
        "model.norm.weight": model.encoder.norm.weight,
    }
    for i, layer in enumerate(model.encoder.layers):
        name = f"model.layers.{i}"
        weights |= dict(
            zip(
                [f"{name}.self_attn.{part}_proj.weight" for part in "qkv"],
                layer.attention.wqkv.weight.chunk(3),
                strict=True,
            )
        )
        gate, up = layer.ffn.w13.weight.chunk(2)
        weights |= {
            f"{name}.self_attn.o_proj.weight": layer.attention.wo.weight,
            f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up,
            f"{name}.mlp.down_proj.weight": layer.ffn.w2.weight,
            f"{name}.input_layernorm.weight": layer.attention_norm.weight,
            f"{name}.post_attention_layernorm.weight": layer.ffn_norm.weight,
        }
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return theirs


def perturbed_bert() -> Bert:
    """A BERT whose norms and scales are not the initial ones, so that every weight matters."""
    model = Bert(BertArgs(**SHAPE), seed=3).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def test_hidden_states_and_logits_equal_transformers_eurobert() -> None:
    ours = perturbed_bert()
    theirs = eurobert_like(ours)
    tokens = torch.randint(0, 211, (5, 17), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([17, 3, 1, 9, 16])
    real = torch.arange(17) < lengths[:, None]
    out = theirs(input_ids=tokens, attention_mask=real.long(), output_hidden_states=True)
    states = ours.encoder.encode(tokens, lengths, layers=range(4), final_norm=False)
    last = ours.encoder.encode(tokens, lengths)[0]
    # Their last hidden state is after the final norm, the others are not.
    for mine, his in zip([*states[:3], last], out.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], his[real], rtol=0, atol=1e-4)
    logits = last @ ours.encoder.embedding.weight.T
    torch.testing.assert_close(logits[real], out.logits[real], rtol=0, atol=1e-4)
    assert out.logits[real].abs().max() > 1  # not a comparison of zeros


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    encoder = perturbed_bert().encoder
    tokens = torch.randint(0, 211, (1, 9), generator=torch.Generator().manual_seed(0))
    alone = encoder.encode(tokens, torch.tensor([9]))[0]
    padded = torch.cat((tokens, torch.full((1, 6), 7)), dim=1)
    with_padding = encoder.encode(padded, torch.tensor([9]))[0][:, :9]
    torch.testing.assert_close(alone, with_padding, rtol=0, atol=1e-5)


@torch.no_grad()
def test_layers_can_be_asked_in_any_order_and_from_the_end() -> None:
    encoder = perturbed_bert().encoder
    tokens, lengths = torch.arange(12).reshape(2, 6), torch.tensor([6, 6])
    last, embedded, second = encoder.encode(tokens, lengths, layers=(-1, 0, 2))
    torch.testing.assert_close(embedded, encoder.embedding(tokens))
    torch.testing.assert_close(last, encoder(tokens))
    torch.testing.assert_close(second, encoder.encode(tokens, lengths, layers=(-2,))[0])
    raw = encoder.encode(tokens, lengths, layers=(2,), final_norm=False)[0]
    torch.testing.assert_close(second, encoder.norm(raw))
    with pytest.raises(UserError, match=r"layer 4: the encoder has layers 0 .* to 3"):
        encoder.encode(tokens, lengths, layers=(4,))


@torch.no_grad()
def test_cross_attention_equals_plain_loops_in_float64() -> None:
    torch.manual_seed(0)
    layer = CrossAttention(dim=8, n_heads=2, source_dim=12).double()
    x, source = torch.randn(1, 3, 8).double(), torch.randn(1, 5, 12).double()
    at, source_at = torch.tensor([[1, 4, 6]]), torch.tensor([[0, 2, 3, 5, 7]])
    out = layer(x, source, rotary_angles(at, 4, 100.0), rotary_angles(source_at, 4, 100.0))
    key_weight, value_weight = layer.wkv.weight.chunk(2)
    mixed = torch.zeros(3, 8).double()
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)

        def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
            return apply_rotary(vector.view(1, 1, 1, 4), *rotary_angles(torch.tensor([position]), 4, 100.0)).flatten()

        for i in range(3):
            query = turn((layer.wq.weight @ x[0, i])[part], int(at[0, i]))
            keys = [turn((key_weight @ source[0, j])[part], int(source_at[0, j])) for j in range(5)]
            weights = torch.stack([query @ key / 2 for key in keys]).softmax(0)
            mixed[i, part] = sum(w * (value_weight @ source[0, j])[part] for j, w in enumerate(weights))
    torch.testing.assert_close(out[0], mixed @ layer.wo.weight.T, rtol=0, atol=1e-6)  # rotary angles are float32


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    one, two = Encoder(TransformerArgs(**SHAPE)), Encoder(TransformerArgs(**SHAPE | {"n_layers": 5}))
    for model in (one, two):
        init_weights(model, model.args, seed=7)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name))
    assert (one.norm.weight == 1).all()
    assert abs(one.embedding.weight.detach().std().item() - 0.02) < 1e-3
    assert not torch.equal(one.layers[0].ffn.w2.weight, one.layers[1].ffn.w2.weight)
    init_weights(two, two.args, seed=8)
    assert not torch.equal(one.embedding.weight, two.embedding.weight)


def test_biases_start_at_zero_and_an_output_matrix_as_the_embedding_does() -> None:
    args = TransformerArgs(**SHAPE | {"biases": ["qkv", "wo", "ffn"], "tied": False})
    model, plain = Encoder(args), Encoder(TransformerArgs(**SHAPE))
    for encoder in (model, plain):
        init_weights(encoder, encoder.args, seed=7)
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    assert len(biases) == 3 * 4
    assert not any(p.any() for p in biases.values())
    assert model.output_VD.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(model.output_VD, model.embedding.weight)
    assert plain.output_VD is plain.embedding.weight
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    decayed, others = parameter_groups(model, 0.1)
    assert len(decayed["params"]) == 3 * 4
    assert any(p is model.output_VD for p in others["params"])  # the optimizer treats it as the embedding


def test_truncated_and_residual_scaled_initial_weights() -> None:
    args = TransformerArgs(**SHAPE | {"init_std": 0.1, "init_truncate": 2.0, "init_residual": True})
    model = Encoder(args)
    init_weights(model, args, seed=0)
    # A normal cut at two standard deviations has 0.87963 of its standard deviation.
    std = 0.1 * 0.87963
    assert model.embedding.weight.abs().max() <= 0.2
    assert model.embedding.weight.detach().std().item() == pytest.approx(std, rel=0.02)
    for layer in model.layers:
        assert layer.attention.wqkv.weight.detach().std().item() == pytest.approx(std, rel=0.02)
        for output in (layer.attention.wo, layer.ffn.w2):
            assert output.weight.detach().std().item() == pytest.approx(std / 6**0.5, rel=0.03)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dim": 100, "n_heads": 3}, r"model\.dim=100 does not split into model\.n_heads=3"),
        ({"dim": 36, "n_heads": 4}, "gives heads of 9: .*must be even"),
        ({"dim": 0}, r"model\.dim=0: expected at least 1"),
        ({"dim": -64, "n_heads": 2}, r"model\.dim=-64"),
        ({"n_heads": 0}, r"model\.n_heads=0: expected at least 1"),
        ({"ffn_dim": 0}, r"model\.ffn_dim=0: expected at least 1, or -1"),
        ({"n_layers": 0}, r"model\.n_layers=0"),
        ({"n_kv_heads": 5}, r"model\.n_kv_heads=5: expected a divisor of n_heads=12, or -1"),
        ({"n_kv_heads": 0}, r"model\.n_kv_heads=0"),
        ({"head_dim": 7}, r"model\.head_dim=7: expected an even number"),
        ({"head_dim": 0}, r"model\.head_dim=0"),
        ({"biases": ["qkv", "w2"]}, r"model\.biases=\['qkv', 'w2'\]: expected of qkv, wo, ffn"),
        ({"vocab_size": 0}, r"model\.vocab_size=0: expected at least 1, or -1"),
        ({"vocab_size": -2}, r"model\.vocab_size=-2"),
        *(({"rope_theta": bad}, rf"model\.rope_theta={bad}: expected a finite number") for bad in (0.0, inf, nan)),
        *(({"norm_eps": bad}, rf"model\.norm_eps={bad}: expected a finite number") for bad in (0.0, -1.0, inf, nan)),
        *(({"init_std": bad}, rf"model\.init_std={bad}: expected a finite number") for bad in (-0.1, inf, nan)),
        *(({"init_truncate": bad}, rf"model\.init_truncate={bad}: expected") for bad in (-0.1, inf, nan)),
    ],
)
def test_impossible_shapes_are_refused(shape: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TransformerArgs(**shape)


def test_a_shape_is_read_from_the_config_of_any_app_and_version() -> None:
    args = TransformerArgs(**SHAPE, biases=["qkv"], rope_scaling=RopeScaling(factor=8.0))
    assert TransformerArgs.of(asdict(args) | {"predictor": {"n_layers": 2}}) == args
    assert TransformerArgs.of(dict(SHAPE)) == TransformerArgs(**SHAPE)  # written before there was rope_scaling


def test_impossible_predictors_are_refused() -> None:
    from apps.crossbert.model import CrossBert, CrossBertArgs

    with pytest.raises(UserError, match=r"model\.predictor\.dim=30 does not split into model\.predictor\.n_heads=4"):
        CrossBert(CrossBertArgs(**SHAPE, predictor=PredictorArgs(dim=30)))
    for field, bad in (("dim", 0), ("dim", -2), ("n_layers", 0), ("n_layers", -1), ("n_heads", 0), ("n_heads", -2)):
        with pytest.raises(UserError, match=rf"model\.predictor\.{field}={bad}: expected at least"):
            PredictorArgs(**{field: bad})
