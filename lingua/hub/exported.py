"""Our own loader of exported folders: fill-mask, and import into a run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.hub.export import FORMAT, ORIGINAL_TOKENIZER, OURS, OUTPUT
from lingua.hub.vocabulary import special_names
from lingua.hub.weights import from_source, read_source
from lingua.predictor import Predictor, PredictorArgs
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer, prefer_copy
from lingua.transformer import Encoder, TransformerArgs


@dataclass
class Exported:
    """An exported folder in memory, on the CPU and in eval mode."""

    encoder: Encoder
    predictor: Predictor | None  # None: a BERT, or the discriminator of an ELECTRA
    tokenizer: Tokenizer
    tokenizer_args: TokenizerArgs
    about: dict[str, Any]  # what lingua.json says

    @torch.inference_mode()
    def fill(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """The likeliest tokens and their probabilities, for each ``<mask>`` in ``text``.

        A CrossBERT's encoder sees the other tokens only, and its predictor answers for each mask.

        Raises:
            UserError: no mask in the text, nothing but masks, or an encoder that predicts no tokens.
        """
        if self.about.get("objective") == "rtd":
            raise UserError("this encoder is the discriminator of an ELECTRA: it was not trained to predict tokens")
        tokenizer, name = self.tokenizer, special_names(self.tokenizer)["mask"]
        parts = text.split(name)
        if len(parts) < 2:
            raise UserError(f"text={text!r}: has no {name}")
        # A token begins with the space before it, so the mask stands for that too.
        pieces = tokenizer.encode_batch([part.rstrip(" ") for part in parts[:-1]] + [parts[-1]])
        ids = [tokenizer.bos_id]
        for place, piece in enumerate(pieces):
            ids += ([tokenizer.mask_id] if place else []) + piece.tolist()
        tokens_S = torch.tensor([*ids, tokenizer.eos_id])
        hidden_M = (tokens_S == tokenizer.mask_id).nonzero().flatten()
        if self.predictor is None:
            x_MD = self.encoder(tokens_S[None])[0, hidden_M]
        else:
            visible_T = (tokens_S != tokenizer.mask_id).nonzero().flatten()
            visible = self.predictor.read(self.encoder, tokens_S[None, visible_T], visible_T[None])
            x_MD = self.predictor(visible, visible_T[None], hidden_M[None])[0]
        logits_MV = x_MD @ self.encoder.output_VD.T
        logits_MV[:, list(tokenizer.special_ids)] = -torch.inf  # never predicted in training
        best = logits_MV.softmax(dim=1).topk(min(top, tokenizer.vocab_size - len(tokenizer.special_ids)))
        return [
            [(tokenizer.decode([i]), p) for i, p in zip(row.tolist(), probabilities.tolist(), strict=True)]
            for row, probabilities in zip(best.indices, best.values, strict=True)
        ]


def load_exported(folder: str | Path) -> Exported:
    """What :mod:`lingua.hub.export` wrote, exactly.

    Raises:
        UserError: not such a folder, or one whose files do not fit together.
    """
    folder = Path(folder)
    if not (folder / OURS).is_file():
        raise UserError(f"{folder}: has no {OURS}; expected a folder that `python -m lingua.hub export` wrote")
    about = json.loads((folder / OURS).read_text())
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / OURS}: format {about.get('format')}, this code reads {FORMAT}")
    own = TransformerArgs.of(about["model"])
    config, tensors = read_source(folder)
    predictor = None
    if about["model"].get("predictor") is not None:
        predictor = Predictor(PredictorArgs(**about["model"]["predictor"]), own)
        tensors |= _load(predictor, folder / "predictor.safetensors", own.tied)
    encoder, rest = from_source(config, tensors, str(folder), own)
    if rest:
        raise UserError(f"{folder}/model.safetensors: has {rest[0]}, which no export of ours has")
    tokenizer_args = prefer_copy(TokenizerArgs(**about["tokenizer"]), folder / ORIGINAL_TOKENIZER)
    tokenizer = build_tokenizer(tokenizer_args)
    if tokenizer.identity() != about["tokenizer_identity"]:
        raise UserError(f"{folder / ORIGINAL_TOKENIZER}: is not the vocabulary that {OURS} describes")
    return Exported(encoder, predictor, tokenizer, tokenizer_args, about)


def _load(predictor: Predictor, path: Path, tied: bool) -> dict[str, Tensor]:
    """Fill a predictor; gives the output matrix that is not the embedding, under the name it has in a model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        head = {} if tied else {"lm_head.weight": tensors.pop(OUTPUT)}
        predictor.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise UserError(f"{path}: cannot be loaded: {str(error).splitlines()[0]}") from None
    predictor.eval()
    return head
