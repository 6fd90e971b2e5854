"""Frozen features: hidden states of texts and words from any layers of a trained encoder.

>>> enc = load_encoder("runs/x")
>>> enc.encode(["some text"])  # [1, D]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lingua.checkpoint import load_encoder_weights, read_state, resolve
from lingua.errors import UserError
from lingua.probe import check_finite
from lingua.resume import check_tokenizer
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer, prefer_copy
from lingua.transformer import Encoder, init_weights

# Pooled state [B, D] of padded states [B, S, D] and the mask [B, S] of real tokens, specials included.
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x_BSD, real_BS: (x_BSD * real_BS[..., None]).sum(1) / real_BS.sum(1, keepdim=True),
    "first": lambda x_BSD, real_BS: x_BSD[:, 0],  # of <s>
    "max": lambda x_BSD, real_BS: x_BSD.masked_fill(~real_BS[..., None], -torch.inf).amax(1),
}
MIN_REAL = 0.9  # least fraction of real tokens in a batch


class TextEncoder:
    """A frozen encoder with its tokenizer: texts in, NumPy float32 features out, in the order of the input.

    A text becomes ``<s> tokens </s>``, a pair ``<s> a </s></s> b </s>``, cut to ``max_length`` tokens (of a
    pair the longer side loses first). Layers are numbered as in :meth:`Encoder.encode`.

    Attributes:
        n_layers: blocks; the layers are 0 (embedding) to ``n_layers``.
        truncated: number of sequences cut so far.
        tokens, padded_tokens: tokens encoded so far, without and with padding.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        max_length: int,
        config: dict[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        if max_length < 6:
            raise UserError(f"max_length={max_length}: special tokens take up to 4, so at least 6 are needed")
        self.encoder = encoder.to(device).eval()
        self.tokenizer, self.max_length, self.config, self.device = (
            tokenizer,
            max_length,
            config or {},
            device,
        )
        self.n_layers = encoder.args.n_layers
        self.truncated = self.tokens = self.padded_tokens = 0

    def encode(
        self,
        texts: Sequence[str],
        layers: int | Sequence[int] = -1,
        pairs: Sequence[str] | None = None,
        pooling: str = "mean",
        batch_tokens: int = 16_384,
        final_norm: bool = True,
    ) -> np.ndarray:
        """One vector a text (or pair).

        Args:
            layers: one number gives [n, D], several give [L, n, D], all from one pass.
            pairs: second text of each pair.
            pooling: ``mean`` over the real tokens, ``<s>`` and ``</s>`` among them; ``max``; ``first``.
            batch_tokens: most tokens in a batch, padding included.
            final_norm: apply the encoder's final norm to every layer but the embedding.

        Raises:
            UserError: what is no text or has no token, an unknown layer or pooling, NaN or infinity in the features.
        """
        wanted = _layer_list(layers)
        if isinstance(texts, str):
            raise UserError("encode takes a list of texts, found one string: write encode([text])")
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling}: expected one of {', '.join(POOLINGS)}")
        if pairs is not None and len(pairs) != len(texts):
            raise UserError(f"{len(texts)} texts and {len(pairs)} second texts: expected as many")
        sides = [self._token_ids(texts)] + ([] if pairs is None else [self._token_ids(pairs)])
        sequences = [self._sequence(*ids) for ids in zip(*sides, strict=True)]
        features = np.empty((len(wanted), len(texts), self.encoder.args.dim), dtype=np.float32)
        for index_B, states_LBSD, real_BS in self._batches(sequences, wanted, batch_tokens, final_norm):
            for layer, x_BSD in enumerate(states_LBSD):
                features[layer, index_B] = POOLINGS[pooling](x_BSD, real_BS).cpu().numpy()
        return _checked(features, wanted, layers)

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        layers: int | Sequence[int] = -1,
        batch_tokens: int = 16_384,
        final_norm: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """State of the first piece of each word of sentences that are split into words.

        Args: as :meth:`encode`.

        Returns:
            features of the words, sentence after sentence, [N, D] or [L, N, D]; and the mask over all words
            of those that are among them: words beyond ``max_length`` are not.

        Raises:
            UserError: a sentence without words, what is no word or has no token, an unknown layer, NaN or infinity
                in the features.
        """
        wanted = _layer_list(layers)
        pieces = self._word_ids(sentences)
        sequences, first_pieces, kept = [], [], []
        for words in pieces:
            starts = 1 + np.cumsum([0] + [len(ids) for ids in words[:-1]])  # after <s>
            sequences.append(self._sequence(np.concatenate(words)))
            kept.append(starts < len(sequences[-1]) - 1)  # before </s>
            first_pieces.append(starts[kept[-1]])
        first_row = np.cumsum([0] + [len(starts) for starts in first_pieces])
        features = np.empty((len(wanted), first_row[-1], self.encoder.args.dim), dtype=np.float32)
        for index_B, states_LBSD, _ in self._batches(sequences, wanted, batch_tokens, final_norm):
            in_batch = np.concatenate([np.full(len(first_pieces[i]), b) for b, i in enumerate(index_B)])
            position = np.concatenate([first_pieces[i] for i in index_B])
            rows = np.concatenate([np.arange(first_row[i], first_row[i + 1]) for i in index_B])
            for layer, x_BSD in enumerate(states_LBSD):
                features[layer, rows] = x_BSD[in_batch, position].cpu().numpy()
        return _checked(features, wanted, layers), np.concatenate(kept)

    def _token_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"text {index} is {text!r}: expected a string")
        encoded = self.tokenizer.encode_batch(list(texts))
        for index, ids in enumerate(encoded):
            if len(ids) == 0:
                raise UserError(f"text {index} ({texts[index]!r}) has no token: remove it or give it content")
        return encoded

    def _word_ids(self, sentences: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
        """Token ids of each word as it stands in its sentence, words being joined by spaces."""
        for index, words in enumerate(sentences):
            if isinstance(words, str):
                raise UserError(f"sentence {index} is {words!r}: expected a list of words")
            for place, word in enumerate(words):
                if not isinstance(word, str):
                    raise UserError(f"word {place} of sentence {index} is {word!r}: expected a string")
        # The first word of a text may have other pieces than the same word after a space. Neither kind of
        # tokenizer has pieces that cross a space, so what "a w" adds to "a" is w after a space.
        later = sorted({word for words in sentences for word in words[1:]})
        opening = sorted({words[0] for words in sentences if words})
        (context,) = self.tokenizer.encode_batch(["a"])
        after_space: dict[str, np.ndarray] = {}
        for word, ids in zip(later, self.tokenizer.encode_batch([f"a {word}" for word in later]), strict=True):
            if not np.array_equal(ids[: len(context)], context):
                raise UserError(f"the tokenizer merges {word!r} with the word before it: words have no pieces")
            after_space[word] = ids[len(context) :]
        at_start = dict(zip(opening, self.tokenizer.encode_batch(opening), strict=True))
        pieces = [
            [(after_space if place else at_start)[word] for place, word in enumerate(words)] for words in sentences
        ]
        for index, words in enumerate(pieces):
            if not words:
                raise UserError(f"sentence {index} has no words")
            for place, ids in enumerate(words):
                if len(ids) == 0 or not sentences[index][place].strip():
                    word = sentences[index][place]
                    raise UserError(f"word {place} of sentence {index} ({word!r}) has no token: remove it")
        return pieces

    def _sequence(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        bos, eos = [self.tokenizer.bos_id], [self.tokenizer.eos_id]
        room = self.max_length - (2 if b is None else 4)
        if len(a) + (0 if b is None else len(b)) > room:
            self.truncated += 1
        if b is None:
            return np.concatenate([bos, a[:room], eos]).astype(np.int64)
        keep_a = min(len(a), max(room - len(b), -(-room // 2)))  # a gives way only down to half of the room
        return np.concatenate([bos, a[:keep_a], eos, eos, b[: room - keep_a], eos]).astype(np.int64)

    @torch.inference_mode()
    def _batches(
        self, sequences: list[np.ndarray], layers: list[int], batch_tokens: int, final_norm: bool
    ) -> Iterator[tuple[np.ndarray, list[Tensor], Tensor]]:
        """Yield the sequences' indices [B], each layer's states [B, S, D] and the mask [B, S] of real tokens."""
        if batch_tokens < 1:
            raise UserError(f"batch_tokens={batch_tokens}: expected at least 1")
        for index_B in length_buckets(np.array([len(ids) for ids in sequences], dtype=np.int64), batch_tokens):
            rows = [torch.from_numpy(sequences[i]) for i in index_B]
            lengths_B = torch.tensor([len(row) for row in rows])
            tokens_BS = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_id)
            real_BS = torch.arange(tokens_BS.shape[1]) < lengths_B[:, None]
            self.tokens += int(lengths_B.sum())
            self.padded_tokens += tokens_BS.numel()
            states = self.encoder.encode(tokens_BS.to(self.device), lengths_B.to(self.device), layers, final_norm)
            yield index_B, states, real_BS.to(self.device)


def _layer_list(layers: int | Sequence[int]) -> list[int]:
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not given or not all(isinstance(layer, Integral) and not isinstance(layer, bool) for layer in given):
        raise UserError(f"layers={layers!r}: expected a layer's number, or a list of them such as [0, 4, -1]")
    return [int(layer) for layer in given]


def _checked(features_LND: np.ndarray, wanted: list[int], layers: int | Sequence[int]) -> np.ndarray:
    for name, features_ND in zip(wanted, features_LND, strict=True):
        check_finite(features_ND, f"features of layer {name}")
    return features_LND[0] if isinstance(layers, Integral) else features_LND


def length_buckets(lengths_N: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield the indices of each batch: like lengths together, longest first.

    A batch has at most ``batch_tokens`` tokens with padding (or one sequence), a tenth of them padding.
    """
    order = np.argsort(-lengths_N, kind="stable")
    start = 0
    while start < len(order):
        longest, real, end = int(lengths_N[order[start]]), 0, start
        while end < len(order):
            padded = longest * (end + 1 - start)
            real += int(lengths_N[order[end]])
            if end > start and (padded > batch_tokens or real < MIN_REAL * padded):
                break
            end += 1
        yield order[start:end]
        start = end


def _tokenizer_of(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer a checkpoint was trained with. Raises UserError if what is found now is another one."""
    args = prefer_copy(TokenizerArgs(**config), folder.parent.parent / "tokenizer")
    tokenizer = build_tokenizer(args)
    check_tokenizer(folder, read_state(folder), tokenizer, args)
    return tokenizer


def load_encoder(
    path: str | Path, random_init: bool = False, max_length: int | None = None, device: str | None = None
) -> TextEncoder:
    """The frozen encoder of a run, of any app.

    Args:
        path: run folder (its newest complete checkpoint) or checkpoint folder.
        random_init: the run's weights before its first step instead, the untrained baseline.
        max_length: most tokens of a sequence, specials included; None: the row length of the training data.
        device: None takes the GPU if there is one.

    Raises:
        UserError: no usable checkpoint or device, or a vocabulary that is not the one of the training.
    """
    folder = resolve(path)
    encoder, config = load_encoder_weights(folder)
    if random_init:
        # Weights are seeded by their names, which start so inside the trained model.
        whole = nn.ModuleDict({"encoder": encoder})
        init_weights(whole, encoder.args, config["seed"])
    tokenizer = _tokenizer_of(folder, config["data"]["tokenizer"])
    if tokenizer.vocab_size > encoder.args.vocab_size:
        raise UserError(
            f"{path}: the tokenizer {config['data']['tokenizer']} has {tokenizer.vocab_size} ids, the encoder's "
            f"embedding {encoder.args.vocab_size} rows: it is not the one that the run was trained with"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device} cannot be used: {str(error).splitlines()[0]}; try device=cpu") from None
    max_length = config["data"]["seq_len"] if max_length is None else max_length
    return TextEncoder(encoder, tokenizer, max_length, config, device)
