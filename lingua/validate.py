"""Validation losses that compare across models: the same rows and the same hidden positions for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from lingua.data import Rows
from lingua.distributed import World, sum_over_ranks
from lingua.errors import UserError
from lingua.loss import Sums, add_up
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
def validate(
    sources: dict[str, TokenSource],
    args: ValidationArgs,
    world: World,
    loss: Callable[[Rows, View], Sums],
    masked: bool = True,
) -> dict[str, float]:
    """Mean loss per target in nats, as ``valid/SET/loss@RATIO``; another loss's figures by their names.

    Args:
        sources: the validation sets by name.
        world: the ranks that share the rows.
        loss: summed loss of rows on the hidden positions of a view, where rows have weight 1 and not 0.
        masked: False if the loss is that of each next token: then it is ``valid/SET/next_token_loss``, at no ratio.
    """
    results = {}
    for name, source in sources.items():
        numbers = np.arange(min(args.rows, source.tokens // source.seq_len))
        # A sharded model is gathered by all ranks together, so all take the same number of batches. Those that have
        # no row left take the first one, which then counts nothing.
        most = -(-len(numbers) // world.size)
        own = numbers[world.rank :: world.size]
        counts = torch.ones(most, device=world.device)
        counts[len(own) :] = 0
        own = np.append(own, numbers[: most - len(own)])
        tokens = torch.from_numpy(source.rows(own).astype(np.int64)).to(world.device)
        index = torch.from_numpy(own).to(world.device)
        for ratio in args.ratios if masked else args.ratios[:1]:
            parts = []
            for start in range(0, most, args.batch_rows):
                part = slice(start, start + args.batch_rows)
                rows = Rows(tokens[part], index[part], counts[part])
                with torch.compiler.set_stance("force_eager"):  # shapes differ: blocks would be compiled for each
                    found = loss(rows, split_positions(rows.index_B, source.seq_len, ratio, 0))
                parts.append(found._make(value.double() for value in found))
            for key, value in sum_over_ranks(add_up(parts)).figures().items():
                results[f"valid/{name}/{key}@{ratio:g}" if masked else f"valid/{name}/next_token_{key}"] = value
    return results
