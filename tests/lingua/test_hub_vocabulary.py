from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.hub.vocabulary import byte_letters, merge_of, to_library
from lingua.tokenizer import RobertaTokenizer, Tokenizer, TokenizerArgs, TrainArgs, build_tokenizer, train
from tests.support import made_up_documents
from tests.tiny_run import SENTENCES

TEXTS = [*SENTENCES, *made_up_documents(30), "İstanbul'da 3½ €…  x\n\n\ty", "#" * 7 + "-" * 23]


def same(tokenizer: Tokenizer, library: object) -> None:
    """All ids of all texts, with the specials around them."""
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        found = library.encode(text)
        assert found.ids == [tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id], found.tokens
    a, b = (ids.tolist() for ids in tokenizer.encode_batch(["one", " two"]))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert library.encode("one", " two").ids == [bos, *a, eos, eos, *b, eos]


def test_roberta() -> None:
    tokenizer = RobertaTokenizer()
    library = to_library(tokenizer)
    same(tokenizer, library)
    assert library.encode("Hello world!").ids == [0, 31414, 232, 328, 2]  # RoBERTa's own
    assert library.encode("The <mask> sat").tokens == ["<s>", "The", " <mask>", "Ġsat", "</s>"]
    assert library.decode(library.encode(TEXTS[0]).ids) == TEXTS[0]
    assert library.get_vocab_size() == 50265


def test_bytes() -> None:
    tokenizer = build_tokenizer(TokenizerArgs("bytes"))
    library = to_library(tokenizer)
    same(tokenizer, library)
    assert library.encode("é<mask>").ids == [256, 0xC3, 0xA9, 260, 258]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", r"\w+|\s+|[^\w\s]+"])
def test_tiktoken(pattern: str, tmp_path: Path) -> None:
    file = tmp_path / "some.tiktoken"
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    for rank, token in enumerate([b"th", b"the", b" the", b"er", b"in", b" a", b"and", b" and"], 256):
        lines.append(base64.b64encode(token) + b" %d" % (rank + 3))  # and a gap
    file.write_bytes(b"\n".join(lines))
    tokenizer = build_tokenizer(TokenizerArgs("tiktoken", str(file), pattern))
    same(tokenizer, to_library(tokenizer))


def test_a_pattern_that_means_something_else_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "some.tiktoken"
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    file.write_bytes(b"\n".join([*lines, base64.b64encode(b"):") + b" 256"]))
    # "$" is the end of the text in one library, of a line in the other
    tokenizer = build_tokenizer(TokenizerArgs("tiktoken", str(file), r"\):$|[\s\S]"))
    with pytest.raises(UserError, match=r"this tiktoken vocabulary cannot be written as tokenizer\.json"):
        to_library(tokenizer)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_sentencepiece(kind: str, byte_fallback: bool, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "some.model"
    corpus.write_text("\n".join(TEXTS))
    size = 380 if byte_fallback else 120
    train(TrainArgs(input=str(corpus), out=str(out), vocab_size=size, kind=kind, byte_fallback=byte_fallback))
    tokenizer = build_tokenizer(TokenizerArgs("sentencepiece", str(out)))
    library = to_library(tokenizer)
    if kind == "bpe":
        same(tokenizer, library)
    else:  # the same pieces; in what order repeated ones come is rounding
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            found = library.encode(text, add_special_tokens=False).ids
            assert sorted(found) == sorted(ids.tolist())
            assert found == ids.tolist() or any(a == b for a, b in itertools.pairwise(text))
    assert library.decode(library.encode(SENTENCES[0]).ids) == SENTENCES[0]


def test_sentencepiece_of_words_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5), model_prefix=str(tmp_path / "words"), model_type="word", vocab_size=30,
        bos_id=0, pad_id=1, eos_id=2, unk_id=3, control_symbols=["<mask>"], minloglevel=2,
    )  # fmt: skip
    tokenizer = build_tokenizer(TokenizerArgs("sentencepiece", str(tmp_path / "words.model")))
    with pytest.raises(UserError, match="of words or characters cannot be written"):
        to_library(tokenizer)


def test_a_vocabulary_of_the_hub_gets_the_specials_it_lacks(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmno")]
    library = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    library.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    library.enable_truncation(5)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerArgs("hf", str(tmp_path)))
    assert tokenizer.appended == ("<mask>",)
    made = to_library(tokenizer)
    same(tokenizer, made)
    assert made.encode("Ab <mask> c").ids == [1, words.index("a"), words.index("##b"), len(words), words.index("c"), 2]
    made.save(str(tmp_path / "again.json"))
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["truncation"], again["padding"]) == (None, None)


def test_letters_and_merges_by_hand() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert (letters[ord(" ")], letters[ord("\n")], letters[ord("a")], letters[0xE9]) == ("Ġ", "Ċ", "a", "é")
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 6, b"aXb": 7}
    assert merge_of(ranks, b"a") is None
    assert merge_of(ranks, b"ab") == (b"a", b"b")
    assert merge_of(ranks, b"abc") == (b"a", b"bc")  # "bc" is merged before "ab"
    assert merge_of(ranks, b"cab") == (b"c", b"ab")
    assert merge_of(ranks, b"aXb") is None
