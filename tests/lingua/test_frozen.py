"""What does not depend on the encoder: poolings, token types in padding, batches, and the price of more layers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lingua.errors import UserError
from lingua.features import TextEncoder
from lingua.frozen import POOLINGS, FrozenEncoder, Sequences
from lingua.tokenizer import RobertaTokenizer
from lingua.transformer import Encoder, TransformerArgs, init_weights


class Counting(FrozenEncoder):
    """Layer 0 is the token id, layer 1 the token type, in every one of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.n_layers, self.dim, self.pad_id, self.max_length = nn.Identity(), 1, 2, 99, 10

    def text_sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Sequences:
        ids = [np.array([len(word) for word in text.split()]) for text in texts]
        return Sequences(ids, [np.arange(len(row)) for row in ids])

    def word_sequences(self, sentences: Sequence[Sequence[str]]) -> Sequences:
        raise NotImplementedError

    def layer_states(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int], final_norm: bool
    ) -> Iterator[tuple[int, Tensor]]:
        for layer, x_BS in enumerate((tokens_BS, types_BS)):
            if layer in layers:
                yield layer, x_BS[..., None].expand(-1, -1, 2).float()


TEXTS = ["a bb ccc", "dddd", "ee f", "ggggg hh i jj"] * 5


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("mean", [2.0, 4.0, 1.5, 2.5]), ("first", [1, 4, 2, 5]), ("last", [3, 4, 1, 2]), ("max", [3, 4, 2, 5])],
)
def test_poolings_leave_padding_out(pooling: str, expected: list[float]) -> None:
    found = Counting().encode(TEXTS, layers=0, pooling=pooling)
    np.testing.assert_allclose(found, np.repeat([expected * 5], 2, axis=0).T)
    assert set(POOLINGS) == {"mean", "first", "last", "max"}


def test_token_types_reach_the_model() -> None:
    found = Counting().encode(TEXTS, layers=[1, 0, 1], pooling="last")
    np.testing.assert_array_equal(found[0, :4, 0], [2, 0, 1, 3])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_part_of_the_texts_fills_a_part_of_the_rows() -> None:
    encoder = Counting()
    sequences = encoder.text_sequences(TEXTS).every_token()
    whole, parts = np.zeros((2, sequences.first_rows()[-1], 2), dtype=np.float32)
    encoder.run(sequences, [0], "mean", 8, True, [whole])
    for i in range(3):
        before = (parts != 0).any(1).sum()
        encoder.run(sequences, [0], "mean", 8, True, [parts], (i, 3))
        assert before < (parts != 0).any(1).sum()
    np.testing.assert_array_equal(whole, parts)
    taken = encoder.text_sequences(TEXTS).take(np.array([3, 1]))
    assert [ids.tolist() for ids in taken.ids] == [[5, 2, 1, 2], [4]]
    assert [types.tolist() for types in taken.types] == [[0, 1, 2, 3], [0]]


def test_bf16_is_close_and_not_the_same() -> None:
    args = TransformerArgs(dim=32, n_layers=2, n_heads=2, vocab_size=RobertaTokenizer.vocab_size, init_std=0.2)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        encoder = Encoder(args)
        init_weights(encoder, args, seed=0)
        found.append(TextEncoder(encoder, RobertaTokenizer(), 64, dtype=dtype).encode(["one text", "another one"]))
    assert found[1].dtype == np.float32
    assert 1e-5 < np.abs(found[0] - found[1]).max() < 0.1


def test_one_side_of_a_pair_may_be_empty() -> None:
    """Some of QQP's questions are."""
    args = TransformerArgs(dim=8, n_layers=1, n_heads=1, vocab_size=RobertaTokenizer.vocab_size)
    encoder = Encoder(args)
    init_weights(encoder, args, seed=0)
    frozen = TextEncoder(encoder, RobertaTokenizer(), 64)
    found = frozen.text_sequences(["", "one"], ["two", ""])
    two, one = (ids.tolist() for ids in frozen.tokenizer.encode_batch(["two", "one"]))
    assert [ids.tolist() for ids in found.ids] == [[0, 2, 2, *two, 2], [0, *one, 2, 2, 2]]
    with pytest.raises(UserError, match=r"text 1 \(''\) has no token"):
        frozen.text_sequences(["one", ""], ["", ""])


@pytest.mark.slow
def test_all_layers_cost_less_than_1_2_times_one() -> None:
    args = TransformerArgs(dim=384, n_layers=12, n_heads=6, vocab_size=2000)
    encoder = Encoder(args)
    init_weights(encoder, args, seed=0)
    frozen = TextEncoder(encoder, RobertaTokenizer(), 128)
    rng = np.random.default_rng(0)
    sequences = Sequences([rng.integers(10, 2000, size=n) for n in rng.integers(8, 128, size=40)])
    seconds: dict[int, list[float]] = {1: [], 13: []}
    for _ in range(3):
        for count in seconds:
            out = np.empty((count, len(sequences.ids), 384), dtype=np.float32)
            begun = time.process_time()  # of this process alone: the machine may be busy
            frozen.run(sequences, list(range(13 - count, 13)), "mean", 4096, True, list(out))
            seconds[count].append(time.process_time() - begun)
    ratio = min(seconds[13]) / min(seconds[1])
    assert ratio < 1.2, seconds
