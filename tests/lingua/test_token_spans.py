"""Where tokens stand in a text: no character is lost, whatever the tokenizer and the text."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from lingua.tokenizer import RobertaTokenizer, Tokenizer, TokenizerArgs, build_tokenizer, valid_text
from tests.real_text import ODD_TEXTS, real_lines
from tests.tiny_models import bytes_bpe, wordpiece
from tests.tiny_run import train_sentencepiece

TEXTS = [*ODD_TEXTS, *real_lines(40)]
KINDS = ["roberta", "bytes", "tiktoken", "hf", "hf-wordpiece", "sentencepiece"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    ranks = sorted(RobertaTokenizer().ranks.items(), key=lambda item: item[1])[:2000]
    (folder / "t.tiktoken").write_text("".join(f"{base64.b64encode(b).decode()} {rank}\n" for b, rank in ranks))
    bytes_bpe().save_pretrained(folder / "hf")
    wordpiece().save_pretrained(folder / "hf-wordpiece")
    paths = {
        "tiktoken": folder / "t.tiktoken",
        "hf": folder / "hf",
        "hf-wordpiece": folder / "hf-wordpiece",
        "sentencepiece": train_sentencepiece(folder / "pieces"),
    }
    return {
        kind: build_tokenizer(TokenizerArgs(kind.partition("-")[0], str(paths[kind]) if kind in paths else None))
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_cover_the_text_in_order(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for text in map(valid_text, TEXTS):
        (ids,) = tokenizer.encode_batch([text])
        spans = tokenizer.spans(text)
        assert spans.shape == (len(ids), 2)
        assert spans.dtype == np.int64
        assert (spans[:, 0] <= spans[:, 1]).all()
        assert (np.diff(spans, axis=0) >= 0).all()
        covered = {place for begin, end in spans for place in range(begin, end)}
        # Normalization drops control characters and marks, and no more.
        lost = [text[place] for place in range(len(text)) if place not in covered and not text[place].isspace()]
        if kind in ("sentencepiece", "hf-wordpiece"):
            assert not any(letter.isalnum() for letter in lost)
            assert len(lost) <= 8
        else:
            assert lost == []


@pytest.mark.parametrize("kind", ["roberta", "bytes", "tiktoken", "hf"])
def test_what_a_byte_level_token_says_stands_there(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    whole = 0
    for text in map(valid_text, TEXTS):
        (ids,) = tokenizer.encode_batch([text])
        for index, (begin, end) in zip(ids, tokenizer.spans(text), strict=True):
            said = tokenizer.decode([index])
            if "\ufffd" in said:  # a part of a character
                assert said.strip("\ufffd").strip() in text[begin:end]
                continue
            assert text[begin:end].strip() == said.strip()  # the library leaves spaces out of what it says
            whole += 1
    assert whole > 1000


def test_a_character_of_several_tokens_belongs_to_each(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["bytes"].spans("é€😀x").tolist() == [
        [0, 1], [0, 1], [1, 2], [1, 2], [1, 2], [2, 3], [2, 3], [2, 3], [2, 3], [3, 4],
    ]  # fmt: skip
    assert tokenizers["roberta"].spans("").shape == (0, 2)
