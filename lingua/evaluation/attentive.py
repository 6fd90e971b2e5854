"""Attentive probe: one learned query pools the tokens of a text, and a linear map reads the result.

For features whose information is spread over tokens, so that their mean is a poor summary (Bardes et al. 2024;
El-Nouby et al. 2024). Not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.errors import UserError, check_fields
from lingua.hashing import permutation


@dataclass
class AttentiveArgs:
    """Training of the attentive probe, with AdamW and a cosine schedule."""

    learning_rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3, 1e-2])  # the grid
    epochs: int = 10  # passes over the training rows
    batch_rows: int = 64  # texts in a step
    weight_decay: float = 0.01  # of AdamW

    def __post_init__(self) -> None:
        checks = {
            "learning_rates": (bool(self.learning_rates) and min(self.learning_rates) > 0, "numbers above 0"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_rows": (self.batch_rows >= 1, "at least 1"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
        }
        check_fields("probe.attentive", self, checks)


class TokenStates:
    """States of texts token by token: those of text ``i`` are ``states_TD[bounds[i]:bounds[i + 1]]``.

    ``texts[rows]`` with an array of row numbers or a boolean mask is the same for some of the texts.
    """

    def __init__(self, states_TD: np.ndarray, bounds: np.ndarray, rows: np.ndarray | None = None) -> None:
        self.states_TD, self.bounds = states_TD, bounds
        self.rows = np.arange(len(bounds) - 1) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: np.ndarray) -> TokenStates:
        return TokenStates(self.states_TD, self.bounds, self.rows[rows])

    def batch(self, places: Sequence[int] | np.ndarray, device: str) -> tuple[Tensor, Tensor]:
        """(states [B, S, D], padded with zeros, and the mask [B, S] of real tokens) of some texts."""
        texts = [
            torch.from_numpy(np.array(self.states_TD[self.bounds[row] : self.bounds[row + 1]], dtype=np.float32))
            for row in self.rows[places]
        ]
        x_BSD = nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        lengths_B = torch.tensor([len(text) for text in texts], device=device)
        return x_BSD, torch.arange(x_BSD.shape[1], device=device) < lengths_B[:, None]


class AttentiveProbe(nn.Module):
    """``softmax(x q / sqrt(D))`` weighs the tokens, standardized by the training rows' mean and deviation."""

    def __init__(self, mean_D: Tensor, deviation_D: Tensor, outputs: int) -> None:
        super().__init__()
        self.register_buffer("mean_D", mean_D)
        self.register_buffer("deviation_D", deviation_D)
        self.query_D = nn.Parameter(torch.zeros_like(mean_D))  # uniform weights: mean pooling
        self.out = nn.Linear(len(mean_D), outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x_BSD: Tensor, real_BS: Tensor) -> Tensor:
        """[B, outputs]."""
        x_BSD = (x_BSD - self.mean_D) / self.deviation_D
        score_BS = (x_BSD @ self.query_D) * len(self.query_D) ** -0.5
        weight_BS = score_BS.masked_fill(~real_BS, -torch.inf).softmax(1)
        return self.out((weight_BS[..., None] * x_BSD).sum(1))


def attentive_predictions(
    train: TokenStates, y_N: np.ndarray, test: TokenStates, args: AttentiveArgs, seed: int, device: str
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield (setting, predictions for ``test``) for each learning rate. The weights start from zero, so the seed
    decides no more than the order of the rows."""
    classification = np.issubdtype(y_N.dtype, np.integer)
    classes_C, target_N = np.unique(y_N, return_inverse=True)
    center, spread = (0.0, 1.0) if classification else (y_N.mean(), y_N.std() or 1.0)
    if not classification:
        target_N = (y_N - center) / spread
    target = torch.as_tensor(target_N, device=device, dtype=torch.int64 if classification else torch.float32)
    for rate in args.learning_rates:
        probe = _train(train, target, len(classes_C) if classification else 1, args, rate, seed, device)
        with torch.inference_mode():
            places = np.arange(len(test))
            out = [probe(*test.batch(places[i : i + 256], device)) for i in range(0, len(test), 256)]
        out_MC = torch.cat(out).cpu().numpy().astype(np.float64)
        if not np.isfinite(out_MC).all():
            raise UserError(f"probe.attentive.learning_rates: training diverged at {rate}: leave it out")
        yield (
            {"learning_rate": rate},
            classes_C[out_MC.argmax(1)] if classification else out_MC[:, 0] * spread + center,
        )


def _train(
    texts: TokenStates, target_N: Tensor, outputs: int, args: AttentiveArgs, rate: float, seed: int, device: str
) -> AttentiveProbe:
    probe = AttentiveProbe(*_moments(texts, device), outputs).to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=rate, weight_decay=args.weight_decay)
    steps = args.epochs * -(-len(texts) // args.batch_rows)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    regression = target_N.is_floating_point()
    for epoch in range(args.epochs):
        order = permutation(len(texts), seed, epoch)
        for start in range(0, len(order), args.batch_rows):
            places = order[start : start + args.batch_rows]
            out_BC = probe(*texts.batch(places, device))
            wanted_B = target_N[torch.from_numpy(places).to(device)]
            loss = F.mse_loss(out_BC[:, 0], wanted_B) if regression else F.cross_entropy(out_BC, wanted_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return probe


def _moments(texts: TokenStates, device: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [D] over all tokens; 1 for the deviation of a constant channel."""
    count, total_D, squares_D = 0, 0.0, 0.0
    for start in range(0, len(texts), 256):
        x_BSD, real_BS = texts.batch(np.arange(start, min(start + 256, len(texts))), device)
        x_TD = x_BSD[real_BS].double()
        count, total_D, squares_D = count + len(x_TD), total_D + x_TD.sum(0), squares_D + x_TD.square().sum(0)
    mean_D = total_D / count
    variance_D = (squares_D / count - mean_D.square()).clamp(min=0)
    deviation_D = torch.where(variance_D > 1e-12 * mean_D.square() + 1e-30, variance_D.sqrt(), 1.0)
    return mean_D.float(), deviation_D.float()
