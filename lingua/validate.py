"""Validation losses that compare across models: the same rows and the same hidden positions for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lingua.distributed import World, sum_over_ranks
from lingua.errors import UserError
from lingua.loss import LossSum
from lingua.masking import View, split_positions
from lingua.source import TokenSource


@dataclass
class ValidationArgs:
    """Validation during training, on the sets named in ``data.validation``."""

    every: int = 1000  # steps between validations; the last step always has one
    rows: int = 256  # rows of each set, from its start
    batch_rows: int = 32  # rows in one forward pass
    # Hidden ratios; masks do not depend on the run's seed, so curves of different runs compare.
    ratios: list[float] = field(default_factory=lambda: [0.15, 0.3, 0.5])

    def __post_init__(self) -> None:
        for name in ("every", "rows", "batch_rows"):
            if getattr(self, name) < 1:
                raise UserError(f"validation.{name}={getattr(self, name)}: expected at least 1")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # shapes differ by ratio and set: blocks would be compiled for each
def validate(
    sources: dict[str, TokenSource],
    args: ValidationArgs,
    world: World,
    loss: Callable[[Tensor, View, Tensor], LossSum],
) -> dict[str, float]:
    """Mean loss per target in nats, as ``valid/SET/loss@RATIO``.

    Args:
        sources: the validation sets by name.
        world: the ranks that share the rows.
        loss: summed loss of tokens [B, S] on the hidden positions of a view, where rows have weight 1 and not 0.
    """
    results = {}
    for name, source in sources.items():
        rows = np.arange(min(args.rows, source.tokens // source.seq_len))
        # A sharded model is gathered by all ranks together, so all take the same number of batches. Those that have
        # no row left take the first one, which then counts nothing.
        most = -(-len(rows) // world.size)
        own = rows[world.rank :: world.size]
        counts = torch.ones(most, device=world.device)
        counts[len(own) :] = 0
        own = np.append(own, rows[: most - len(own)])
        tokens = torch.from_numpy(source.rows(own).astype(np.int64)).to(world.device)
        index = torch.from_numpy(own).to(world.device)
        for ratio in args.ratios:
            total = torch.zeros(2, dtype=torch.float64, device=world.device)
            for start in range(0, most, args.batch_rows):
                part = slice(start, start + args.batch_rows)
                view = split_positions(index[part], source.seq_len, ratio, 0)
                total += torch.stack(loss(tokens[part], view, counts[part]))
            summed = sum_over_ranks(LossSum(*total))
            results[f"valid/{name}/loss@{ratio:g}"] = float(summed.loss / summed.targets)
    return results
