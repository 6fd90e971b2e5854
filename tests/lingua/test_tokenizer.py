import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from lingua.errors import UserError
from lingua.hashing import counter_hash
from lingua.tokenizer import SPECIALS, TokenizerArgs, TrainArgs, _sample, build_tokenizer, train
from tests.real_text import ODD_TEXTS, real_lines


@pytest.fixture(scope="module")
def roberta():
    return build_tokenizer(TokenizerArgs())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in real_lines(3000)))
    return path


@pytest.fixture(scope="module")
def pieces(corpus):
    """A small SentencePiece tokenizer and its file."""
    out = corpus.with_name("small.model")
    train(TrainArgs(input=str(corpus), out=str(out), vocab_size=500, character_coverage=0.99))
    return build_tokenizer(TokenizerArgs("sentencepiece", str(out))), out


def transformers_roberta(tokenizer):
    """transformers' tokenizer from the same vocabulary; merges recovered by running BPE on every token."""
    from transformers import RobertaTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spell(token):
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:  # apply the merges that come before this token's own
            rank_of_pair = [tokenizer.ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(range(len(rank_of_pair)), key=rank_of_pair.__getitem__)
            assert rank_of_pair[best] < rank
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    vocab = {tokenizer.decode([i]): i for i in tokenizer.special_ids}
    vocab |= {spell(token): 4 + i for i, token in enumerate(tokenizer.token_bytes)}
    assert len(vocab) == 50_265
    return RobertaTokenizer(vocab=vocab, merges=merges, split_special_tokens=True)


def test_roberta_ids_equal_transformers(roberta):
    oracle = transformers_roberta(roberta)
    lines = real_lines(10_000)
    lines += [f"{line} {odd} {line[::-1]}" for line, odd in zip(lines, ODD_TEXTS, strict=False)] + ODD_TEXTS
    expected = oracle(lines, add_special_tokens=False)["input_ids"]
    found = roberta.encode_batch(lines)
    assert sum(map(len, found)) > 100_000
    for line, ids, reference in zip(lines, found, expected, strict=True):
        assert ids.tolist() == reference, line
    assert oracle("Hello world!")["input_ids"] == [0, 31414, 232, 328, 2]


def test_roberta_known_ids(roberta):
    hello, a, c = roberta.encode_batch(["Hello world!", "a b", "c d"])
    assert hello.tolist() == [31414, 232, 328]
    assert hello.dtype == np.int32
    pair = [roberta.bos_id, *a, roberta.eos_id, roberta.eos_id, *c, roberta.eos_id]
    assert pair == [0, 102, 741, 2, 2, 438, 385, 2]
    assert (roberta.vocab_size, roberta.pad_id, roberta.unk_id, roberta.mask_id) == (50_265, 1, 3, 50_264)
    assert [roberta.decode([i]) for i in (4, 5, 6, 7, 50_108, 50_111)] == [".", " the", ",", " to", "\0", "\3"]


def test_roberta_decodes_what_it_encoded(roberta):
    for text in ODD_TEXTS + real_lines(500):
        assert roberta.decode(roberta.encode_batch([text])[0]) == text
    assert roberta.decode([0, 31414, 50_264, 2]) == "<s>Hello<mask></s>"


def test_literal_special_tokens_are_text(roberta, pieces):
    text = " ".join(SPECIALS) + "<mask></s><|endoftext|>madeupword0001"
    ids = roberta.encode_batch([text])[0]
    assert not set(ids.tolist()) & set(roberta.special_ids)
    assert roberta.decode(ids) == text
    small = pieces[0]
    ids = small.encode_batch([text])[0].tolist()
    assert not set(ids) & {small.bos_id, small.pad_id, small.eos_id, small.mask_id}


def test_surrogates_are_read_as_replacement_characters(roberta, pieces):
    for tokenizer in (roberta, pieces[0]):
        lone, replaced, pair, joined = tokenizer.encode_batch(["x\ud800y", "x\ufffdy", "\ud83d\ude00", "😀"])
        assert lone.tolist() == replaced.tolist()
        assert pair.tolist() == joined.tolist()


def test_no_text_gives_no_ids(roberta, pieces):
    for tokenizer in (roberta, pieces[0]):
        assert tokenizer.encode_batch([]) == []
        (ids,) = tokenizer.encode_batch([""])
        assert (ids.shape, ids.dtype) == ((0,), np.int32)
        assert tokenizer.decode([]) == ""
        with pytest.raises(UserError, match="outside this vocabulary"):
            tokenizer.decode([tokenizer.vocab_size])


def test_sentencepiece_ids_are_the_librarys(pieces):
    tokenizer, path = pieces
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    lines = [line for line in real_lines(500) if "<" not in line] + ODD_TEXTS[:-4]
    assert [ids.tolist() for ids in tokenizer.encode_batch(lines)] == library.encode(lines)
    ids = tokenizer.encode_batch(["some words"])[0]
    assert tokenizer.decode(ids) == "some words"
    assert tokenizer.decode([0, *ids, 4, *ids, 2]) == "<s>some words<mask>some words</s>"
    assert [tokenizer.decode([i]) for i in range(5)] == list(SPECIALS)
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert tokenizer.vocab_size == 500


def test_training_a_vocabulary_is_deterministic_and_independent_of_paths(corpus, pieces, tmp_path):
    elsewhere = tmp_path / "other" / "name.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(corpus.read_bytes())
    command = [sys.executable, "-m", "lingua.tokenizer", "train", f"input={elsewhere}", "vocab_size=500"]
    command += ["character_coverage=0.99", f"out={tmp_path}/new/v.model"]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert said[0] == f"{elsewhere}: reading 1 files of {elsewhere.stat().st_size / 1e6:.1f} MB in all"
    assert re.fullmatch(r"training a unigram vocabulary of 500 on [\d,]+ sentences", said[1])
    assert re.fullmatch(rf"{tmp_path}/new/v\.model: 500 pieces from [\d,]+ sentences, \d+ s", said[2])
    assert re.search(rf"{elsewhere}: [\d,]+ sentences, [\d,]+ sentences/s", done.stderr)
    tokenizer, path = pieces
    assert (tmp_path / "new" / "v.model").read_bytes() == path.read_bytes()
    again = build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/new/v.model"))
    assert again.identity() == tokenizer.identity() == json.loads(json.dumps(tokenizer.identity()))
    assert str(tmp_path) not in json.dumps(again.identity())


def test_identity_tells_vocabularies_apart(corpus, pieces, roberta, tmp_path):
    out = tmp_path / "other.model"
    train(TrainArgs(input=str(corpus), out=str(out), vocab_size=500, kind="bpe", character_coverage=0.99))
    identities = [t.identity() for t in (roberta, pieces[0], build_tokenizer(TokenizerArgs("sentencepiece", str(out))))]
    assert len({identity["sha256"] for identity in identities}) == 3


def test_byte_fallback_leaves_nothing_unknown(corpus, pieces, tmp_path):
    out = tmp_path / "bytes.model"
    train(TrainArgs(input=str(corpus), out=str(out), vocab_size=700, character_coverage=0.99, byte_fallback=True))
    tokenizer = build_tokenizer(TokenizerArgs("sentencepiece", str(out)))
    assert tokenizer.unk_id not in tokenizer.encode_batch(["ﷺ 𓀀"])[0]
    assert pieces[0].unk_id in pieces[0].encode_batch(["ﷺ 𓀀"])[0]
    assert tokenizer.decode(tokenizer.encode_batch(["𓀀"])[0]) == "𓀀"


def test_the_sample_is_the_sentences_with_the_smallest_hashes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": " ".join(f"Sentence {i}." for i in range(100))}) + "\n")
    sample = _sample(TrainArgs(input=str(path), out="x", sample_sentences=10, seed=3))
    hashes = np.array([counter_hash(3, i) for i in range(100)])
    assert sample == [f"Sentence {i}." for i in sorted(np.argsort(hashes)[:10])]
    assert _sample(TrainArgs(input=str(path), out="x", sample_sentences=0)) == [f"Sentence {i}." for i in range(100)]


def test_the_end_of_a_long_line_is_trained_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "word and other words " * 2000 + "ж " * 500}) + "\n")
    train(TrainArgs(input=str(path), out=f"{tmp_path}/v.model", vocab_size=30, character_coverage=1.0))
    tokenizer = build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/v.model"))
    assert tokenizer.unk_id not in tokenizer.encode_batch(["ж"])[0]


def test_bad_tokenizers(tmp_path, corpus):
    with pytest.raises(UserError, match=r"tokenizer\.name=bert.*roberta, sentencepiece"):
        TokenizerArgs("bert")
    with pytest.raises(UserError, match="needs path"):
        TokenizerArgs("sentencepiece")
    with pytest.raises(UserError, match=r"takes no path, found path=x\.model"):
        TokenizerArgs("roberta", "x.model")
    with pytest.raises(UserError, match=r"missing\.model: no such file"):
        build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/missing.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"bad\.model: not a SentencePiece model"):
        build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/bad.model"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(real_lines(500)), model_prefix=f"{tmp_path}/plain", vocab_size=300, minloglevel=2,
        user_defined_symbols=["<mask>"], pad_id=3,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"plain\.model: no special piece <mask>"):
        build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/plain.model"))
    with pytest.raises(UserError, match=r"vocab_size=90000 on \d+ sentences"):
        train(TrainArgs(input=str(corpus), out=f"{tmp_path}/big.model", vocab_size=90_000))
    assert not (tmp_path / "big.model").exists()
    with pytest.raises(UserError, match="cannot write"):
        train(TrainArgs(input=str(corpus), out=f"{corpus}/v.model", vocab_size=300, character_coverage=0.98))
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="no text to train"):
        train(TrainArgs(input=f"{tmp_path}/empty.jsonl", out=f"{tmp_path}/e.model"))


def test_very_long_words_take_linear_time(roberta):
    texts = ["a" * 300_000, " " * 300_000, "\n \n" * 100_000, "7" * 300_000]
    for text, ids in zip(texts, roberta.encode_batch(texts), strict=True):
        assert roberta.decode(ids) == text
