"""Frozen features: hidden states of texts and words from any layers of a trained encoder.

>>> enc = load_encoder("runs/x")
>>> enc.encode(["some text"])  # [1, D]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lingua.attention import CAUSAL
from lingua.checkpoint import load_encoder_weights, read_state, resolve
from lingua.errors import UserError
from lingua.frozen import FrozenEncoder, NoTokenError, Sequences, check_texts, check_words, usable_device
from lingua.resume import check_tokenizer
from lingua.storage import as_path
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer, prefer_copy
from lingua.transformer import Encoder, init_weights


class TextEncoder(FrozenEncoder):
    """A frozen encoder of this project.

    A text becomes ``<s> tokens </s>``, a pair ``<s> a </s></s> b </s>``, cut to ``max_length`` tokens (of a
    pair the longer side loses first).
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        max_length: int,
        config: dict[str, Any] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        causal: bool = False,
    ) -> None:
        super().__init__(device, dtype)
        self.causal = causal  # a token sees those before it only, as the model was trained
        if max_length < 6:
            raise UserError(f"max_length={max_length}: special tokens take up to 4, so at least 6 are needed")
        self.model = self.encoder = encoder.to(device).eval()
        self.tokenizer, self.max_length, self.config = tokenizer, max_length, config or {}
        self.n_layers, self.dim, self.pad_id = encoder.args.n_layers, encoder.args.dim, tokenizer.pad_id

    def text_sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Sequences:
        sides = [texts] if pairs is None else [texts, pairs]
        for side in sides:
            check_texts(side)
        rows = list(zip(*(self.tokenizer.encode_batch(list(side)) for side in sides), strict=True))
        for index, row in enumerate(rows):
            if not any(len(ids) for ids in row):
                raise NoTokenError(index, texts[index])
        room = self.max_length - 2 * len(sides)
        truncated = sum(sum(map(len, row)) > room for row in rows)
        return Sequences([self._sequence(*row) for row in rows], truncated=truncated)

    def weights_digest(self) -> bytes:
        return super().weights_digest() + (b"causal" if self.causal else b"")

    def word_sequences(self, sentences: Sequence[Sequence[str]]) -> Sequences:
        found = Sequences([], places=[])
        kept = [np.empty(0, dtype=bool)]
        for words in self._word_ids(sentences):
            starts = 1 + np.cumsum([0] + [len(ids) for ids in words[:-1]])  # after <s>
            whole = np.concatenate(words)
            found.ids.append(self._sequence(whole))
            found.truncated += len(whole) > self.max_length - 2
            kept.append(starts < len(found.ids[-1]) - 1)  # before </s>
            found.places.append(starts[kept[-1]])
        found.kept = np.concatenate(kept)
        return found

    def layer_states(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int], final_norm: bool
    ) -> Iterator[tuple[int, Tensor]]:
        key_ok_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < lengths_B[:, None]
        mask = None if bool(key_ok_BS.all()) else key_ok_BS[:, None, None, :]
        if self.causal:  # padding stands behind the text, out of sight
            mask = CAUSAL
        for layer, x_BSD in enumerate(self.encoder.states(tokens_BS, mask=mask)):
            if layer in layers:
                yield layer, self.encoder.norm(x_BSD) if final_norm and layer else x_BSD
            if layer == max(layers):
                return

    def _word_ids(self, sentences: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
        """Token ids of each word as it stands in its sentence, words being joined by spaces."""
        check_words(sentences)
        # The first word of a text may have other pieces than the same word after a space. Neither kind of
        # tokenizer has pieces that cross a space, so what "a w" adds to "a" is w after a space.
        later = sorted({word for words in sentences for word in words[1:]})
        opening = sorted({words[0] for words in sentences})
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
            for place, ids in enumerate(words):
                if len(ids) == 0:
                    word = sentences[index][place]
                    raise UserError(f"word {place} of sentence {index} ({word!r}) has no token: remove it")
        return pieces

    def _sequence(self, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        bos, eos = [self.tokenizer.bos_id], [self.tokenizer.eos_id]
        room = self.max_length - (2 if b is None else 4)
        if b is None:
            return np.concatenate([bos, a[:room], eos]).astype(np.int64)
        keep_a = min(len(a), max(room - len(b), -(-room // 2)))  # a gives way only down to half of the room
        return np.concatenate([bos, a[:keep_a], eos, eos, b[: room - keep_a], eos]).astype(np.int64)


def run_folder(path: str | Path, checkpoint: Path) -> Path:
    """The run folder that ``path`` means, whose (newest) checkpoint is ``checkpoint``; it may lie elsewhere."""
    if as_path(path) != checkpoint:
        return as_path(path)
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def _tokenizer_of(run: Path, folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer a checkpoint was trained with. Raises UserError if what is found now is another one."""
    args = prefer_copy(TokenizerArgs(**config), run / "tokenizer")
    tokenizer = build_tokenizer(args)
    check_tokenizer(folder, read_state(folder), tokenizer, args)
    return tokenizer


def load_encoder(
    path: str | Path,
    random_init: bool = False,
    max_length: int | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    run: Path | None = None,
) -> TextEncoder:
    """The frozen encoder of a run, of any app.

    Args:
        path: run folder (its newest complete checkpoint) or checkpoint folder.
        random_init: the run's weights before its first step instead, the untrained baseline.
        max_length: most tokens of a sequence, specials included; None: the row length of the training data.
        device: None takes the GPU if there is one.
        dtype: float32, or bfloat16 to compute in mixed precision.
        run: the run folder, if ``path`` is a checkpoint that lies elsewhere.

    Raises:
        UserError: no usable checkpoint or device, or a vocabulary that is not the one of the training.
    """
    folder = resolve(path)
    encoder, config = load_encoder_weights(folder)
    if random_init:
        # Weights are seeded by their names, which start so inside the trained model.
        whole = nn.ModuleDict({"encoder": encoder})
        init_weights(whole, encoder.args, config["seed"])
    tokenizer = _tokenizer_of(run or run_folder(path, folder), folder, config["data"]["tokenizer"])
    if tokenizer.vocab_size > encoder.args.vocab_size:
        raise UserError(
            f"{path}: the tokenizer {config['data']['tokenizer']} has {tokenizer.vocab_size} ids, the encoder's "
            f"embedding {encoder.args.vocab_size} rows: it is not the one that the run was trained with"
        )
    max_length = config["data"]["seq_len"] if max_length is None else max_length
    causal = read_state(folder).get("objective") == "clm"
    return TextEncoder(encoder, tokenizer, max_length, config, usable_device(device), dtype, causal)
