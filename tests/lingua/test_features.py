"""Features against a plain loop over single texts, words against the tokenizer's reading of the sentence."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lingua.errors import UserError
from lingua.features import TextEncoder, load_encoder
from lingua.frozen import length_buckets
from lingua.tokenizer import RobertaTokenizer, SentencePieceTokenizer
from lingua.transformer import Encoder, TransformerArgs, init_weights
from tests.tiny_run import SENTENCES, make_pieces_run, make_run, train_sentencepiece

TEXTS = [*SENTENCES, "dog", " ".join(SENTENCES[:2]), "The fox sleeps .", "A dog ."]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pieces_run(tmp_path_factory.mktemp("features"))


@pytest.fixture
def enc(run: Path) -> TextEncoder:
    return load_encoder(run, device="cpu")


def roberta(max_length: int = 64) -> TextEncoder:
    args = TransformerArgs(dim=8, n_layers=1, n_heads=1, vocab_size=RobertaTokenizer.vocab_size, init_std=0.2)
    encoder = Encoder(args)
    init_weights(encoder, args, seed=0)
    return TextEncoder(encoder, RobertaTokenizer(), max_length)


def states(enc: TextEncoder, ids: list[int], layer: int) -> np.ndarray:
    """[S, D] of one sequence alone, without padding."""
    with torch.no_grad():
        (state,) = enc.encoder.encode(torch.tensor([ids]), torch.tensor([len(ids)]), (layer,))
    return state[0].numpy()


def one_text(enc: TextEncoder, text: str) -> list[int]:
    return [enc.tokenizer.bos_id, *enc.tokenizer.encode_batch([text])[0].tolist(), enc.tokenizer.eos_id]


@pytest.mark.parametrize("batch_tokens", [1, 100, 16_384])
def test_texts_equal_one_at_a_time_in_order(enc: TextEncoder, batch_tokens: int) -> None:
    found = enc.encode(TEXTS, layers=[0, 1, -1], batch_tokens=batch_tokens)
    assert found.shape == (3, len(TEXTS), 32)
    assert found.dtype == np.float32
    for row, text in enumerate(TEXTS):
        for place, layer in enumerate([0, 1, 2]):
            expected = states(enc, one_text(enc, text), layer).mean(0)
            np.testing.assert_allclose(found[place, row], expected, atol=1e-5)
    np.testing.assert_array_equal(enc.encode(TEXTS, layers=[0, 1, -1], batch_tokens=batch_tokens), found)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN in this build")
def test_float32_products_are_those_of_onednn_and_others_are_not(run: Path) -> None:
    for dtype, products in ((torch.float32, 2 * 4), (torch.bfloat16, 0)):  # 4 matrices in each of 2 blocks
        encoder = load_encoder(run, device="cpu", dtype=dtype)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            encoder.encode(TEXTS[:1])
        assert sum(event.name == "mkldnn::_linear_pointwise" for event in seen.events()) == products


def test_poolings_and_one_layer(enc: TextEncoder) -> None:
    alone = np.stack([states(enc, one_text(enc, text), -1)[0] for text in TEXTS])
    np.testing.assert_allclose(enc.encode(TEXTS, pooling="first"), alone, atol=1e-5)
    largest = np.stack([states(enc, one_text(enc, text), 1).max(0) for text in TEXTS])
    np.testing.assert_allclose(enc.encode(TEXTS, layers=1, pooling="max"), largest, atol=1e-5)
    raw, normed = (enc.encode(TEXTS, pooling="first", final_norm=norm) for norm in (False, True))
    rms = np.sqrt((raw**2).mean(1, keepdims=True) + enc.encoder.args.norm_eps)
    np.testing.assert_allclose(raw / rms, normed, atol=1e-5)
    assert np.abs(raw - normed).max() > 1e-2


def test_pairs_are_one_sequence(enc: TextEncoder) -> None:
    a, b = (enc.tokenizer.encode_batch([text])[0].tolist() for text in TEXTS[:2])
    bos, eos = enc.tokenizer.bos_id, enc.tokenizer.eos_id
    found = enc.encode(TEXTS[:1], pairs=TEXTS[1:2])
    np.testing.assert_allclose(found[0], states(enc, [bos, *a, eos, eos, *b, eos], -1).mean(0), atol=1e-5)
    with pytest.raises(UserError, match="2 texts and 1 second texts"):
        enc.encode(TEXTS[:2], pairs=TEXTS[:1])


@pytest.mark.parametrize(
    ("a", "b", "room", "kept"),
    [
        (30, 2, 16, (14, 2)),
        (2, 30, 16, (2, 14)),
        (30, 30, 16, (8, 8)),
        (30, 30, 17, (9, 8)),
        (9, 7, 16, (9, 7)),
    ],
)
def test_truncation_is_counted_and_the_longer_side_loses_first(
    a: int, b: int, room: int, kept: tuple[int, int]
) -> None:
    enc = roberta(max_length=room + 4)
    texts = [" the" * a, " a" * b]
    ids_a, ids_b = enc.tokenizer.encode_batch(texts)
    assert (len(ids_a), len(ids_b)) == (a, b)
    sequences = enc.text_sequences(texts[:1], texts[1:])
    assert sequences.ids[0].tolist() == [0, *ids_a[: kept[0]], 2, 2, *ids_b[: kept[1]], 2]
    assert sequences.truncated == int((a, b) != kept)


def test_a_long_text_keeps_its_beginning_and_its_end_token() -> None:
    enc = roberta(max_length=8)
    found = enc.encode(["one two three four five six seven eight nine", "one"])
    ids = one_text(enc, "one two three four five six")
    assert len(ids) == 8
    np.testing.assert_allclose(found[0], states(enc, ids, -1).mean(0), atol=1e-5)
    assert enc.truncated == 1
    with pytest.raises(UserError, match="max_length=5"):
        roberta(max_length=5)


def test_padding_stays_under_a_tenth() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 1, size=2000).astype(np.int64), 2, 512)
    batches = list(length_buckets(lengths, 4096))
    assert sorted(np.concatenate(batches).tolist()) == list(range(2000))
    for batch in batches:
        padded = len(batch) * lengths[batch].max()
        assert padded <= 4096
        assert lengths[batch].sum() >= 0.9 * padded
    assert len(batches) < 100
    assert [batch.tolist() for batch in length_buckets(np.array([5, 900, 5]), 10)] == [[1], [0, 2]]
    assert list(length_buckets(np.array([], dtype=np.int64), 10)) == []


def test_padding_of_real_texts_is_counted(enc: TextEncoder) -> None:
    enc.encode(TEXTS * 30)
    assert enc.tokens == 30 * sum(len(one_text(enc, text)) for text in TEXTS)
    assert enc.tokens <= enc.padded_tokens < enc.tokens / 0.9


AWKWARD = [
    ["Where", "'s", "the", "dog", "'s", "ball", "?"],
    ["``", "state-of-the-art", "''", "café", "naïve", ";", "$", "3.50"],
    ["don't", "1999", "x²", "日本語", "🙂", "ﬁne", "…", "</s>", "<mask>"],
    ["the", "the", "The", "unbelievability", "."],
    ["e\u0301", "A.B.C.", "--", "-", "'", "''s", "a"],
    ["New York", "is", "big"],
]


@pytest.mark.parametrize("kind", ["roberta", "sentencepiece"])
def test_words_have_the_pieces_of_their_sentence(kind: str, enc: TextEncoder) -> None:
    enc = roberta() if kind == "roberta" else enc
    pieces = enc._word_ids(AWKWARD)
    for words, ids in zip(AWKWARD, pieces, strict=True):
        assert len(ids) == len(words)
        (whole,) = enc.tokenizer.encode_batch([" ".join(words)])
        assert np.concatenate(ids).tolist() == whole.tolist()
    if kind == "roberta":
        firsts = [enc.tokenizer.decode(ids[:1]) for ids in pieces[0]]
        assert firsts == ["Where", " '", " the", " dog", " '", " ball", " ?"]


@pytest.mark.parametrize("kind", ["roberta", "sentencepiece"])
def test_word_features_are_the_states_of_first_pieces(kind: str, enc: TextEncoder) -> None:
    enc = roberta() if kind == "roberta" else enc
    found, kept = enc.encode_words(AWKWARD, layers=[0, 1], batch_tokens=40)
    assert kept.all()
    assert found.shape[:2] == (2, sum(len(words) for words in AWKWARD))
    row = 0
    for words in AWKWARD:
        ids, firsts = [enc.tokenizer.bos_id], []
        for piece_ids in enc._word_ids([words])[0]:
            firsts.append(len(ids))
            ids += piece_ids.tolist()
        ids.append(enc.tokenizer.eos_id)
        for place, layer in enumerate([0, 1]):
            np.testing.assert_allclose(found[place, row : row + len(words)], states(enc, ids, layer)[firsts], atol=1e-5)
        row += len(words)


def test_words_of_one_batch_come_back_in_order() -> None:
    enc = roberta()
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    sentences = [words, [*words, "one"], [*words, "two", "one"]]  # one batch, in which the longest comes first
    found, _ = enc.encode_words(sentences)
    alone = [enc.encode_words([sentence])[0] for sentence in sentences]
    np.testing.assert_allclose(found, np.concatenate(alone), atol=1e-5)


def test_words_beyond_the_length_are_told_apart() -> None:
    enc = roberta(max_length=8)
    long = "antidisestablishmentarianism"
    sentences = [["one"] * 10, ["two", "three"], ["one"] * 5 + [long, "end"]]
    found, kept = enc.encode_words(sentences)
    assert len(enc._word_ids(sentences)[2][5]) > 1  # this word is cut within: its first piece is there
    assert kept.tolist() == [True] * 6 + [False] * 4 + [True] * 2 + [True] * 6 + [False]
    assert len(found) == 14
    assert enc.truncated == 2


def test_what_has_no_token_is_refused(enc: TextEncoder) -> None:
    with pytest.raises(UserError, match=r"text 1 \(''\) has no token"):
        enc.encode(["dog", ""])
    with pytest.raises(UserError, match="sentence 1 has no words"):
        enc.encode_words([["dog"], []])
    for encoder in (enc, roberta()):
        with pytest.raises(UserError, match=r"word 2 of sentence 0 \(' '\) has no token"):
            encoder.encode_words([["a", "dog", " "]])
    with pytest.raises(UserError, match=r"text 1 \('\\ud83d dog'\) has half of a surrogate pair"):
        enc.encode(["dog", "\ud83d dog"])
    with pytest.raises(UserError, match=r"word 1 of sentence 0 .* has half of a surrogate pair"):
        enc.encode_words([["dog", "\udc00"]])
    with pytest.raises(UserError, match="found one string"):
        enc.encode("some text")
    assert enc.encode([]).shape == (0, 32)


@pytest.mark.parametrize("bad", [None, 3, b"dog", ["dog"]])
def test_what_is_no_text_is_refused(enc: TextEncoder, bad: object) -> None:
    with pytest.raises(UserError, match=r"text 1 is .*: expected a string"):
        enc.encode(["dog", bad])
    with pytest.raises(UserError, match=r"text 0 is .*: expected a string"):
        enc.encode(["dog"], pairs=[bad])
    with pytest.raises(UserError, match=r"word 1 of sentence 0 is .*: expected a string"):
        enc.encode_words([["dog", bad]])
    with pytest.raises(UserError, match="sentence 1 is 'a dog': expected a list of words"):
        enc.encode_words([["dog"], "a dog"])


@pytest.mark.parametrize("layers", ["all", [], [0.5], 0.5, None, ["1"], [True]])
def test_what_are_no_layers_is_refused(enc: TextEncoder, layers: object) -> None:
    message = rf"layers={re.escape(repr(layers))}: expected a layer's number, or a list"
    with pytest.raises(UserError, match=message):
        enc.encode(["dog"], layers=layers)
    with pytest.raises(UserError, match=message):
        enc.encode_words([["dog"]], layers=layers)


def test_layers_may_be_numpys(enc: TextEncoder) -> None:
    np.testing.assert_array_equal(enc.encode(["dog"], layers=np.int64(1)), enc.encode(["dog"], layers=1))
    np.testing.assert_array_equal(enc.encode(["dog"], layers=np.array([0, 2])), enc.encode(["dog"], layers=[0, 2]))


@pytest.mark.parametrize("batch_tokens", [0, -5])
def test_batches_without_tokens_are_refused(enc: TextEncoder, batch_tokens: int) -> None:
    with pytest.raises(UserError, match=f"batch_tokens={batch_tokens}: expected at least 1"):
        enc.encode(["dog"], batch_tokens=batch_tokens)
    with pytest.raises(UserError, match=f"batch_tokens={batch_tokens}: expected at least 1"):
        enc.encode_words([["dog"]], batch_tokens=batch_tokens)


def test_unknown_layer_and_pooling_are_refused(enc: TextEncoder) -> None:
    with pytest.raises(UserError, match="layer 3"):
        enc.encode(["dog"], layers=3)
    with pytest.raises(UserError, match="pooling=cls: expected one of mean, first, last, max"):
        enc.encode(["dog"], pooling="cls")


def test_non_finite_states_are_refused(run: Path) -> None:
    enc = load_encoder(run, device="cpu")
    with torch.no_grad():
        enc.encoder.layers[1].ffn.w2.weight[0, 0] = torch.nan
    assert np.isfinite(enc.encode(["dog"], layers=1)).all()
    with pytest.raises(UserError, match="features of layer -1: NaN or infinity in 2 of 2 rows"):
        enc.encode(["dog", "fox"])


def test_random_init_is_the_run_before_its_first_step(run: Path) -> None:
    trained, untrained = load_encoder(run), load_encoder(run, random_init=True)
    again = load_encoder(run, random_init=True)
    matrix = untrained.encoder.layers[0].ffn.w2.weight
    assert torch.equal(matrix, again.encoder.layers[0].ffn.w2.weight)
    assert not torch.equal(matrix, trained.encoder.layers[0].ffn.w2.weight)
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(untrained.encoder.norm.weight, torch.ones(32))


@pytest.mark.parametrize("device", ["gpu", "xpu:9"])
def test_a_device_that_is_not_there_is_refused(run: Path, device: str) -> None:
    with pytest.raises(UserError, match=f"device={device} cannot be used: .*; try device=cpu"):
        load_encoder(run, device=device)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"name": "roberta"}, vocab_size=100)
    with pytest.raises(UserError, match="50265 ids, the encoder's embedding 100 rows"):
        load_encoder(run)


def test_another_vocabulary_at_the_same_path_is_refused(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "pieces")
    trained = SentencePieceTokenizer(str(path))
    run = make_run(tmp_path / "run", {"name": "sentencepiece", "path": str(path)}, trained.vocab_size)
    original = path.read_bytes()
    expected = load_encoder(run, device="cpu").encode(TEXTS)

    train_sentencepiece(tmp_path / "pieces", vocab_size=70)
    other = SentencePieceTokenizer(str(path))
    assert other.vocab_size < trained.vocab_size  # its ids all have a row in the embedding
    for folder in (run, run / "checkpoints" / f"{3:010d}"):
        with pytest.raises(UserError) as error:
            load_encoder(folder, device="cpu")
        for tokenizer in (other, trained):
            seen = f"sentencepiece, {tokenizer.vocab_size} ids, sha256 {tokenizer.identity()['sha256'][:8]}"
            assert seen in str(error.value)
        assert str(path) in str(error.value)

    (run / "tokenizer").mkdir()
    (run / "tokenizer/x.model").write_bytes(original)  # the run's own copy comes first
    np.testing.assert_array_equal(load_encoder(run, device="cpu").encode(TEXTS), expected)
    path.unlink()
    np.testing.assert_array_equal(load_encoder(run, device="cpu").encode(TEXTS), expected)
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(UserError, match="no such file"):
        load_encoder(run, device="cpu")
