"""An encoder that is trained on, with a linear layer on a text's vector, on words, or on places of answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.distributed import precision
from lingua.embedder import Embedder
from lingua.errors import UserError
from lingua.frozen import FrozenEncoder, Sequences, length_buckets
from lingua.hf_encoder import HFEncoder
from lingua.loss import LossSum
from lingua.pooler import Pooler

HEAD_STD = 0.02  # of the head's weights at the start


@dataclass
class Rows:
    """What a model reads, and what it should say."""

    sequences: Sequences
    # Of each sequence: [1] its class (int64) or number (float32), [n] the class of each of its places, or [2] which of
    # its places the answer begins and ends at.
    targets: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.targets)


@dataclass
class Batch:
    """Some rows on a device."""

    tokens_BS: Tensor
    types_BS: Tensor | None
    lengths_B: Tensor
    places: tuple[Tensor, Tensor] | None  # (row, position) of each of P places; None: texts are pooled
    counts_B: list[int]  # places of each row
    targets: Tensor  # [B], [P] or [B, 2]

    @staticmethod
    def of(rows: Rows, index_B: np.ndarray, pad_id: int, device: str) -> Batch:
        found = rows.sequences

        def padded(arrays: list[np.ndarray], value: int) -> Tensor:
            tensors = [torch.from_numpy(arrays[i]) for i in index_B]
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value).to(device)

        lengths_B = torch.tensor([len(found.ids[i]) for i in index_B], device=device)
        types_BS = None if found.types is None else padded(found.types, 0)
        places, counts_B = None, []
        if found.places is not None:
            counts_B = [len(found.places[i]) for i in index_B]
            row_P = torch.arange(len(index_B)).repeat_interleave(torch.tensor(counts_B))
            place_P = torch.from_numpy(np.concatenate([found.places[i] for i in index_B]))
            places = (row_P.to(device), place_P.to(device))
        targets = torch.from_numpy(np.concatenate([rows.targets[i] for i in index_B])).to(device)
        return Batch(padded(found.ids, pad_id), types_BS, lengths_B, places, counts_B, targets)


class FinetuneModel(nn.Module):
    """Encoder, pooler and a linear head.

    Args:
        encoder: in its precision and on its device.
        pooler: of texts; not read where rows have places.
        kind: classification | regression | tokens | qa.
        outputs: classes; 1 for regression, 2 (begin and end) for qa.
        dropout: of what the head reads. An encoder of Hugging Face that is trained has its own besides.
        train_layers: -1 all; k the last k blocks with the final norm; 0 no part of the encoder.
    """

    def __init__(
        self, encoder: FrozenEncoder, pooler: Pooler, kind: str, outputs: int, dropout: float, train_layers: int
    ) -> None:
        super().__init__()
        self.embedder = Embedder(encoder.model, pooler, getattr(encoder, "causal", False))
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(encoder.dim, outputs)
        nn.init.normal_(self.out.weight, std=HEAD_STD)
        nn.init.zeros_(self.out.bias)
        self.kind, self.train_layers = kind, train_layers
        self.dtype, self.device, self.pad_id = encoder.dtype, encoder.device, encoder.pad_id
        choose_trained(encoder, train_layers)
        self.to(encoder.device)

    def train(self, mode: bool = True) -> FinetuneModel:
        super().train(mode)
        self.embedder.encoder.train(mode and self.train_layers != 0)
        return self

    def forward(self, batch: Batch) -> Tensor:
        """[B, outputs], or [P, outputs] of the places, in float32."""
        device = torch.device(self.device)
        with precision(self.dtype, device):
            real_BS = torch.arange(batch.tokens_BS.shape[1], device=device) < batch.lengths_B[:, None]
            x = self.embedder.read(batch.tokens_BS, real_BS, batch.types_BS)
            x = self.embedder.pool(x, real_BS) if batch.places is None else x[batch.places]
        return self.out(self.dropout(x.float()))

    def loss(self, batch: Batch) -> LossSum:
        """Summed cross-entropy over texts, words or questions (the mean of begin and end), or squared error."""
        out = self(batch)
        count = torch.tensor(float(len(batch.targets)), device=out.device)
        if self.kind == "regression":
            return LossSum(F.mse_loss(out[:, 0], batch.targets, reduction="sum"), count)
        if self.kind != "qa":
            return LossSum(F.cross_entropy(out, batch.targets, reduction="sum"), count)
        parts = out.split(batch.counts_B)
        scores_BP2 = nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=-torch.inf)
        targets_B2 = batch.targets.view(-1, 2)
        loss = F.cross_entropy(scores_BP2, targets_B2, reduction="sum") / 2  # over P, for begin and end
        return LossSum(loss, count / 2)

    @torch.inference_mode()
    def outputs(self, rows: Rows, batch_tokens: int) -> list[np.ndarray]:
        """What :meth:`forward` gives for each row: [1, outputs] of a text, or [places, outputs]."""
        self.eval()
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        lengths_N = np.array([len(ids) for ids in rows.sequences.ids])
        for index_B in length_buckets(lengths_N, batch_tokens):
            batch = Batch.of(rows, index_B, self.pad_id, self.device)
            parts = self(batch).cpu().split(batch.counts_B or [1] * len(index_B))
            for i, part in zip(index_B, parts, strict=True):
                found[i] = part.numpy()
        return found


def choose_trained(encoder: FrozenEncoder, train_layers: int) -> None:
    """Leave gradients to the weights that are trained. Raises UserError if there are not as many blocks."""
    if train_layers > encoder.n_layers:
        raise UserError(f"train_layers={train_layers}: the encoder has {encoder.n_layers} blocks")
    encoder.model.requires_grad_(train_layers == -1)
    if train_layers > 0:
        blocks = next(m for m in encoder.model.modules() if isinstance(m, nn.ModuleList) and len(m) == encoder.n_layers)
        norm = encoder.norm if isinstance(encoder, HFEncoder) else encoder.model.norm
        for part in (*blocks[-train_layers:], norm):
            if part is not None:
                part.requires_grad_(True)
