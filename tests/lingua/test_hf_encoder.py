"""Every architecture against transformers' own outputs for single texts, and what is refused."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from lingua.errors import UserError
from lingua.hf_encoder import load_hf_encoder, longest_sequence, parameter_counts
from tests.tiny_models import CONFIGS, make_model
from tests.tiny_run import SENTENCES

TEXTS = [*SENTENCES, "dog", "A dog sleeps ."]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, kind) for kind in CONFIGS}


@pytest.fixture(scope="module")
def bert(models: dict[str, Path]) -> Path:
    return models["bert"]


def hidden_states(folder: Path, a: str, b: str | None = None) -> list[np.ndarray]:
    """transformers' own: [S, D] of each layer for one text (or pair) alone; the last one is normed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(**tokenizer(a, b, return_tensors="pt"), output_hidden_states=True)
    return [state[0].numpy() for state in out.hidden_states]


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_layer_equals_transformers_own(models: dict[str, Path], kind: str) -> None:
    encoder = load_hf_encoder(str(models[kind]), device="cpu")
    assert (encoder.n_layers, encoder.dim, encoder.max_length) == (3, 32, 128)
    assert encoder.causal == (kind in ("llama", "qwen3"))
    raw = encoder.encode(TEXTS, layers=[0, 1, 2], final_norm=False, batch_tokens=200)
    last = encoder.encode(TEXTS, layers=3)
    pairs = encoder.encode(TEXTS, pairs=TEXTS[::-1])
    for row, text in enumerate(TEXTS):
        expected = [state.mean(0) for state in hidden_states(models[kind], text)]
        np.testing.assert_allclose(raw[:, row], expected[:3], atol=1e-5)
        np.testing.assert_allclose(last[row], expected[3], atol=1e-5)
        np.testing.assert_allclose(
            pairs[row], hidden_states(models[kind], text, TEXTS[-1 - row])[-1].mean(0), atol=1e-5
        )
    assert encoder.tokens / encoder.padded_tokens >= 0.9


@pytest.mark.parametrize("kind", ["modernbert", "eurobert", "bert"])
def test_the_final_norm_is_applied_to_every_block_of_models_that_have_one(models: dict[str, Path], kind: str) -> None:
    encoder = load_hf_encoder(str(models[kind]), device="cpu")
    raw, normed = (encoder.encode(TEXTS, layers=[0, 2], pooling="first", final_norm=norm) for norm in (False, True))
    np.testing.assert_array_equal(raw[0], normed[0])
    norm = {"modernbert": "final_norm", "eurobert": "norm"}.get(kind)
    if norm is None:
        np.testing.assert_array_equal(raw[1], normed[1])
    else:
        with torch.no_grad():
            expected = getattr(encoder.model, norm)(torch.from_numpy(raw[1])).numpy()
        np.testing.assert_allclose(normed[1], expected, atol=1e-5)
        assert np.abs(raw[1] - normed[1]).max() > 0.1


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta-v3"])
def test_word_features_are_those_of_the_first_piece(models: dict[str, Path], kind: str) -> None:
    encoder = load_hf_encoder(str(models[kind]), device="cpu")
    sentences = [sentence.split() for sentence in SENTENCES]
    features, kept = encoder.encode_words(sentences)
    assert kept.all()
    row = 0
    for words in sentences:
        tokens = encoder.tokenizer(" ".join(words))
        text = " ".join(words)
        states = hidden_states(models[kind], text)[-1]
        start = 0
        for word in words:
            # a token whose text, as the tokenizer spells it, opens the word
            token = tokens.char_to_token(start)
            np.testing.assert_allclose(features[row], states[token], atol=1e-5)
            start, row = start + len(word) + 1, row + 1
    assert row == len(features)


def test_words_beyond_the_length_are_left_out(bert: Path) -> None:
    encoder = load_hf_encoder(str(bert), max_length=10, device="cpu")
    sentences = [SENTENCES[0].split(), ["dogs", "run"]]
    features, kept = encoder.encode_words(sentences)
    pieces = [len(encoder.tokenizer(word, add_special_tokens=False)["input_ids"]) for word in sentences[0]]
    first = np.cumsum([0, *pieces[:-1]])
    assert kept.tolist() == [*(first < 8), True, True]
    assert len(features) == kept.sum() < len(kept)
    assert encoder.truncated == 1
    with pytest.raises(UserError, match=r"word 1 of sentence 0 \('\\x00'\) has no token"):
        encoder.encode_words([["dogs", "\x00", "run"]])


def test_truncation_is_counted_and_the_longer_side_loses_first(bert: Path) -> None:
    encoder = load_hf_encoder(str(bert), max_length=12, device="cpu")
    long, short = SENTENCES[1], "dog"
    tokens = encoder.tokenizer
    found = encoder.text_sequences([long, short], [short, short])
    ids = tokens(long, add_special_tokens=False)["input_ids"]
    one = tokens(short, add_special_tokens=False)["input_ids"]
    cls, sep = tokens.cls_token_id, tokens.sep_token_id
    room = 12 - 3 - len(one)
    assert found.ids[0].tolist() == [cls, *ids[:room], sep, *one, sep]
    assert found.types[0].tolist() == [0] * (room + 2) + [1] * (len(one) + 1)
    assert found.truncated == 1
    encoder.encode([long, short])
    assert encoder.truncated == 1


def test_the_longest_sequence_leaves_out_positions_that_the_padding_takes(bert: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    tokenizer.model_max_length = 10**30  # as tokenizers say that have no limit
    assert longest_sequence(transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1), tokenizer) == 512
    assert longest_sequence(transformers.BertConfig(max_position_embeddings=512), tokenizer) == 512
    tokenizer.model_max_length = 256
    assert longest_sequence(transformers.BertConfig(max_position_embeddings=512), tokenizer) == 256


def test_parameters_are_counted(bert: Path) -> None:
    encoder = load_hf_encoder(str(bert), device="cpu")
    total = sum(p.numel() for p in encoder.model.parameters())
    vocabulary = len(encoder.tokenizer) * 32
    assert parameter_counts(encoder.model) == {"total": total, "without_embedding": total - vocabulary}


@pytest.mark.parametrize("bad", [None, 3, ["dog"]])
def test_what_is_no_text_is_refused(bert: Path, bad: object) -> None:
    encoder = load_hf_encoder(str(bert), device="cpu")
    with pytest.raises(UserError, match=r"text 1 is .*: expected a string"):
        encoder.encode(["dog", bad])
    with pytest.raises(UserError, match=r"text 1 \(''\) has no token"):
        encoder.encode(["dog", ""])
    assert encoder.encode([]).shape == (0, 32)


def test_models_that_cannot_be_used_are_refused(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "nowhere"), "./nowhere", "~/nowhere", "runs/bert/nowhere"):
        with pytest.raises(UserError, match=rf"^hf:{name}: there is no folder {tmp_path}.*/nowhere: give that"):
            load_hf_encoder(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"hf:.*empty: cannot be loaded: .*; check the id or folder"):
        load_hf_encoder(str(tmp_path / "empty"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    with pytest.raises(UserError, match=r"hf:.*run: is a run of this library, .*: give ckpt=.*run"):
        load_hf_encoder(str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"max_length=129: .* takes 4 to 128 tokens"):
        load_hf_encoder(str(bert), max_length=129)
    lacking = tmp_path / "lacking"
    model = transformers.AutoModel.from_pretrained(bert)
    state = {name: value for name, value in model.state_dict().items() if "layer.1." not in name}
    model.save_pretrained(lacking, state_dict=state)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(lacking)
    with pytest.raises(UserError, match=r"its files lack 16 of the encoder's weights .*layer\.1\..* would be random"):
        load_hf_encoder(str(lacking))
    size = {"vocab_size": 200, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    transformers.T5Model(transformers.T5Config(**size)).save_pretrained(tmp_path / "t5")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match=r"T5Model is an encoder with a decoder: give a model that is an encoder alone"):
        load_hf_encoder(str(tmp_path / "t5"))


@pytest.mark.parametrize("kind", ["GPT2", "OPT", "GPTNeoX", "Bloom"])
def test_a_decoder_is_called_one(bert: Path, tmp_path: Path, kind: str) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 200}
    more = {"OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48}, "GPTNeoX": {"intermediate_size": 48}}.get(kind, {})
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**size, **more))
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{kind}Model is a decoder, whose tokens see only those before them: give an"):
        load_hf_encoder(str(tmp_path))


def test_an_unknown_ending_of_a_model_is_refused(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.BertModel.forward

    def doubled(self: transformers.BertModel, **inputs: object) -> object:
        out = forward(self, **inputs)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    monkeypatch.setattr(transformers.BertModel, "forward", doubled)
    with pytest.raises(UserError, match="BertModel: what it does after its last block is not known"):
        load_hf_encoder(str(bert))


REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=400, hidden_size=32, num_hidden_layers=2, max_length=48, **others):
        super().__init__(**others)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.max_length = num_hidden_layers, max_length


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return x + self.out(torch.tanh(self.mix(x) + mean)), None


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer_encoder = nn.ModuleList(Block(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **others):
        x = self.encoder(input_ids)
        for block in self.transformer_encoder:
            x, _ = block(x, attention_mask[..., None].to(x.dtype))
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))
"""


def test_a_model_with_code_of_its_own_runs_only_when_asked(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NeoBERT comes: blocks in ``transformer_encoder`` that return tuples, and ``layer_norm`` behind them."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    transformers.AutoTokenizer.from_pretrained(models["roberta"]).save_pretrained(folder)
    (folder / "modeling_own.py").write_text(textwrap.dedent(REMOTE))
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    config = {"model_type": "own", "auto_map": auto, "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    config_of = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = transformers.AutoModel.from_config(config_of, trust_remote_code=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="read it, then give trust_remote_code=true"):
        load_hf_encoder(str(folder))
    encoder = load_hf_encoder(str(folder), device="cpu", trust_remote_code=True)
    assert (encoder.n_layers, encoder.max_length) == (2, 48)
    together = encoder.encode(TEXTS)
    with torch.no_grad():
        ids = encoder.tokenizer(TEXTS[0], return_tensors="pt")
        alone = encoder.model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"])
    np.testing.assert_allclose(together[0], alone.last_hidden_state[0].mean(0), atol=1e-5)
    assert parameter_counts(encoder.model)["total"] - parameter_counts(encoder.model)["without_embedding"] == 400 * 32
