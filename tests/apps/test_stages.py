"""Next-token prediction, and the step from it to masked tokens: what is seen, what is kept, what is scheduled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apps.bert.model import Bert, BertArgs
from apps.bert.stages import StageArgs, Stages, check_stages
from lingua.attention import CAUSAL, attention, document_mask
from lingua.checkpoint import complete_checkpoints
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.hub.weights import to_transformers
from lingua.metrics import read_metrics
from lingua.optim import OptimArgs, learning_rate
from lingua.stats import attention_statistics
from tests.support import deterministic, run_app, tiny_words

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}


def tokens_BS(rows: int = 3, seq_len: int = 12) -> Tensor:
    return torch.randint(5, 50, (rows, seq_len), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_position_sees_the_future(isolated: bool, dtype: torch.dtype) -> None:
    model = Bert(BertArgs(**SHAPE), (), 1, document_start=0 if isolated else None)
    tokens, states = tokens_BS(), []
    if isolated:
        tokens[:, [0, 5]] = 0
    model.encoder.register_forward_hook(lambda module, args, output: states.append(output))

    def run(tokens: Tensor) -> Tensor:
        states.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(tokens, tokens, None)
        return states[0]

    before = run(tokens)
    for position in range(12):
        changed = tokens.clone()
        changed[:, position] = torch.where(tokens[:, position] == 49, 48, 49)
        after = run(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        if position not in (0, 5):
            assert not torch.equal(after[:, position], before[:, position])
            later = after[:, position + 1 :] != before[:, position + 1 :]
            assert later.any() == (position not in ((4, 11) if isolated else (11,)))
    if isolated:  # and nothing of the first document reaches the second
        changed = tokens.clone()
        changed[:, 3] = 49
        assert torch.equal(run(changed)[:, 5:], before[:, 5:])


def test_causal_attention_in_every_form_gives_the_same() -> None:
    q, k, v = (torch.randn(2, 9, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    lower = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    expected = attention(q, k, v, lower)
    torch.testing.assert_close(attention(q, k, v, CAUSAL), expected)
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), CAUSAL)  # on a CPU another path
    torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.05)
    documents = torch.tensor([[1] * 4 + [2] * 5, [1] * 9])
    isolated = attention(q, k, v, document_mask("sdpa", documents, documents, causal=True))
    torch.testing.assert_close(isolated[0, :4], expected[0, :4])
    torch.testing.assert_close(isolated[1], expected[1])
    alone = attention(q[:1, 4:], k[:1, 4:], v[:1, 4:], CAUSAL)
    torch.testing.assert_close(isolated[:1, 4:], alone)
    flex = document_mask("flex", documents, documents, causal=True)
    torch.testing.assert_close(attention(q, k, v, flex), isolated)
    assert torch.equal(flex.dense(), document_mask("sdpa", documents, documents, causal=True))
    for one, other in zip(attention_statistics(q, k, CAUSAL), attention_statistics(q, k, lower), strict=True):
        assert torch.equal(one, other)


def test_the_loss_equals_that_of_llama_with_the_same_weights() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = Bert(BertArgs(**SHAPE), (), 1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=model.encoder.layers[0].ffn.w2.in_features,
        num_hidden_layers=2,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    llama = LlamaForCausalLM(config)
    missing, unexpected = llama.load_state_dict(to_transformers(model.encoder, masked_lm=True), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    llama.tie_weights()
    tokens = tokens_BS()
    part = model(tokens, tokens, None)
    theirs = llama(input_ids=tokens, labels=tokens).loss
    assert int(part.targets) == 3 * 11
    torch.testing.assert_close(part.loss / part.targets, theirs, rtol=1e-6, atol=0)
    (part.loss / part.targets).backward()
    theirs.backward()
    torch.testing.assert_close(
        model.encoder.embedding.weight.grad, llama.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-6
    )
    # Special tokens are no targets, and rows that pad count for nothing.
    tokens[0, 4] = 2
    model.special_ids = (2,)
    assert int(model(tokens, tokens, None, torch.tensor([1.0, 1.0, 0.0])).targets) == 2 * 11 - 1


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]


STAGES = {
    "stages__causal__objective": "clm",
    "stages__causal__fraction": 0.3,
    "stages__masked__objective": "mlm",
    "stages__masked__lr": 1e-3,
    "stages__masked__warmup": 3,
}


def test_the_switch_keeps_weights_and_stream_and_takes_the_causal_mask_off(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of two stages is, bit by bit, two runs of which the second starts from the first's checkpoint."""
    options = {"steps": 20, "micro_rows": 8, "validation__every": 6}
    real, causal = Bert.forward, []

    def forward(self: Bert, inputs_BS: Tensor, tokens_BS: Tensor, view: object, *args: object) -> object:
        if self.training:
            causal.append(view is None)
        return real(self, inputs_BS, tokens_BS, view, *args)

    monkeypatch.setattr(Bert, "forward", forward)
    run_app("bert", tiny_words("bert", corpus, tmp_path / "both", **options, **STAGES))
    assert causal == [True] * 6 + [False] * 14

    first = {**options, "steps": 6, "objective": "clm"}
    run_app("bert", tiny_words("bert", corpus, tmp_path / "first", **first))
    start = {"init__path": tmp_path / "first", "init__optimizer": "true", "init__position": "true"}
    second = {**options, "steps": 14, "optim__lr": 1e-3, "optim__warmup": 3, **start}
    run_app("bert", tiny_words("bert", corpus, tmp_path / "second", **second))
    assert losses(tmp_path / "both") == losses(tmp_path / "first") + losses(tmp_path / "second")
    records = read_metrics(tmp_path / "both/metrics.jsonl")
    assert [r["step"] for r in records if "valid/made_up/next_token_loss" in r] == [6]
    assert [r["step"] for r in records if "valid/made_up/loss@0.5" in r] == [12, 18, 20]
    # each stage warms up and comes down by itself
    rates = [r["lr"] for r in records if "lr" in r]
    assert rates[:6] == [learning_rate(step, 6, OptimArgs(lr=3e-3)) for step in range(1, 7)]
    assert rates[5] == pytest.approx(1e-6)
    assert rates[6:9] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[-1] == pytest.approx(1e-6)


def test_a_staged_run_goes_on_bit_by_bit_on_either_side_of_the_switch(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = tiny_words("bert", corpus, run, steps=20, micro_rows=8, checkpoint__dump__every=3, **STAGES)
    run_app("bert", words)
    whole = deterministic(read_metrics(run / "metrics.jsonl"))
    for step in (3, 6, 9):  # before, at and after it
        shutil.copytree(run, tmp_path / f"{step}")
        for folder in complete_checkpoints(tmp_path / f"{step}/checkpoints"):
            if int(folder.name) > step:
                shutil.rmtree(folder)
        state = json.loads((tmp_path / f"{step}/checkpoints/{step:010d}/state.json").read_text())
        assert state["objective"] == ("clm" if step <= 6 else "mlm")
        again = [f"dump_dir={tmp_path / str(step)}" if w.startswith("dump_dir") else w for w in words]
        run_app("bert", again)
        assert deterministic(read_metrics(tmp_path / f"{step}/metrics.jsonl")) == whole
    # A checkpoint of the causal stage is read as it was trained, one of the other both ways.
    texts = ["the cat sees the sea", "one sailor paints a red house"]
    for step, is_causal in ((6, True), (9, False)):
        encoder = load_encoder(run / f"checkpoints/{step:010d}")
        assert encoder.causal == is_causal
        first = encoder.encode(texts, pooling="first")  # <s>, which sees itself only
        assert (abs(first[0] - first[1]).max() < 1e-6) == is_causal
        padded = encoder.encode([texts[0], " ".join(texts * 3)])
        assert abs(padded[0] - encoder.encode(texts[:1])[0]).max() < 1e-5
    assert encoder.weights_digest() != load_encoder(run / f"checkpoints/{6:010d}").weights_digest()


def test_stages_by_hand() -> None:
    args = {
        "a": StageArgs("clm", fraction=0.25, scheduler="wsd", decay_fraction=0.5, warmup=0),
        "b": StageArgs("mlm", lr=0.5, min_lr=0.0, warmup=10),
    }
    optim = OptimArgs(lr=1.0, min_lr=0.2, warmup=5)
    stages = Stages("mlm", args, optim, 100)
    assert [(s.objective, s.first_step, s.steps) for s in stages.all] == [("clm", 1, 25), ("mlm", 26, 75)]
    assert [stages.at(step).objective for step in (0, 1, 25, 26, 100)] == ["clm"] * 3 + ["mlm"] * 2
    assert stages.learning_rate(10) == 1.0
    assert stages.learning_rate(25) == pytest.approx(0.2)
    assert stages.learning_rate(26) == pytest.approx(0.05)
    assert stages.learning_rate(35) == 0.5
    assert stages.learning_rate(100) == 0.0
    plain = Stages("rtd", {}, optim, 100)
    assert [plain.learning_rate(step) for step in range(1, 101)] == [
        learning_rate(step, 100, optim) for step in range(1, 101)
    ]


@pytest.mark.parametrize(
    ("objective", "stages", "message"),
    [
        ("nsp", {}, "objective=nsp: expected one of mlm, rtd, clm"),
        ("rtd", {"a": StageArgs("clm")}, "objective=rtd has no stages"),
        ("clm", {"a": StageArgs("mlm")}, "objective=clm beside stages"),
        ("mlm", {"a": StageArgs("rtd")}, "stages.a.objective=rtd: expected mlm or clm"),
        ("mlm", {"a": StageArgs("clm", 0.0)}, "stages.a.fraction=0.0: expected a share above 0"),
        ("mlm", {"a": StageArgs("clm"), "b": StageArgs("mlm")}, "stages.b.fraction: only one stage may be without; a"),
        ("mlm", {"a": StageArgs("clm", 1.0), "b": StageArgs("mlm")}, "are 1 of the run: expected less than 1, for b"),
        ("mlm", {"a": StageArgs("clm", 0.5), "b": StageArgs("mlm", 0.4)}, "are 0.9 of the run: expected 1 together"),
        ("mlm", {"a": StageArgs("clm", lr=-1.0)}, r"stages.a: optim.lr=-1.0: expected a finite number above 0"),
    ],
)
def test_stages_that_make_no_run_are_refused(objective: str, stages: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(objective, stages, OptimArgs())


def test_a_run_without_masks_asks_nothing_of_their_ratio(corpus: Path, tmp_path: Path) -> None:
    options = {"steps": 2, "masking__hidden_ratio": 0.001}
    run_app("bert", tiny_words("bert", corpus, tmp_path / "clm", objective="clm", **options))
    assert len(losses(tmp_path / "clm")) == 2
    with pytest.raises(UserError, match=r"hidden ratio 0\.001"):
        run_app("bert", tiny_words("bert", corpus, tmp_path / "both", **options, **STAGES))


def test_what_fits_no_step_or_backend_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stages\.a: 0\.01 of 30 steps is less than one step"):
        Stages("mlm", {"a": StageArgs("clm", 0.01), "b": StageArgs("mlm")}, OptimArgs(), 30)
    options = {"objective": "clm", "data__isolate_documents": "true", "model__attention": "xformers"}
    with pytest.raises(UserError, match=r"model\.attention=xformers is not causal within documents"):
        run_app("bert", tiny_words("bert", corpus, tmp_path / "x", **options))
