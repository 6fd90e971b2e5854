"""CrossBERT's predictor: shallow, and reads the encoder's output by cross-attention (section 3.1).

Shapes as in :mod:`lingua.transformer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lingua.attention import Mask
from lingua.errors import check_fields
from lingua.rotary import rotary_angles
from lingua.transformer import (
    CrossAttention,
    Encoder,
    FeedForward,
    RMSNorm,
    SelfAttention,
    TransformerArgs,
    check_heads,
)  # fmt: skip


@dataclass
class PredictorArgs:
    """Shape of CrossBERT's predictor. -1 takes the encoder's value."""

    dim: int = -1  # width; the tied output needs a projection when it is not the encoder's
    n_layers: int = 6  # cross-attention blocks
    n_heads: int = -1  # attention heads
    self_attention: bool = False  # hidden positions also attend to each other, before the cross-attention
    # Each block reads the encoder's last state plus a weighted sum of all its states, with weights of its own that
    # are learned from zero (after CrossMAE); else the last state only.
    mix_layers: bool = False

    def __post_init__(self) -> None:
        checks = {
            "dim": (self.dim == -1 or self.dim >= 1, "at least 1, or -1 for the encoder's"),
            "n_layers": (self.n_layers >= 1, "at least one block"),
            "n_heads": (self.n_heads == -1 or self.n_heads >= 1, "at least 1, or -1 for the encoder's"),
        }
        check_fields("model.predictor", self, checks)


class PredictorBlock(nn.Module):
    """Pre-norm cross-attention and feed-forward. Hidden positions never see each other, but with self-attention."""

    def __init__(self, dim: int, n_heads: int, encoder: TransformerArgs, self_attention: bool = False) -> None:
        super().__init__()
        eps = encoder.norm_eps
        qk_norm_eps = eps if encoder.qk_norm else None
        self.self_attention_norm = RMSNorm(dim, eps=eps) if self_attention else None
        self.self_attention = SelfAttention(dim, n_heads, qk_norm_eps) if self_attention else None
        self.attention_norm = RMSNorm(dim, eps=eps)
        self.attention = CrossAttention(dim, n_heads, encoder.dim, qk_norm_eps)
        self.ffn_norm = RMSNorm(dim, eps=eps)
        self.ffn = FeedForward(dim)

    def forward(
        self,
        x_BSD: Tensor,
        source_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        source_rotary: tuple[Tensor, Tensor],
        mask: Mask | None = None,
        self_mask: Mask | None = None,
    ) -> Tensor:
        if self.self_attention is not None:
            x_BSD = x_BSD + self.self_attention(self.self_attention_norm(x_BSD), rotary, self_mask)
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), source_BTD, rotary, source_rotary, mask)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Predictor(nn.Module):
    """Reconstructs hidden positions from the encoder's output alone (section 3.1).

    One learned vector stands at every hidden position; only its rotary position tells them apart.
    """

    def __init__(self, args: PredictorArgs, encoder: TransformerArgs) -> None:
        super().__init__()
        dim = encoder.dim if args.dim == -1 else args.dim
        n_heads = encoder.n_heads if args.n_heads == -1 else args.n_heads
        check_heads("model.predictor", dim, n_heads)
        self.head_dim = dim // n_heads
        self.rope_theta, self.rope_scaling = encoder.rope_theta, encoder.rope_scaling
        self.mask_vector = nn.Parameter(torch.empty(dim))
        self.layers = nn.ModuleList(
            PredictorBlock(dim, n_heads, encoder, args.self_attention) for _ in range(args.n_layers)
        )
        # Not inside of the blocks, whose weights are there while they run only: the mixing comes before.
        self.mix = None
        if args.mix_layers:
            self.mix = nn.ParameterList(torch.empty(encoder.n_layers + 1) for _ in range(args.n_layers))
        self.norm = RMSNorm(dim, eps=encoder.norm_eps)
        # The output matrix is the embedding, of the encoder's width.
        self.out = nn.Identity() if dim == encoder.dim else nn.Linear(dim, encoder.dim, bias=False)

    def read(
        self, encoder: Encoder, tokens_BT: Tensor, visible_BT: Tensor, mask: Mask | None = None
    ) -> Tensor | list[Tensor]:
        """What :meth:`forward` wants of the encoder: its output, or a mix of its states for each block.

        Args:
            tokens_BT, visible_BT: the visible tokens and their positions in the row.
        """
        if self.mix is None:
            return encoder(tokens_BT, visible_BT, mask)
        states = list(encoder.states(tokens_BT, visible_BT, mask))
        states_LBTD = torch.stack(states)
        return [encoder.norm(states[-1] + torch.tensordot(mix_L, states_LBTD, 1)) for mix_L in self.mix]

    def forward(
        self,
        visible_BTD: Tensor | list[Tensor],
        visible_BT: Tensor,
        hidden_BM: Tensor,
        mask: Mask | None = None,
        self_mask: Mask | None = None,
    ) -> Tensor:
        """Predicted states of the hidden positions.

        Args:
            visible_BTD: what :meth:`read` gave: the encoder's output at the visible positions, or one for each block.
            visible_BT, hidden_BM: positions in the row, int64.
            mask, self_mask: of cross- and self-attention.

        Returns:
            [B, M, D] of the encoder's width, ready for the output matrix.
        """
        rotary = rotary_angles(hidden_BM, self.head_dim, self.rope_theta, self.rope_scaling)
        source_rotary = rotary_angles(visible_BT, self.head_dim, self.rope_theta, self.rope_scaling)
        x_BMD = self.mask_vector.expand(*hidden_BM.shape, -1)
        sources = visible_BTD if isinstance(visible_BTD, list) else [visible_BTD] * len(self.layers)
        for layer, source_BTD in zip(self.layers, sources, strict=True):
            x_BMD = layer(x_BMD, source_BTD, rotary, source_rotary, mask, self_mask)
        return self.out(self.norm(x_BMD))
