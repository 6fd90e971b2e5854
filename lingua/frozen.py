"""What every frozen encoder does, whatever its model and tokenizer: length-bucketed passes, poolings, any layers."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

from lingua.distributed import keep_freed_memory, precision
from lingua.errors import UserError
from lingua.evaluation.probe import check_finite
from lingua.onednn import PackedLinears
from lingua.progress import Progress

# Pooled state [B, D] of padded states [B, S, D] and the mask [B, S] of real tokens, specials included.
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x_BSD, real_BS: (x_BSD * real_BS[..., None]).sum(1) / real_BS.sum(1, keepdim=True),
    "first": lambda x_BSD, real_BS: x_BSD[:, 0],  # of <s>
    "last": lambda x_BSD, real_BS: x_BSD[torch.arange(len(x_BSD), device=x_BSD.device), real_BS.sum(1) - 1],  # of </s>
    "max": lambda x_BSD, real_BS: x_BSD.masked_fill(~real_BS[..., None], -torch.inf).amax(1),
}
MIN_REAL = 0.9  # least fraction of real tokens in a batch
HALF_PAIR = "half of a surrogate pair, which is no character"


class NoTokenError(UserError):
    """A text without any token.

    Attributes:
        index: its place among the texts.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(f"text {index} ({text!r}) has no token: remove it or give it content")
        self.index = index


@dataclass
class Sequences:
    """Texts as a model reads them."""

    ids: list[np.ndarray]  # int64 token ids with special tokens, one array a text
    types: list[np.ndarray] | None = None  # int64 token types, for models that tell the texts of a pair apart
    places: list[np.ndarray] | None = None  # the tokens whose states are wanted; None: the text is pooled
    kept: np.ndarray | None = None  # of words, which of all have a token within the length
    truncated: int = 0  # texts that were cut

    def every_token(self) -> Sequences:
        """The same texts, with the state of every token wanted."""
        return Sequences(self.ids, self.types, [np.arange(len(ids)) for ids in self.ids], truncated=self.truncated)

    def take(self, rows: np.ndarray) -> Sequences:
        """Some of the texts, all of them pooled."""
        types = None if self.types is None else [self.types[row] for row in rows]
        return Sequences([self.ids[row] for row in rows], types)

    def first_rows(self) -> np.ndarray:
        """[N + 1]: the row of the features at which each text begins, and their number."""
        counts = [1] * len(self.ids) if self.places is None else [len(places) for places in self.places]
        return np.cumsum([0, *counts])

    def digest(self) -> bytes:
        """Hash of everything that decides the features, given a model."""
        digest = hashlib.sha256()
        for part in (self.ids, self.types, self.places):
            digest.update(f"{part is None}".encode())
            for array in part or ():
                digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
        return digest.digest()


class FrozenEncoder(abc.ABC):
    """A frozen encoder with its tokenizer: texts in, NumPy float32 features out, in the order of the input.

    Layers are 0 (embedding) to ``n_layers``; negative numbers count from the last.

    Attributes:
        truncated: number of sequences cut so far.
        tokens, padded_tokens: tokens encoded so far, without and with padding.
    """

    model: nn.Module
    n_layers: int
    dim: int
    pad_id: int
    max_length: int  # most tokens of a sequence, specials included

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.truncated = self.tokens = self.padded_tokens = 0

    @abc.abstractmethod
    def text_sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Sequences:
        """Tokens of each text, or of each pair as one sequence, cut to ``max_length``. Raises UserError for what is
        no text or has no token."""

    @abc.abstractmethod
    def word_sequences(self, sentences: Sequence[Sequence[str]]) -> Sequences:
        """Tokens of sentences that are split into words, and the place of each word's first. Raises UserError for
        what is no word or has no token."""

    @abc.abstractmethod
    def layer_states(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int], final_norm: bool
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (layer, states [B, S, D]) of right-padded rows. States in the padding do not matter."""

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
            pooling: ``mean`` over the real tokens, ``<s>`` and ``</s>`` among them; ``max``; ``first``; ``last``.
            batch_tokens: most tokens in a batch, padding included.
            final_norm: apply the encoder's final norm to every layer but the embedding.

        Raises:
            UserError: what is no text or has no token, an unknown layer or pooling, NaN or infinity in the features.
        """
        if isinstance(texts, str):
            raise UserError("encode takes a list of texts, found one string: write encode([text])")
        if pairs is not None and len(pairs) != len(texts):
            raise UserError(f"{len(texts)} texts and {len(pairs)} second texts: expected as many")
        return self._in_memory(layers, lambda: self.text_sequences(texts, pairs), pooling, batch_tokens, final_norm)[0]

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
        features, sequences = self._in_memory(
            layers, lambda: self.word_sequences(sentences), "mean", batch_tokens, final_norm
        )
        return features, sequences.kept

    def _in_memory(
        self,
        layers: int | Sequence[int],
        read: Callable[[], Sequences],
        pooling: str,
        batch_tokens: int,
        final_norm: bool,
    ) -> tuple[np.ndarray, Sequences]:
        wanted = _layer_list(layers)
        sequences = read()
        features_LND = np.empty((len(wanted), sequences.first_rows()[-1], self.dim), dtype=np.float32)
        self.run(sequences, wanted, pooling, batch_tokens, final_norm, list(features_LND))
        for layer, features_ND in zip(wanted, features_LND, strict=True):
            check_finite(features_ND, f"features of layer {layer}")
        return (features_LND[0] if isinstance(layers, Integral) else features_LND), sequences

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequences,
        layers: Sequence[int],
        pooling: str,
        batch_tokens: int,
        final_norm: bool,
        out: Sequence[np.ndarray],
        part: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
    ) -> None:
        """Write the features of ``layers`` into the arrays [N, D] of ``out``, as :meth:`Sequences.first_rows` says.

        Args:
            part: (i, n) does the i-th of n runs of consecutive texts only.
        """
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling}: expected one of {', '.join(POOLINGS)}")
        if batch_tokens < 1:
            raise UserError(f"batch_tokens={batch_tokens}: expected at least 1")
        arrays: dict[int, list[np.ndarray]] = {}
        for layer, array in zip(layers, out, strict=True):
            arrays.setdefault(self.layer_number(layer), []).append(array)
        first_row, n = sequences.first_rows(), len(sequences.ids)
        begin, end = n * part[0] // part[1], n * (part[0] + 1) // part[1]
        self.truncated += sequences.truncated if part[0] == 0 else 0
        lengths_N = np.array([len(ids) for ids in sequences.ids[begin:end]], dtype=np.int64)
        for index_B in length_buckets(lengths_N, batch_tokens):
            index_B = index_B + begin
            tokens_BS, lengths_B = self._padded([sequences.ids[i] for i in index_B], self.pad_id)
            types_BS = None
            if sequences.types is not None:
                types_BS, _ = self._padded([sequences.types[i] for i in index_B], 0)
            real_BS = torch.arange(tokens_BS.shape[1], device=self.device) < lengths_B[:, None]
            rows, places = index_B, None
            if sequences.places is not None:
                counts = [len(sequences.places[i]) for i in index_B]
                places = (
                    np.repeat(np.arange(len(index_B)), counts),
                    np.concatenate([sequences.places[i] for i in index_B]),
                )
                rows = np.concatenate([np.arange(first_row[i], first_row[i + 1]) for i in index_B])
            with precision(self.dtype, torch.device(self.device)), self._linears.in_use():
                for layer, x_BSD in self.layer_states(tokens_BS, types_BS, lengths_B, set(arrays), final_norm):
                    x_BSD = x_BSD.float()
                    values = (POOLINGS[pooling](x_BSD, real_BS) if places is None else x_BSD[places]).cpu().numpy()
                    for array in arrays[layer]:
                        array[rows] = values
            self.tokens += int(lengths_B.sum())
            self.padded_tokens += tokens_BS.numel()
            if progress is not None:
                progress.advance(len(index_B), int(lengths_B.sum()))

    @functools.cached_property
    def _linears(self) -> PackedLinears:
        return PackedLinears(self.model)

    def layer_number(self, layer: int) -> int:
        """``layer`` counted from 0. Raises UserError if the encoder does not have it."""
        if not -self.n_layers - 1 <= layer <= self.n_layers:
            raise UserError(f"layer {layer}: the encoder has layers 0 (embedding) to {self.n_layers}")
        return layer % (self.n_layers + 1)

    def weights_digest(self) -> bytes:
        """Hash of the model's weights, names and precision of computation."""
        return weights_digest(self.model, self.dtype)

    def _padded(self, rows: list[np.ndarray], padding: int) -> tuple[Tensor, Tensor]:
        lengths_B = torch.tensor([len(row) for row in rows], device=self.device)
        tensors = [torch.from_numpy(np.asarray(row, dtype=np.int64)) for row in rows]
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding).to(self.device), lengths_B


def weights_digest(model: nn.Module, dtype: torch.dtype) -> bytes:
    """Hash of a model's weights and names, and of the precision it computes in."""
    digest = hashlib.sha256(str(dtype).encode())
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def check_texts(texts: Sequence[str]) -> None:
    """Raise UserError at the first that is no string, or one that cannot be UTF-8."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"text {index} is {text!r}: expected a string")
        _check_unicode(text, f"text {index}")


def check_words(sentences: Sequence[Sequence[str]]) -> None:
    """Raise UserError at the first sentence or word that is none, or that has no text."""
    for index, words in enumerate(sentences):
        if isinstance(words, str):
            raise UserError(f"sentence {index} is {words!r}: expected a list of words")
        if len(words) == 0:
            raise UserError(f"sentence {index} has no words")
        for place, word in enumerate(words):
            if not isinstance(word, str):
                raise UserError(f"word {place} of sentence {index} is {word!r}: expected a string")
            if not word.strip():
                raise UserError(f"word {place} of sentence {index} ({word!r}) has no token: remove it")
            _check_unicode(word, f"word {place} of sentence {index}")


def _check_unicode(text: str, what: str) -> None:
    if has_half_pair(text):
        raise UserError(f"{what} ({text[:80]!r}) has {HALF_PAIR}: remove it")


def has_half_pair(text: str) -> bool:
    """Whether half of a surrogate pair stands in ``text`` by itself, as JSON can have it; no tokenizer takes that."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def usable_device(device: str | None) -> str:
    """``device``, or for None the GPU if there is one. Raises UserError if it cannot be used."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={device} cannot be used: {str(error).splitlines()[0]}; try device=cpu") from None
    if device == "cpu":
        keep_freed_memory()
    return device


def _layer_list(layers: int | Sequence[int]) -> list[int]:
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    if not given or not all(isinstance(layer, Integral) and not isinstance(layer, bool) for layer in given):
        raise UserError(f"layers={layers!r}: expected a layer's number, or a list of them such as [0, 4, -1]")
    return [int(layer) for layer in given]


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
