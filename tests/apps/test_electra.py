"""Replaced token detection: labels, gradients, a slow reference, sizes, samples, and runs that go on."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.bert import electra
from apps.bert.electra import Electra, RtdArgs, RtdLoss, step_share
from apps.bert.model import Bert, BertArgs
from lingua.checkpoint import complete_checkpoints
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.hashing import counter_hash
from lingua.loss import LossSum, add_up, cross_entropy, cross_entropy_and_samples
from lingua.masking import View, mask_tokens, split_positions
from lingua.metrics import read_metrics
from lingua.rotary import RopeScaling, rotary_angles
from tests.ranks import run_ranks, train_ranks
from tests.support import deterministic, run_app, tiny_words

SPECIAL = (0, 1, 2, 3, 4)
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}


def tiny(shape: dict | None = None, **rtd: object) -> Electra:
    return Electra(BertArgs(**SHAPE, **(shape or {})), RtdArgs(**{"n_layers": 1, **rtd}), SPECIAL, seed=1)


def inputs(rows: int = 4, seq_len: int = 12) -> tuple[Tensor, Tensor, View, Tensor, Tensor]:
    tokens = torch.randint(0, 50, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    index = torch.arange(rows) * 7
    view = split_positions(index, seq_len, 0.34, 0)
    return mask_tokens(tokens, view.hidden_BM, 4, SPECIAL), tokens, view, torch.ones(rows), index


def test_the_papers_electra_has_258m_parameters_and_7_5e19_flops() -> None:
    with torch.device("meta"):
        model = Electra(BertArgs(vocab_size=50265), RtdArgs())
        half = Electra(BertArgs(vocab_size=50265), RtdArgs(n_layers=28, dim=256, n_heads=4))
    assert model.parameter_counts()["full"] == pytest.approx(258.0e6, rel=2e-4)
    assert model.parameter_counts()["encoder"] == pytest.approx(236.8e6, rel=2e-4)
    assert model.flops_per_token(512) * 130_000 * 393_216 == pytest.approx(7.5e19, rel=5e-3)
    block = 4 * 256**2 + 3 * 256 * 768
    assert half.parameter_counts()["full"] - half.parameter_counts()["encoder"] == 28 * block + 2 * 256 * 768
    row = model.row_flops(512, 0.15)
    by_hand = 2 * 512 * 31 * (4 * 768**2 + 3 * 768 * 2048) + 31 * 4 * 768 * 512**2 + 2 * 77 * 50265 * 768
    assert row.training == 3 * by_hand


def reference(model: Electra, batch: tuple[Tensor, Tensor, View, Tensor, Tensor]) -> dict[str, float | Tensor]:
    """Both means and what they are made of, position by position, by the definition."""
    masked, tokens, view, _, index = batch
    generator, own = model.generator, model.generator.embedding
    difference = model.encoder.embedding.weight
    embedding = difference if own is None else own.weight
    head_dim = generator.args.dim // generator.args.n_heads
    rotary = rotary_angles(torch.arange(tokens.shape[1]), head_dim, 10000.0, model.args.rope_scaling)
    generator_losses, bce, labels = [], [], []
    for row in range(len(tokens)):
        x = generator.into(embedding[masked[row]][None])
        for layer in generator.layers:
            x = layer(x, rotary)
        logits = generator.out(generator.norm(x))[0] @ embedding.T
        corrupted = tokens[row].clone()
        for position in view.hidden_BM[row].tolist():
            token = int(tokens[row, position])
            if token in SPECIAL:
                continue
            log_probabilities = logits[position].log_softmax(0)
            generator_losses.append(-log_probabilities[token])
            bits = counter_hash(model.seed, 3, int(index[row]), position) % 2**64 >> 40
            cumulative, chosen = 0.0, -1
            while cumulative <= bits / 2**24:
                chosen += 1
                cumulative += log_probabilities[chosen].exp().item()
            corrupted[position] = chosen
        if own is None:
            states = model.encoder(corrupted[None])[0]
        else:
            whole = Bert(model.args).double()
            whole.load_state_dict({n: p for n, p in model.state_dict().items() if n.startswith("enc")})
            with torch.no_grad():
                whole.encoder.embedding.weight.copy_(embedding + difference)
            states = whole.encoder(corrupted[None])[0]
        for position in range(tokens.shape[1]):
            p = torch.sigmoid(states[position] @ model.head)
            labels.append(int(corrupted[position] != tokens[row, position]))
            bce.append(-p.log() if labels[-1] else -(1 - p).log())
    means = torch.stack(generator_losses).mean(), torch.stack(bce).mean()
    return {"generator": means[0], "discriminator": means[1], "replaced": sum(labels), "positions": len(bce)}


@pytest.mark.parametrize(
    "rtd",
    [
        {},
        {"dim": 16, "n_layers": 2},
        {"disentangled": True},
        {"loss_weight": 7.0},
        {"shape": {"rope_scaling": RopeScaling(8.0, original_max_position_embeddings=4)}},
    ],
    ids=str,
)
def test_the_loss_equals_a_plain_float64_reference(rtd: dict) -> None:
    model = tiny(**rtd).double()
    if model.generator.embedding is not None:  # away from its start, where the difference is nothing
        with torch.no_grad():
            model.encoder.embedding.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    batch = inputs()
    found, expected = model(*batch), reference(model, batch)
    mean = expected["generator"] + model.rtd.loss_weight * expected["discriminator"]
    torch.testing.assert_close(found.loss / found.targets, mean, rtol=1e-6, atol=0)  # angles and counts are float32
    assert int(found.replaced) == expected["replaced"] > 0
    assert int(found.positions) == expected["positions"]
    figures = found.figures()
    assert figures["generator_loss"] == pytest.approx(float(expected["generator"]), rel=1e-6)
    assert figures["discriminator_loss"] == pytest.approx(float(expected["discriminator"]), rel=1e-6)
    if not rtd:
        found.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        (mean * found.targets).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-8)


def samples_are(samples: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the generator predicts."""

    def chosen(x_ND: Tensor, *others: Tensor) -> tuple[LossSum, Tensor]:
        return cross_entropy_and_samples(x_ND, *others)[0], samples

    monkeypatch.setattr(electra, "cross_entropy_and_samples", chosen)


def test_a_sample_that_is_the_original_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny(), inputs()
    tokens, view = batch[1:3]
    originals = tokens.gather(1, view.hidden_BM).flatten()
    samples_are(originals, monkeypatch)
    part = model(*batch)
    assert part.replaced == part.found == 0
    logits = model.encoder(tokens) @ model.head
    torch.testing.assert_close(part.discriminator, F.softplus(logits).sum())  # every label is "original"
    assert part.correct == (logits <= 0).sum()
    # one other token at one ordinary masked position is one label, and at a special token's place it is none
    slot = next(i for i, token in enumerate(originals.tolist()) if token not in SPECIAL)
    changed = originals.clone()
    changed[slot] = (changed[slot] - 5 + 1) % 45 + 5
    for i, token in enumerate(originals.tolist()):
        if token in SPECIAL:
            changed[i] = 40
    assert any(token in SPECIAL for token in originals.tolist())
    samples_are(changed, monkeypatch)
    assert model(*batch).replaced == 1


def gradients(model: Electra) -> dict[str, Tensor]:
    model.zero_grad()
    model(*inputs()).loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("disentangled", [False, True])
def test_the_generator_learns_from_its_own_loss_only(disentangled: bool) -> None:
    alone, both = (gradients(tiny(disentangled=disentangled, loss_weight=weight)) for weight in (0.0, 50.0))
    for name in alone:
        if name.startswith("generator."):
            assert torch.equal(alone[name], both[name]), name
            assert alone[name].abs().max() > 0, name
    shared = "encoder.embedding.weight"
    assert not torch.equal(alone[shared], both[shared])  # the discriminator's loss reaches it in both cases
    assert (alone[shared].abs().max() > 0) == (not disentangled)  # the generator's only if it is one embedding


def test_disentangled_sharing_starts_as_plain_sharing_does() -> None:
    plain, disentangled = (tiny(disentangled=value)(*inputs()) for value in (False, True))
    for one, other in zip(plain, disentangled, strict=True):
        assert torch.equal(one, other)


def test_an_electra_starts_from_berts_encoder() -> None:
    bert = Bert(BertArgs(**SHAPE), seed=1)
    for name, parameter in bert.encoder.named_parameters():
        assert torch.equal(parameter, tiny().encoder.get_parameter(name))


def test_micro_batches_with_the_steps_share_add_up_to_the_step() -> None:
    model, (masked, tokens, view, weight, index) = tiny().double(), inputs()
    whole = model(masked, tokens, view, weight, index)
    batches, parts = [], []
    for part in (slice(0, 1), slice(1, 4)):
        batches.append((masked[part], tokens[part], View(view.visible_BT[part], view.hidden_BM[part]), weight[part]))
    # a row that only pads counts for nothing
    padded = (masked[:1], tokens[:1], View(view.visible_BT[:1], view.hidden_BM[:1]), torch.zeros(1))
    batches.append(padded)
    share = step_share(batches, SPECIAL)
    for batch, part in zip(batches, (index[:1], index[1:], index[:1]), strict=True):
        parts.append(model(*batch, part, share))
    total: RtdLoss = add_up(parts)
    for name, one, other in zip(RtdLoss._fields, total, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, msg=name, check_dtype=False)


def draw(x_ND: Tensor, weight_VD: Tensor, uniform_N: Tensor) -> Tensor:
    zeros = torch.zeros(len(x_ND), dtype=torch.int64)
    return cross_entropy_and_samples(x_ND, weight_VD, zeros, zeros.float(), uniform_N)[1]


def test_samples_follow_the_generators_distribution() -> None:
    x, weight = torch.randn(14, 8, generator=torch.Generator().manual_seed(0)).split((3, 11))
    n = 20_000
    uniform = (torch.arange(n) + 0.5) / n  # evenly: the counts are the probabilities, to rounding
    for row in x:
        samples = draw(row.expand(n, -1), weight, uniform)
        expected = (row @ weight.T).softmax(0)
        torch.testing.assert_close(samples.bincount(minlength=11) / n, expected, rtol=0, atol=2 / n)
    # the ends of the interval, and a probability of zero
    sure = torch.tensor([[1.0, 0.0]])
    weight = torch.tensor([[-200.0, 0.0], [200.0, 0.0], [-200.0, 0.0]])
    for number in (0.0, 1 - 2**-24):
        assert draw(sure, weight, torch.tensor([number])).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_the_same_with_samples(dtype: torch.dtype) -> None:
    """In both precisions the chunk's logits become the gradient in place, which must not happen before the draw."""
    generator = torch.Generator().manual_seed(0)
    n, vocabulary = 1500, 300  # more rows than a chunk has
    x, weight = (torch.randn(size, 16, generator=generator).requires_grad_() for size in (n, vocabulary))
    targets = torch.randint(vocabulary, (n,), generator=generator)
    uniform = torch.rand(n, generator=generator)
    weights = torch.ones(n)
    results = []
    for with_samples in (False, True):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if with_samples:
                part, samples = cross_entropy_and_samples(x, weight, targets, weights, uniform, 1e-4)
            else:
                part = cross_entropy(x, weight, targets, weights, 1e-4)
        results.append((part.loss, *torch.autograd.grad(part.loss, (x, weight))))
    for alone, beside in zip(*results, strict=True):
        assert torch.equal(alone, beside)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        cumulative = (x @ weight.T).double().softmax(dim=1).cumsum(dim=1)
    expected = (cumulative <= uniform[:, None]).sum(dim=1)
    assert (samples != expected).sum() <= 2  # a number that lies at a step, to rounding


def test_the_generators_head_and_samples_take_the_same_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        part = tiny()(*inputs())
    exact = tiny()(*inputs())
    assert part.generator.dtype == torch.float32
    assert float(part.generator / exact.generator) == pytest.approx(1, abs=0.02)


def test_attention_stays_within_documents_if_asked() -> None:
    """What stands in another document changes nothing for generator and discriminator."""
    batch = list(inputs(rows=1))
    tokens = batch[1].clamp(min=5)
    tokens[0, [0, 6]] = 0
    model = Electra(BertArgs(**SHAPE), RtdArgs(n_layers=1), SPECIAL, 1, document_start=0)
    seen = []
    model.encoder.register_forward_hook(lambda module, args, output: seen.append(output[0, :6].detach()))
    view = View(torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8, 10, 11]]), torch.tensor([[3, 9]]))
    for last in (20, 30):
        tokens[0, 11] = last
        model(mask_tokens(tokens, view.hidden_BM, 4, SPECIAL), tokens, view, torch.ones(1), batch[4])
    assert torch.equal(*seen)
    model.document_start = None
    model(mask_tokens(tokens, view.hidden_BM, 4, SPECIAL), tokens, view, torch.ones(1), batch[4])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize(
    ("rtd", "message"),
    [
        ({"n_layers": 0}, "rtd.n_layers=0: expected at least one block"),
        ({"loss_weight": -1.0}, "rtd.loss_weight=-1.0"),
        ({"loss_weight": math.nan}, "rtd.loss_weight=nan"),
        ({"dim": 30}, "rtd.dim=30 with rtd.n_heads=2"),
        ({"n_heads": 3}, "rtd.dim=32 does not split into rtd.n_heads=3"),
    ],
)
def test_impossible_generators_are_refused(rtd: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RtdArgs(**rtd).generator(BertArgs(**SHAPE))


def records(run: Path) -> list[dict]:
    return deterministic(read_metrics(run / "metrics.jsonl"))


@pytest.mark.parametrize("disentangled", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_run_learns_and_goes_on_bit_by_bit(corpus: Path, tmp_path: Path, disentangled: str) -> None:
    options = {"objective": "rtd", "checkpoint__dump__every": 10, "rtd__disentangled": disentangled}
    words = tiny_words("bert", corpus, tmp_path / "run", **options)
    run_app("bert", words)
    whole = records(tmp_path / "run")
    steps = [record for record in whole if "loss" in record]
    assert steps[-1]["generator_loss"] < steps[0]["generator_loss"] - 0.5
    assert steps[-1]["discriminator_loss"] < steps[0]["discriminator_loss"] - 0.1
    assert steps[0]["loss"] == pytest.approx(steps[0]["generator_loss"] + 50 * steps[0]["discriminator_loss"], rel=1e-5)
    validation = [record for record in whole if "valid/made_up/generator_loss@0.15" in record][-1]
    assert "valid/made_up/discriminator_loss@0.5" in validation
    assert "valid/made_up/loss@0.15" not in validation  # it would not compare with a BERT's
    for folder in complete_checkpoints(tmp_path / "run/checkpoints")[1:]:
        shutil.rmtree(folder)
    run_app("bert", words)
    assert records(tmp_path / "run") == whole
    assert "at step 10" in (tmp_path / "run/train.log").read_text()


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_by_bit_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    def words(name: str) -> list[str]:
        options = {"steps": 20, "validation__every": 20, "distributed__timeout": 60, "micro_rows": 2}
        options |= {"objective": "rtd", "checkpoint__dump__every": 7, "distributed__dp_shard": 2}
        return tiny_words("bert", corpus, tmp_path / name, **options)

    train_ranks(2, "bert", words("whole"), tmp_path / "whole.out")
    ended = run_ranks(2, ["-m", "tests.faulty", "bert", "SIGKILL:1:11", *words("run")], tmp_path / "out")
    assert [rank.status for rank in ended] == [1, -9]
    train_ranks(2, "bert", words("run"), tmp_path / "again.out")
    assert "at step 7" in (tmp_path / "run/train.log").read_text()
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_the_kept_encoder_is_the_discriminator(corpus: Path, tmp_path: Path) -> None:
    """Of a disentangled one, the embedding is the generator's plus the difference."""
    options = {"objective": "rtd", "rtd__disentangled": "true", "steps": 5}
    run_app("bert", [w for w in tiny_words("bert", corpus, tmp_path / "run", **options) if "data.valid" not in w])
    stored = Electra(BertArgs(dim=32, n_layers=2, n_heads=2, vocab_size=50265), RtdArgs(disentangled=True))
    from lingua.checkpoint import load, resolve

    load(resolve(tmp_path / "run"), stored, None)
    encoder = load_encoder(tmp_path / "run").encoder
    base, difference = stored.generator.embedding.weight, stored.encoder.embedding.weight
    assert difference.abs().max() > 0
    assert torch.equal(encoder.embedding.weight, base + difference)
    tokens = torch.arange(12)[None] + 100
    torch.testing.assert_close(encoder(tokens), stored.encoder(tokens, base_VD=base))
    words = tiny_words("bert", corpus, tmp_path / "other", steps=2, init__path=tmp_path / "run")
    with pytest.raises(UserError, match="embedding is a difference to its generator's"):
        run_app("bert", words)
