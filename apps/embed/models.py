"""The embedding model that a command is given: opened once, with what tells it apart from every other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from apps.embed.store import SAMPLE
from lingua.checkpoint import resolve
from lingua.distributed import pick_dtype
from lingua.embedder import SentenceTransformerEmbedder, TextEmbedder, load_embedder
from lingua.errors import UserError
from lingua.features import run_folder
from lingua.frozen import NoTokenError, usable_device

SOURCES = ("hf:", "st:")


@dataclass
class ModelArgs:
    """Which embedding model, and how it runs."""

    ckpt: str | None = None  # run folder (its newest complete checkpoint) or checkpoint folder, of any app
    model: str | None = None  # instead of ckpt: hf:NAME, any encoder (mean), or st:NAME, of sentence-transformers
    trust_remote_code: bool = False  # run Python files that come with such a model
    max_length: int | None = None  # most tokens of a text, special ones included; none: as the model was trained
    dim: int | None = None  # the first so many channels only, of a model with Matryoshka dimensions
    dtype: str = "fp32"  # of computation: fp32 | bf16 (faster, rounds vectors to three digits) | auto
    device: str | None = None  # none: the GPU if there is one, one for each process
    batch_tokens: int = 16_384  # most tokens in a forward pass, padding included

    def __post_init__(self) -> None:
        if (self.ckpt is None) == (self.model is None):
            raise UserError("give one of ckpt=RUN and model=hf:NAME or st:NAME")
        if self.model is not None and not self.model.startswith(SOURCES):
            raise UserError(f"model={self.model}: expected hf:NAME or st:NAME; a run is given as ckpt=RUN")
        if self.dtype not in ("fp32", "bf16", "auto"):
            raise UserError(f"dtype={self.dtype}: expected fp32, bf16 or auto")
        for name in ("max_length", "dim", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1")

    def source(self) -> str:
        """What :func:`lingua.embedder.load_embedder` takes."""
        return str(self.ckpt or self.model)


class Model:
    """An opened embedding model.

    Attributes:
        name: short and fit for a folder: RUN/STEP, or the name on the hub.
        dim: channels of its vectors.
    """

    def __init__(self, args: ModelArgs, device: str | None = None) -> None:
        """
        Args:
            device: that of this process; ``args.device`` wins.

        Raises:
            UserError: no such model or device, or fewer channels than ``args.dim``.
        """
        device = usable_device(args.device or device)
        dtype = pick_dtype(args.dtype, torch.device(device.partition(":")[0]))
        self.embedder: TextEmbedder | SentenceTransformerEmbedder = load_embedder(
            args.source(), device, dtype, args.max_length, args.trust_remote_code
        )
        if args.dim is not None and args.dim > self.embedder.dim:
            raise UserError(f"dim={args.dim}: the vectors of {args.source()} have {self.embedder.dim} channels")
        self.args, self.dtype, self.device = args, dtype, torch.device(device)
        self.dim = args.dim or self.embedder.dim
        self.name = model_name(args)

    def encode(self, texts: list[str], prompt: str | None = None, normalize: bool = True) -> np.ndarray:
        """Vectors [n, dim] float32, of length 1 if asked. Raises UserError for a text without a token."""
        if isinstance(self.embedder, TextEmbedder):
            return self.embedder.encode(texts, prompt, normalize, self.args.dim, self.args.batch_tokens)
        return self.embedder.encode(texts, prompt, normalize, self.args.dim)

    def encode_or_zeros(
        self, texts: list[str], prompt: str | None = None, normalize: bool = True
    ) -> tuple[np.ndarray, list[int]]:
        """Vectors as :meth:`encode`, zeros for a text without a token, and the places of those."""
        kept = [index for index, text in enumerate(texts) if text.strip()]
        vectors_ND = np.zeros((len(texts), self.dim), dtype=np.float32)
        while kept:
            try:
                vectors_ND[kept] = self.encode([texts[index] for index in kept], prompt, normalize)
                break
            except NoTokenError as error:  # blanks of Unicode, say, that the tokenizer drops
                del kept[error.index]
        return vectors_ND, sorted(set(range(len(texts))) - set(kept))

    def identity(self) -> str:
        """Hash of everything that decides a text's vector: weights, tokens, pooling, precision, prompts, lengths."""
        embedder, model = self.embedder, self.embedder.model
        if isinstance(embedder, TextEmbedder):
            tokens = [ids.tolist() for ids in embedder.sequences([SAMPLE]).ids]
            how = [tokens, embedder.prompts, embedder.max_lengths, str(model.pooler.args), model.causal]
        else:
            how = [model.tokenizer(SAMPLE)["input_ids"], model.prompts, str(model)]
        digest = hashlib.sha256(embedder.weights_digest())
        digest.update(json.dumps([how, embedder.max_length, self.args.dim], sort_keys=True).encode())
        return digest.hexdigest()[:16]

    @property
    def truncated(self) -> int | None:
        """Texts that were cut so far; None: sentence-transformers does not tell."""
        return self.embedder.truncated if isinstance(self.embedder, TextEmbedder) else None


def model_name(args: ModelArgs) -> str:
    """RUN/STEP of a checkpoint, OWNER/NAME on the hub, else the folder's own name."""
    if args.ckpt is not None:
        folder = resolve(args.ckpt)
        return f"{run_folder(args.ckpt, folder).name}/{folder.name}"
    name = str(args.model).partition(":")[2]
    return Path(name).resolve().name if Path(name).exists() else name
