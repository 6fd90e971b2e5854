"""Text embeddings: an encoder with a pooler, and any embedding model, ours or not, behind one ``encode``.

>>> model = load_embedder("runs/embed")
>>> model.encode(["some text"], prompt="query")  # [1, D], of length 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.args import read_yaml
from lingua.attention import CAUSAL, Mask
from lingua.checkpoint import load_weights, read_state, resolve
from lingua.errors import UserError
from lingua.features import load_encoder, run_folder
from lingua.files import optional
from lingua.frozen import FrozenEncoder, Sequences, usable_device
from lingua.hf_encoder import HFEncoder, check_folder, load_hf_encoder, not_loaded
from lingua.pooler import Pooler, PoolerArgs
from lingua.predictor import Predictor, PredictorArgs
from lingua.transformer import Encoder, TransformerArgs

PROMPTS = ("query", "passage")
BACKBONE = "backbone"  # folder in a run's with config and tokenizer of a backbone from Hugging Face


class Embedder(nn.Module):
    """Encoder and pooler: padded rows of tokens in, one vector a row out.

    An encoder from Hugging Face stays in eval mode, without dropout: a text has one vector.
    """

    def __init__(self, encoder: nn.Module, pooler: Pooler, causal: bool = False) -> None:
        super().__init__()
        self.encoder, self.pooler, self.causal = encoder, pooler, causal
        if pooler.mixes_layers and not isinstance(encoder, Encoder):
            raise UserError("a pooler that mixes layers reads our encoders only")

    def train(self, mode: bool = True) -> Embedder:
        super().train(mode)
        self.encoder.eval()
        return self

    def read(self, tokens_BS: Tensor, real_BS: Tensor, types_BS: Tensor | None = None) -> Tensor | list[Tensor]:
        """The encoder's states, as the pooler wants them."""
        if not isinstance(self.encoder, Encoder):
            types = {} if types_BS is None else {"token_type_ids": types_BS}
            return self.encoder(input_ids=tokens_BS, attention_mask=real_BS.long(), **types).last_hidden_state
        mask: Mask | None = None if bool(real_BS.all()) else real_BS[:, None, None, :]
        if self.causal:  # padding stands behind the text, out of sight
            mask = CAUSAL
        return self.pooler.read(self.encoder, tokens_BS, mask)

    def forward(self, tokens_BS: Tensor, lengths_B: Tensor, types_BS: Tensor | None = None) -> Tensor:
        """[B, D] in float32 or wider, not normalized.

        Args:
            tokens_BS: token ids with special tokens, right-padded.
            lengths_B: number of real tokens of each row.
            types_BS: token types, for models that have them.
        """
        real_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < lengths_B[:, None]
        return self.pool(self.read(tokens_BS, real_BS, types_BS), real_BS)

    def pool(self, x_BSD: Tensor | list[Tensor], real_BS: Tensor) -> Tensor:
        """The same from states that :meth:`read` gave."""
        x_BD = self.pooler(x_BSD, real_BS)
        return x_BD.to(torch.promote_types(x_BD.dtype, torch.float32))


class TextEmbedder(FrozenEncoder):
    """Texts in, vectors out: an :class:`Embedder` with the tokenizer of its encoder.

    Args:
        encoder: has the tokenizer.
        embedder: on the device of ``encoder``.
        prompts: what stands before a text, by role (``query``, ``passage``).
        max_lengths: most tokens of a text by role, prompt and specials included; else those of ``encoder``.
    """

    def __init__(
        self,
        encoder: FrozenEncoder,
        embedder: Embedder,
        prompts: dict[str, str] | None = None,
        max_lengths: dict[str, int] | None = None,
    ) -> None:
        super().__init__(encoder.device, encoder.dtype)
        self.encoder, self.model, self.prompts = encoder, embedder.to(encoder.device).eval(), prompts or {}
        self.n_layers, self.dim, self.pad_id = 0, encoder.dim, encoder.pad_id
        self.max_length, self.max_lengths = encoder.max_length, max_lengths or {}

    def sequences(self, texts: Sequence[str], prompt: str | None = None) -> Sequences:
        """Tokens of each text as ``prompt`` says. Raises UserError for what is no text or has no token."""
        check_prompt(prompt)
        role = prompt or ""
        max_length = self.max_lengths.get(role, self.max_length)
        return role_sequences(self.encoder, texts, self.prompts.get(role, ""), max_length)

    def encode(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        normalize: bool = True,
        dim: int | None = None,
        batch_tokens: int = 16_384,
    ) -> np.ndarray:
        """One vector a text, float32 [n, D], in the order of the input.

        Args:
            prompt: ``query`` or ``passage``: with the prompt and the length that the model was trained with for it.
            normalize: to length 1.
            dim: the first so many channels only, of a model trained with Matryoshka dimensions.
            batch_tokens: most tokens in a batch, padding included.

        Raises:
            UserError: what is no text or has no token, an unknown prompt, more channels than there are.
        """
        if isinstance(texts, str):
            raise UserError("encode takes a list of texts, found one string: write encode([text])")
        return shorten(self.pooled(self.sequences(texts, prompt), batch_tokens), dim, normalize)

    def pooled(self, sequences: Sequences, batch_tokens: int = 16_384) -> np.ndarray:
        """The same of texts that are tokens already, not normalized."""
        return self._in_memory(-1, lambda: sequences, "first", batch_tokens, False)[0]

    def layer_states(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int], final_norm: bool
    ) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.model(tokens_BS, lengths_B, types_BS)[:, None]  # the first "token" is the text's vector

    def text_sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Sequences:
        return self.encoder.text_sequences(texts, pairs)

    def word_sequences(self, sentences: Sequence[Sequence[str]]) -> Sequences:
        raise UserError("an embedding model has vectors of texts, not of words")


class SentenceTransformerEmbedder:
    """A model of the sentence-transformers library, with its own batching, prompts and lengths."""

    def __init__(
        self,
        name: str,
        device: str | None,
        dtype: torch.dtype,
        max_length: int | None,
        trust_remote_code: bool = False,
    ) -> None:
        library = optional("sentence_transformers", f"st:{name}", "requirements-eval.txt")
        check_folder(name, "st")
        try:
            self.model = library.SentenceTransformer(
                name, device=usable_device(device), trust_remote_code=trust_remote_code
            )
        except UserError:
            raise
        except Exception as error:  # of several libraries: no such repository, no network, unknown modules
            raise not_loaded(f"st:{name}", error) from None
        self.model.to(dtype)
        self.dtype = dtype
        if max_length is not None:
            self.model.max_seq_length = max_length
        self.dim, self.max_length = self.model.get_embedding_dimension(), self.model.max_seq_length

    weights_digest = FrozenEncoder.weights_digest

    def encode(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        normalize: bool = True,
        dim: int | None = None,
        batch_size: int = 32,
    ) -> np.ndarray:
        """As :meth:`TextEmbedder.encode`; ``batch_size`` counts texts."""
        check_prompt(prompt)
        encode = {None: self.model.encode, "query": self.model.encode_query, "passage": self.model.encode_document}
        named = {}
        if prompt == "passage" and not self.model.prompts.get("document") and self.model.prompts.get("passage"):
            named = {"prompt_name": "passage"}  # the library's own empty one called document would hide it
        found = encode[prompt](
            list(texts), batch_size=batch_size, show_progress_bar=False, convert_to_tensor=True, **named
        )
        found_ND = found.float().cpu().numpy() if len(texts) else np.empty((0, self.dim), dtype=np.float32)
        return shorten(found_ND, dim, normalize)


def role_sequences(encoder: FrozenEncoder, texts: Sequence[str], before: str, max_length: int) -> Sequences:
    """Tokens of each text behind ``before``, cut to ``max_length``.

    Raises:
        UserError: a text has no token, or ``before`` leaves no room for any.
    """
    encoder.max_length = max_length
    if not before:
        return encoder.text_sequences(texts)
    found = encoder.text_sequences([before + text for text in texts])
    if found.truncated and encoder.text_sequences([before]).ids[0].size >= max_length:
        raise UserError(
            f"the prompt {before[:80]!r} alone has the {max_length} tokens of max_length or more: every text would be "
            "cut off; raise max_length or shorten the prompt"
        )
    return found


def check_prompt(prompt: str | None) -> None:
    """Raise UserError unless it is a role that texts have."""
    if prompt is not None and prompt not in PROMPTS:
        raise UserError(f"prompt={prompt!r}: expected {' or '.join(PROMPTS)}, or None")


def shorten(x_ND: np.ndarray, dim: int | None, normalize: bool) -> np.ndarray:
    """The first ``dim`` channels, of length 1 if asked. Raises UserError if there are not as many."""
    if dim is not None:
        if not 1 <= dim <= x_ND.shape[1]:
            raise UserError(f"dim={dim}: the model's vectors have {x_ND.shape[1]} channels")
        x_ND = x_ND[:, :dim]
    return F.normalize(torch.from_numpy(x_ND), dim=1).numpy() if normalize else x_ND


def load_embedder(
    path: str | Path,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> TextEmbedder | SentenceTransformerEmbedder:
    """Any embedding model.

    Args:
        path: a run or checkpoint folder of ``apps.embed``, or of a pretraining (then pooled by the mean); ``hf:NAME``,
            an encoder of Hugging Face by id or folder (mean); ``st:NAME``, a model of sentence-transformers.
        device: None takes the GPU if there is one.
        dtype: float32, or bfloat16 to compute in mixed precision (of ``st:``, to have the weights in).
        max_length: most tokens of a text, specials included; None: as the model was trained.
        trust_remote_code: run Python files that come with a model from elsewhere.

    Raises:
        UserError: no such model, or one that is damaged.
    """
    name = str(path)
    if name.startswith("st:"):
        return SentenceTransformerEmbedder(name.removeprefix("st:"), device, dtype, max_length, trust_remote_code)
    if name.startswith("hf:"):
        return _by_mean(load_hf_encoder(name.removeprefix("hf:"), max_length, device, dtype, trust_remote_code))
    folder = resolve(path)
    if "backbone" not in read_state(folder):
        return _by_mean(load_encoder(path, max_length=max_length, device=device, dtype=dtype))
    return _load_run(path, folder, device, dtype, max_length)


def _by_mean(encoder: FrozenEncoder) -> TextEmbedder:
    causal = getattr(encoder, "causal", False)
    return TextEmbedder(encoder, Embedder(encoder.model, Pooler(PoolerArgs("mean")), causal))


def hf_shape(config: Any) -> TransformerArgs:
    """What a pooler has to know of an encoder of Hugging Face."""
    return TransformerArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
    )


def build_pooler(args: PoolerArgs, encoder: TransformerArgs, backbone: dict[str, Any]) -> Pooler:
    """The pooler on a backbone, whose ``state.json`` says what it is."""
    predictor = (backbone.get("model") or {}).get("predictor")
    return Pooler(args, encoder, None if predictor is None else PredictorArgs(**predictor))


def predictor_weights(folder: Path, predictor: dict[str, Any], encoder: TransformerArgs) -> dict[str, Tensor]:
    """The weights of the predictor in a CrossBERT's checkpoint, by their names in it.

    Args:
        predictor, encoder: their shapes.
    """
    whole = nn.ModuleDict({"predictor": Predictor(PredictorArgs(**predictor), encoder)})
    load_weights(folder, whole)
    return whole["predictor"].state_dict()


def _load_run(
    path: str | Path, folder: Path, device: str | None, dtype: torch.dtype, max_length: int | None
) -> TextEmbedder:
    """What ``apps.embed`` trained."""
    config, backbone = read_yaml(folder / "config.yaml"), read_state(folder)["backbone"]
    lengths = {role: config["data"]["max_length"][role] if max_length is None else max_length for role in PROMPTS}
    if "hf" in backbone:
        encoder = hf_of_run(run_folder(path, folder) / BACKBONE, max(lengths.values()), device, dtype)
        shape = hf_shape(encoder.model.config)
    else:
        encoder = load_encoder(path, max_length=max(lengths.values()), device=device, dtype=dtype)
        shape = encoder.encoder.args
    pooler = build_pooler(PoolerArgs(**config["pooler"]), shape, backbone)
    embedder = Embedder(encoder.model, pooler, getattr(encoder, "causal", False))
    load_weights(folder, embedder)
    return TextEmbedder(encoder, embedder, config["data"]["prompt"], lengths)


def hf_of_run(
    folder: Path, max_length: int, device: str | None = "cpu", dtype: torch.dtype = torch.float32
) -> HFEncoder:
    """A backbone from Hugging Face whose weights are in the checkpoint."""
    transformers = optional("transformers", f"{folder}", "requirements-eval.txt")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: config and tokenizer of the backbone are not there; the run folder has them")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    return HFEncoder(model.float(), tokenizer, max_length, usable_device(device), dtype)
