"""What is trained: a pretrained encoder, a pooler on it, and perhaps the temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lingua.checkpoint import read_state, resolve
from lingua.embedder import BACKBONE, Embedder, build_pooler, hf_of_run, hf_shape, predictor_weights
from lingua.errors import UserError
from lingua.features import TextEncoder, load_encoder
from lingua.frozen import FrozenEncoder
from lingua.hf_encoder import HFEncoder, load_hf_encoder
from lingua.pooler import PoolerArgs
from lingua.transformer import TransformerArgs, init_weights


@dataclass
class Backbone:
    """A pretrained encoder on the CPU.

    Attributes:
        encoder: has the model and its tokenizer.
        about: what a checkpoint has to say of it, to be usable by itself.
        shape: what a pooler has to know of it.
        predictor: weights of its predictor, if it is a CrossBERT.
    """

    encoder: FrozenEncoder
    about: dict[str, Any]
    shape: TransformerArgs
    predictor: dict[str, Tensor] | None = None

    @property
    def causal(self) -> bool:
        """Whether its tokens see those before them only."""
        return getattr(self.encoder, "causal", False)

    def tokenizer_identity(self) -> dict[str, Any] | None:
        """As a pretraining's checkpoint has it; None: a tokenizer of Hugging Face."""
        return self.encoder.tokenizer.identity() if isinstance(self.encoder, TextEncoder) else None


def load_backbone(name: str, max_length: int, run: Path, own: Path | None) -> Backbone:
    """The encoder to start from: a run or checkpoint folder, or ``hf:NAME``.

    Args:
        run, own: the embedding run, and the checkpoint that it goes on from, which then has the encoder.

    Raises:
        UserError: no such encoder, or a text length that it does not take.
    """
    about = {} if own is None else read_state(own)["backbone"]
    if "hf" in about or (own is None and name.startswith("hf:")):
        hf = name.removeprefix("hf:")
        encoder = load_hf_encoder(hf, max_length, "cpu") if own is None else hf_of_run(run / BACKBONE, max_length)
        return Backbone(encoder, {"hf": hf}, hf_shape(encoder.model.config))
    source = own or resolve(name)
    encoder = load_encoder(own or name, max_length=max_length, device="cpu", run=run if own else None)
    data = {key: encoder.config["data"][key] for key in ("seq_len", "tokenizer")}
    about = {"model": encoder.config["model"], "data": data}
    predictor, shape = encoder.config["model"].get("predictor"), encoder.encoder.args
    weights = None
    if predictor is not None and own is None and "backbone" not in read_state(source):
        weights = predictor_weights(source, predictor, shape)
    return Backbone(encoder, about, shape, weights)


class EmbedModel(Embedder):
    """An :class:`Embedder` in training.

    Args:
        frozen: the encoder does not learn.
        temperature: where it starts, to be learned; None: it is not part of the model.
        own: the weights come out of a checkpoint anyhow, so that the backbone needs no predictor to start from.
    """

    def __init__(
        self,
        backbone: Backbone,
        pooler: PoolerArgs,
        frozen: bool,
        temperature: float | None,
        seed: int,
        own: bool = False,
    ) -> None:
        super().__init__(backbone.encoder.model, build_pooler(pooler, backbone.shape, backbone.about), backbone.causal)
        self.frozen = frozen
        self.encoder.requires_grad_(not frozen)
        for name in ("pooler", "output"):  # what makes a [CLS] vector or logits has no part in this
            part = getattr(self.encoder, name, None)
            if isinstance(part, nn.Module):
                part.requires_grad_(False)
        self.log_temperature = None
        if temperature is not None:
            self.log_temperature = nn.Parameter(torch.tensor([math.log(temperature)]))
        self._fill_pooler(backbone, pooler, seed, own)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise UserError(
                f"freeze=true with pooler.kind={pooler.kind} leaves nothing to train: use pooler.kind=attention"
            )
        # Moved to a device and over the ranks, a model loses its values; these are they.
        self._values: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in (*self.named_parameters(), *self.named_buffers())
        }

    def _fill_pooler(self, backbone: Backbone, args: PoolerArgs, seed: int, own: bool) -> None:
        init_weights(nn.ModuleDict({"pooler": self.pooler}), backbone.shape, seed)
        if args.warm_start and not own:
            if backbone.predictor is None:
                raise UserError("pooler.warm_start=true: the backbone is no pretraining's checkpoint with a predictor")
            self.pooler.load_state_dict(self.pooler.warm_start(backbone.predictor))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give the values back that the model was made with."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            value = self._values[name]
            if isinstance(tensor, DTensor):  # every rank cuts its own part out of the same values
                value = value.to(tensor.device, tensor.dtype)
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(value)
        self._values = {}

    def forward(
        self, tokens_BS: Tensor, lengths_B: Tensor, types_BS: Tensor | None = None, states_BSD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Vectors [B, D] as :class:`Embedder` has them, and the temperature [1] (of no use if it is not learned).

        Args:
            states_BSD: what the encoder gave for these texts before, if it is known.
        """
        real_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < lengths_B[:, None]
        if states_BSD is None:
            x_BSD = self.read(tokens_BS, real_BS, types_BS)
        else:
            x_BSD = states_BSD.to(next(self.parameters()).dtype)
        x_BD = self.pool(x_BSD, real_BS)
        return x_BD, x_BD.new_ones(1) if self.log_temperature is None else self.log_temperature.exp()


def save_hf_files(backbone: Backbone, folder: Path) -> None:
    """Config and tokenizer of an encoder of Hugging Face, so that the run is usable by itself."""
    if isinstance(backbone.encoder, HFEncoder):
        backbone.encoder.model.config.save_pretrained(folder)
        backbone.encoder.tokenizer.save_pretrained(folder)
