"""From the states of a text's tokens to one vector: the predictor's blocks as a pooler (section 4.2), or a mean.

Shapes as in :mod:`lingua.transformer`; Q queries of the pooler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lingua.attention import Mask
from lingua.errors import UserError, check_fields
from lingua.frozen import POOLINGS
from lingua.predictor import Predictor, PredictorArgs
from lingua.transformer import Encoder, TransformerArgs

COLD_LAYERS = 2  # blocks of a pooler on an encoder without predictor, if not given
KINDS = ("attention", *POOLINGS)


@dataclass
class PoolerArgs:
    """How the states of a text's tokens become one vector."""

    kind: str = "attention"  # attention: cross-attention blocks; or mean, first (<s>), last (</s>), max, unlearned
    # Start as the pretrained predictor of a CrossBERT, its mask vector as the query; false: the same shape, fresh.
    warm_start: bool = False
    n_queries: int = 1  # queries that read the tokens; the vector is the mean of what they find
    n_layers: int = -1  # cross-attention blocks; -1: those of the encoder's predictor, or 2 if it has none
    position: int = 0  # rotary position of the first query, where the text begins at 0; others stand behind it

    def __post_init__(self) -> None:
        checks = {
            "kind": (self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            "n_queries": (self.n_queries >= 1, "at least 1"),
            "n_layers": (self.n_layers == -1 or self.n_layers >= 1, "at least 1, or -1 for the predictor's"),
            "position": (self.position >= 0, "at least 0, where the text begins"),
            "warm_start": (not self.warm_start or self.kind == "attention", "false, but for pooler.kind=attention"),
        }
        check_fields("pooler", self, checks)


class Pooler(nn.Module):
    """``kind=attention``: a :class:`Predictor` whose hidden positions are the queries, each with a vector of its own.

    Args:
        encoder: shape of the encoder it reads; ``kind=attention`` needs it.
        predictor: shape of the encoder's own predictor, which the pooler takes; None: it has none.
    """

    def __init__(
        self, args: PoolerArgs, encoder: TransformerArgs | None = None, predictor: PredictorArgs | None = None
    ) -> None:
        super().__init__()
        self.args = args
        self.predictor: Predictor | None = None
        if args.warm_start and predictor is None:
            raise UserError("pooler.warm_start=true needs a CrossBERT: this encoder has no predictor to start from")
        if args.kind == "attention":
            if encoder is None:
                raise UserError("pooler.kind=attention needs the shape of the encoder that it reads")
            shape = predictor or PredictorArgs(n_layers=COLD_LAYERS)
            if args.warm_start and args.n_layers > shape.n_layers:
                raise UserError(
                    f"pooler.n_layers={args.n_layers}: the predictor has {shape.n_layers} blocks, so at most as many "
                    "can start from them; or pooler.warm_start=false"
                )
            shape = shape if args.n_layers == -1 else replace(shape, n_layers=args.n_layers)
            self.predictor = Predictor(shape, encoder)
            dim = len(self.predictor.mask_vector)
            self.predictor.mask_vector = nn.Parameter(self.predictor.mask_vector.new_empty(args.n_queries, dim))

    @property
    def mixes_layers(self) -> bool:
        """Whether it reads all states of the encoder, not the last only."""
        return self.predictor is not None and self.predictor.mix is not None

    def warm_start(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A pretrained predictor's ``weights``, by their names there, as this pooler's; further blocks are left out."""
        queries_QD = weights["mask_vector"].expand(self.args.n_queries, -1)
        wanted = {name.removeprefix("predictor.") for name in self.state_dict()}
        return {f"predictor.{name}": weights[name] for name in wanted - {"mask_vector"}} | {
            "predictor.mask_vector": queries_QD
        }

    def read(self, encoder: Encoder, tokens_BS: Tensor, mask: Mask | None) -> Tensor | list[Tensor]:
        """What :meth:`forward` wants of one of our encoders: its output, or with ``mix_layers`` one for each block."""
        if self.predictor is None:
            return encoder(tokens_BS, mask=mask)
        return self.predictor.read(encoder, tokens_BS, torch.arange(tokens_BS.shape[1], device=tokens_BS.device), mask)

    def forward(self, x_BSD: Tensor | list[Tensor], real_BS: Tensor) -> Tensor:
        """[B, D] of the encoder's width.

        Args:
            x_BSD: what :meth:`read` gave, or any encoder's output.
            real_BS: which tokens are no padding; it stands behind the text.
        """
        if self.predictor is None:
            return POOLINGS[self.args.kind](x_BSD, real_BS)
        positions_S = torch.arange(real_BS.shape[1], device=real_BS.device)
        queries_BQ = self.args.position + torch.arange(self.args.n_queries, device=real_BS.device)
        queries_BQ = queries_BQ.expand(len(real_BS), -1)
        mask = None if bool(real_BS.all()) else real_BS[:, None, None, :]
        return self.predictor(x_BSD, positions_S, queries_BQ, mask).mean(dim=1)
