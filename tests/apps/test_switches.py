"""Every ablation and stability switch: a golden loss, the plain model when it is neutral, and no leak of a target.

``python -m tests.apps.test_switches [NAME ...]`` records the losses anew.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua import optim
from lingua.errors import UserError
from lingua.hub.weights import to_transformers
from lingua.loss import LossSum
from lingua.masking import View, complementary_views, predict_part, split_positions
from lingua.metrics import read_metrics
from lingua.optim import OptimArgs, Optimizer
from lingua.predictor import PredictorArgs
from tests.ranks import run_ranks, train_ranks
from tests.support import ROOT, deterministic, made_up_documents, prepare, run_app, tiny_words

GOLDEN = ROOT / "tests/golden/switches.json"
SPECIAL = (0, 1, 2, 3, 4)
SWITCHES = {  # of the command line, and what makes each of them the plain model
    "self_attention": ("crossbert", {"model.predictor.self_attention": "true"}),
    "mix_layers": ("crossbert", {"model.predictor.mix_layers": "true"}),
    "predicted_share": ("crossbert", {"masking.predicted_share": 0.25}),
    "single_views": (
        "crossbert",
        {"masking.complementary": "false", "masking.hidden_ratio": 0.25, "batch_tokens": 256},
    ),
    "narrow_predictor": ("crossbert", {"model.predictor.dim": 16, "model.predictor.n_layers": 2}),
    "init_std": ("crossbert", {"model.init_std": 0.05}),
    "isolate_documents": ("crossbert", {"data.isolate_documents": "true"}),
    "bert_ratio": ("bert", {"masking.hidden_ratio": 0.5}),
    "z_loss": ("crossbert", {"model.z_loss": 0.01}),
    "qk_norm": ("crossbert", {"model.qk_norm": "true"}),
    "muon": ("crossbert", {"optim.matrices": "muon"}),
}


def losses(name: str, data: Path, folder: Path) -> list[float]:
    """Six losses and the gradient norms of a run with one switch."""
    app, options = SWITCHES[name]
    words = tiny_words(app, data, folder, steps=6, model__init_std=0.1, optim__warmup=1)
    run_app(
        app, [*(w for w in words if not w.startswith("data.validation")), *(f"{k}={v}" for k, v in options.items())]
    )
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return [record[key] for key in ("loss", "grad_norm") for record in records]


@pytest.mark.parametrize("name", SWITCHES)
def test_the_losses_are_as_they_were_recorded(name: str, corpus: Path, tmp_path: Path) -> None:
    close = 1e-3 if name == "muon" else 1e-5  # Muon multiplies in bf16
    assert losses(name, corpus, tmp_path) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=close, abs=0)


def test_every_switch_does_something() -> None:
    recorded = json.loads(GOLDEN.read_text())
    assert recorded.keys() == SWITCHES.keys()
    assert len({tuple(values) for values in recorded.values()}) == len(SWITCHES)


def tiny(document_start: int | None = None, **predictor: object) -> CrossBert:
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}
    args = CrossBertArgs(**shape, predictor=PredictorArgs(n_layers=2, **predictor))
    return CrossBert(args, SPECIAL, seed=1, document_start=document_start)


def rows() -> tuple[Tensor, Tensor]:
    return torch.randint(5, 50, (3, 12), generator=torch.Generator().manual_seed(0)), torch.tensor([5, 6, 900])


def gradients(model: CrossBert, tokens: Tensor, view: View) -> tuple[LossSum, dict[str, Tensor]]:
    part = model(tokens, view)
    part.loss.backward()
    return part, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("switch", ["self_attention", "mix_layers"])
def test_a_neutral_switch_is_the_plain_model(switch: str) -> None:
    """The other weights are the same ones; a zero output of self-attention adds nothing, and mixes start at zero."""
    tokens, index = rows()
    (view,) = complementary_views(index, 12, 0.5, 0)
    plain, switched = tiny(), tiny(**{switch: True})
    if switch == "self_attention":
        assert not torch.equal(switched(tokens, view).loss, plain(tokens, view).loss)
        with torch.no_grad():
            for layer in switched.predictor.layers:
                layer.self_attention.wo.weight.zero_()
    expected, plain_gradients = gradients(plain, tokens, view)
    found, switched_gradients = gradients(switched, tokens, view)
    assert torch.equal(found.loss, expected.loss)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(switched_gradients[name], gradient, rtol=1e-4, atol=1e-4)
    # and it learns from here
    new = [
        g for name, g in switched_gradients.items() if name not in plain_gradients and ("wo" in name or "mix" in name)
    ]
    assert len(new) == 2
    assert all(gradient.abs().max() > 0 for gradient in new)


def test_predicting_all_hidden_positions_is_the_plain_model_and_a_part_is_a_part() -> None:
    tokens, index = rows()
    model = tiny()
    view = split_positions(index, 12, 0.5, 0)
    assert predict_part(view, index, 1.0, 0) is view
    whole = model(tokens, view)
    part = predict_part(view, index, 0.34, 0)
    assert part.hidden_BM.shape == (3, 2)
    assert torch.equal(part.visible_BT, view.visible_BT)
    assert (part.hidden_BM[:, :, None] == view.hidden_BM[:, None]).any(2).all()
    assert (part.hidden_BM.diff(dim=1) > 0).all()
    # the parts' losses are the whole's, position by position
    each = [model(tokens, View(view.visible_BT, view.hidden_BM[:, i : i + 1])).loss for i in range(6)]
    torch.testing.assert_close(sum(each), whole.loss)
    # A row's choice is a function of its number, whatever stands beside it, and differs from the mask's order.
    assert torch.equal(
        predict_part(split_positions(index[1:], 12, 0.5, 0), index[1:], 0.34, 0).hidden_BM, part.hidden_BM[1:]
    )
    (stacked,) = complementary_views(index, 12, 0.5, 0)
    both = predict_part(stacked, index, 0.34, 0)
    assert torch.equal(both.hidden_BM[:3], part.hidden_BM)
    chosen = predict_part(split_positions(torch.arange(4000), 12, 0.5, 0), torch.arange(4000), 0.5, 0).hidden_BM
    counts = chosen.flatten().bincount(minlength=12)
    assert (counts - 1000).abs().max() < 150  # 5 standard deviations


@torch.no_grad()
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("switches", [{"self_attention": True}, {"mix_layers": True}, {"dim": 16}])
def test_nothing_of_a_hidden_token_reaches_a_prediction(switches: dict, isolated: bool) -> None:
    model = tiny(0 if isolated else None, **switches)
    if model.predictor.mix:
        for i, mix_L in enumerate(model.predictor.mix):
            mix_L.normal_(generator=torch.Generator().manual_seed(i))
    tokens, index = rows()
    if isolated:
        tokens[:, [0, 6]] = 0
    view = predict_part(split_positions(index, 12, 0.5, 0), index, 0.5, 0)
    visible = torch.zeros(3, 12, dtype=torch.bool).scatter(1, view.visible_BT, True)
    states = []
    model.predictor.register_forward_hook(lambda module, args, output: states.append(output))
    model(tokens, view)
    for position in range(1, 12):
        if position == 6:
            continue
        changed = tokens.clone()
        changed[:, position] = torch.where(tokens[:, position] == 49, 48, 49)
        model(changed, view)
        for row in range(3):
            same = (states[-1][row] == states[0][row]).all(dim=1)
            in_document = (view.hidden_BM[row] < 6) == (position < 6)
            sees = visible[row, position] & (in_document if isolated else torch.ones_like(in_document))
            if not visible[row, position]:
                assert same.all()
            else:
                assert torch.equal(~same, sees)


def test_self_attention_stays_within_documents() -> None:
    """A document's hidden positions alone give the same, so those of another do not reach them."""
    model = tiny(0, self_attention=True)
    tokens, _ = rows()
    tokens[:, [0, 6]] = 0
    view = View(torch.tensor([[0, 1, 4, 6, 7, 9]]), torch.tensor([[2, 3, 5, 8, 10, 11]]))
    whole = model(tokens[:1], view).loss
    halves = [
        model(tokens[:1], View(view.visible_BT, view.hidden_BM[:, part])).loss for part in (slice(3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(halves), whole)
    model.document_start = None
    halves = [
        model(tokens[:1], View(view.visible_BT, view.hidden_BM[:, part])).loss for part in (slice(3), slice(3, 6))
    ]
    assert abs(float((sum(halves) / model(tokens[:1], view).loss).detach()) - 1) > 1e-4


def test_a_mix_reads_what_its_weights_say() -> None:
    model = tiny(mix_layers=True)
    tokens, index = rows()
    view = split_positions(index, 12, 0.5, 0)
    visible = tokens.gather(1, view.visible_BT)
    with torch.no_grad():
        model.predictor.mix[1].copy_(torch.tensor([0.5, 0.0, -1.0]))  # half of the embedding, and the last state away
    first, second = model.predictor.read(model.encoder, visible, view.visible_BT)
    torch.testing.assert_close(first, model.encoder(visible, view.visible_BT))
    torch.testing.assert_close(second, model.encoder.norm(0.5 * model.encoder.embedding(visible)))


@pytest.mark.parametrize(
    ("dim", "layers", "millions"),
    [(192, 12, 7.96), (384, 12, 24.77), (576, 12, 50.43), (768, 12, 84.9), (768, 6, 42.5)],
)
def test_predictors_have_the_parameters_of_table_4(dim: int, layers: int, millions: float) -> None:
    args = CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(dim, layers, dim // 64))
    with torch.device("meta"):
        model = CrossBert(args)
    count = sum(p.numel() for p in model.predictor.layers.parameters() if p.dim() == 2)
    assert round(count / 1e6, 2 if millions < 80 and millions != 42.5 else 1) == millions
    out = 0 if dim == 768 else 768 * dim  # to the embedding's width, which the table leaves out
    assert model.parameter_counts()["full"] - model.parameter_counts()["encoder"] == count + out


def test_flops_with_switches_by_hand() -> None:
    with torch.device("meta"):
        plain, own = (
            CrossBert(CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(n_layers=6, self_attention=value)))
            for value in (False, True)
        )
    encoder = 28 * (6 * (4 * 768**2 + 3 * 768 * 2048) + 12 * 768 * 512)
    block = 6 * (4 * 768**2 + 3 * 768 * 2048) + 12 * 768 * 512
    again = 6 * 4 * 768**2 + 12 * 768 * 512
    assert plain.flops_per_token(512, 0.65, False, 0.4) == pytest.approx(0.35 * encoder + 0.65 * 0.4 * 6 * block)
    assert own.flops_per_token(512, 0.3, True) == pytest.approx((encoder + 6 * (block + again)) / 2)
    # the hardware's: at equal halves, 256 positions see 256
    more = own.row_flops(512, 0.5, True) + plain.row_flops(512, 0.5, True) * -1
    assert more.training == pytest.approx(2 * 3 * 6 * (2 * 4 * 768**2 * 256 + 4 * 768 * 256**2))
    quarter = plain.row_flops(512, 0.5, False, 0.25)
    assert quarter.head == 2 * 50265 * 768 * 64


def test_a_predictor_restarts_beside_a_trained_encoder(corpus: Path, tmp_path: Path) -> None:
    """Also of another shape, and on a BERT's encoder, which has none."""
    from lingua.checkpoint import load_encoder_weights

    for app in ("bert", "crossbert"):
        run_app(app, tiny_words(app, corpus, tmp_path / app, steps=4))
    plain = {"steps": 2, "optim__lr": 1e-9, "optim__min_lr": 1e-9, "seed": 5}
    for app in ("bert", "crossbert"):
        start = {"init__path": tmp_path / app, "init__fresh": "[predictor]", "model__predictor__dim": 16}
        run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / f"{app}2", **plain, **start))
        old, new = (load_encoder_weights(tmp_path / name)[0] for name in (app, f"{app}2"))
        for one, other in zip(old.parameters(), new.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    words = tiny_words("crossbert", corpus, tmp_path / "no", init__path=tmp_path / "bert")
    with pytest.raises(UserError, match=r"has no model\.predictor"):
        run_app("crossbert", words)
    with pytest.raises(UserError, match=r"init\.fresh: the model has no part head; it has encoder, predictor"):
        run_app("crossbert", [*words, "init.fresh=[head]"])
    with pytest.raises(UserError, match=r"init\.fresh=\['predictor'\] needs init\.path"):
        run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "no", init__fresh="[predictor]"))
    with pytest.raises(UserError, match=r"masking\.predicted_share=0\.0: expected a share"):
        run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "no", masking__predicted_share=0.0))


def test_switches_together_go_on_bit_by_bit(corpus: Path, tmp_path: Path) -> None:
    options = {"model.predictor.self_attention": "true", "model.predictor.mix_layers": "true"}
    options |= {"masking.predicted_share": 0.5, "checkpoint.dump.every": 4}
    options |= {"optim.matrices": "muon", "model.qk_norm": "true", "model.z_loss": 1e-3, "stats.every": 4}
    words = tiny_words("crossbert", corpus, tmp_path / "run", steps=8, validation__every=4)
    words += [f"{key}={value}" for key, value in options.items()]
    run_app("crossbert", words)
    whole = deterministic(read_metrics(tmp_path / "run/metrics.jsonl"))
    shutil.rmtree(tmp_path / "run/checkpoints/0000000008")
    run_app("crossbert", words)
    assert deterministic(read_metrics(tmp_path / "run/metrics.jsonl")) == whole


def test_qk_norm_computes_what_qwen3_does() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Bert(BertArgs(dim=32, n_layers=2, n_heads=2, vocab_size=50, init_std=0.2, qk_norm=True), (), 1)
    with torch.no_grad():
        for layer in model.encoder.layers:
            for part in (layer.attention.qk_norm.query, layer.attention.qk_norm.key):
                part.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    qwen = Qwen3ForCausalLM(config)
    weights = {f"model.{name}": weight for name, weight in to_transformers(model.encoder, False).items()}
    for i, layer in enumerate(model.encoder.layers):
        norm = layer.attention.qk_norm
        weights |= {
            f"model.layers.{i}.self_attn.q_norm.weight": norm.query.weight,
            f"model.layers.{i}.self_attn.k_norm.weight": norm.key.weight,
        }
    assert qwen.load_state_dict(weights, strict=False) == (["lm_head.weight"], [])
    qwen.tie_weights()
    tokens, _ = rows()
    part = model(tokens, tokens, None)
    torch.testing.assert_close(part.loss / part.targets, qwen(input_ids=tokens, labels=tokens).loss)
    plain = Bert(replace(model.args, qk_norm=False), (), 1)
    assert not torch.equal(part.loss, plain(tokens, tokens, None).loss)


def test_qk_norm_bounds_every_attention_logit_also_of_the_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    from lingua import transformer

    sizes: list[Tensor] = []
    real = transformer.attention

    def seen(q: Tensor, k: Tensor, v: Tensor, mask: object = None) -> Tensor:
        sizes.append(torch.stack((q.square().mean(-1).max(), k.square().mean(-1).max())))
        return real(q, k, v, mask)

    monkeypatch.setattr(transformer, "attention", seen)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 5.0}
    predictor = PredictorArgs(n_layers=1, self_attention=True)
    tokens, index = rows()
    for qk_norm in (False, True):
        sizes.clear()
        CrossBert(CrossBertArgs(**shape, predictor=predictor, qk_norm=qk_norm), SPECIAL, 1)(
            tokens, split_positions(index, 12, 0.5, 0)
        )
        assert len(sizes) == 4
        assert bool((torch.stack(sizes) < 1.001).all()) == qk_norm


@torch.no_grad()
def test_z_loss_is_for_training_only() -> None:
    tokens, index = rows()
    view = split_positions(index, 12, 0.5, 0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}
    plain, switched = (
        CrossBert(CrossBertArgs(**shape, predictor=PredictorArgs(n_layers=1), z_loss=z), SPECIAL, 1) for z in (0.0, 0.1)
    )
    assert switched(tokens, view).loss > plain(tokens, view).loss
    assert torch.equal(switched.eval()(tokens, view).loss, plain.eval()(tokens, view).loss)


@pytest.mark.slow
def test_a_killed_run_with_muon_goes_on_bit_by_bit_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    def words(name: str) -> list[str]:
        options = {"steps": 12, "validation__every": 12, "distributed__timeout": 60, "micro_rows": 2}
        options |= {"optim__matrices": "muon", "checkpoint__dump__every": 5, "distributed__dp_shard": 2}
        return tiny_words("crossbert", corpus, tmp_path / name, **options)

    train_ranks(2, "crossbert", words("whole"), tmp_path / "whole.out")
    run_ranks(2, ["-m", "tests.faulty", "crossbert", "SIGKILL:1:8", *words("run")], tmp_path / "out")
    train_ranks(2, "crossbert", words("run"), tmp_path / "again.out")
    assert "at step 5" in (tmp_path / "run/train.log").read_text()
    whole, run = (deterministic(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "run"))
    assert run == whole


def test_muon_refuses_copies_that_are_spread_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spread(nn.Parameter):
        device_mesh = type("Mesh", (), {"shape": (2, 4)})

    monkeypatch.setattr(optim, "DTensor", Spread)
    net = nn.Linear(4, 4, bias=False)
    net.weight = Spread(torch.ones(4, 4))
    with pytest.raises(UserError, match=r"optim\.matrices=muon with 2 copies of the model, each on 4 ranks"):
        Optimizer(net, OptimArgs(matrices="muon"), 1)


def rewrite() -> None:
    """Record the losses anew: all, or those named on the command line."""
    torch.set_num_threads(1)
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder), made_up_documents(300))
        for name in sys.argv[1:] or SWITCHES:
            recorded[name] = losses(name, data, Path(folder) / name)
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    rewrite()
