"""Which positions of a row are visible to the encoder and which are hidden from it.

A row's mask is a function of (seed, row index, position) and of nothing else: no random state, and the
same on every device, rank and batch size. Every row hides exactly the same number of positions, so all
batches are dense and no attention mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.hashing import counter_hash


@dataclass
class ReplaceArgs:
    """What BERT's encoder sees at a masked position; ``<mask>`` unless one of these draws it."""

    random_fraction: float = 0.0  # share that shows a random token (BERT's first recipe: 0.1)
    keep_fraction: float = 0.0  # share that shows the token itself (BERT's first recipe: 0.1)

    def __post_init__(self) -> None:
        random, keep = self.random_fraction, self.keep_fraction
        if not (random >= 0 and keep >= 0 and random + keep <= 1):
            raise UserError(
                f"masking.replace.random_fraction={random} and keep_fraction={keep}: "
                "both must be 0 or more, and at most 1 together"
            )


@dataclass
class View:
    """One way to split rows: the encoder sees ``visible_BT``, the loss asks for ``hidden_BM``.

    Both hold positions in the row, ascending, int64; ``B`` is a multiple of the number of rows when a mask
    and its inverse have equal lengths and are stacked into one batch (all masks first, then all inverses).
    """

    visible_BT: Tensor
    hidden_BM: Tensor


def hidden_count(seq_len: int, ratio: float) -> int:
    """How many of ``seq_len`` positions a ratio hides: ``round(seq_len * ratio)``, at least 1 on each side.

    Raises:
        UserError: no ratio between 0 and 1, or one that leaves nothing hidden or nothing visible.
    """
    if not 0.0 < ratio < 1.0:
        raise UserError(f"hidden ratio {ratio}: expected a number above 0 and below 1")
    count = round(seq_len * ratio)
    if seq_len < 2:
        raise UserError(f"data.seq_len={seq_len}: a row needs at least 2 positions, one to hide and one to see")
    if not 1 <= count <= seq_len - 1:
        raise UserError(
            f"hidden ratio {ratio} on rows of {seq_len} positions hides {count} of them: at least one must be hidden "
            f"and one visible; a ratio from {1 / seq_len:.6g} to {1 - 1 / seq_len:.6g} does that, or give longer rows"
        )
    return count


def split_positions(rows_B: Tensor, seq_len: int, ratio: float, seed: int) -> View:
    """Hide the ``hidden_count`` positions of each row that have the smallest hashes.

    Args:
        rows_B: global row indices, int64, on the device that shall hold the result.
    """
    count = hidden_count(seq_len, ratio)
    positions_S = torch.arange(seq_len, device=rows_B.device)
    order_BS = counter_hash(seed, rows_B[:, None], positions_S).argsort(dim=1, stable=True)
    return View(visible_BT=order_BS[:, count:].sort(dim=1).values, hidden_BM=order_BS[:, :count].sort(dim=1).values)


def complementary_views(rows_B: Tensor, seq_len: int, ratio: float, seed: int) -> list[View]:
    """A mask and its inverse, so that every position is predicted once (CMS, section 3.2).

    Returns:
        one stacked view of 2B rows if both halves have the same length, else two views of B rows.
    """
    view = split_positions(rows_B, seq_len, ratio, seed)
    inverse = View(visible_BT=view.hidden_BM, hidden_BM=view.visible_BT)
    if view.hidden_BM.shape != view.visible_BT.shape:
        return [view, inverse]
    return [
        View(
            torch.cat((view.visible_BT, inverse.visible_BT)),
            torch.cat((view.hidden_BM, inverse.hidden_BM)),
        )
    ]


def predict_part(view: View, rows_B: Tensor, share: float, seed: int) -> View:
    """Ask for a share of the hidden positions only, at least one; the others stay hidden all the same.

    Args:
        view: of the rows, or several stacked views of them.
        rows_B: global row indices; which positions are asked for is a function of these and the seed.
    """
    hidden_BM = view.hidden_BM
    count = max(1, round(hidden_BM.shape[1] * share))
    if count == hidden_BM.shape[1]:
        return view
    rows_B = rows_B.repeat(len(hidden_BM) // len(rows_B))
    order_BM = counter_hash(seed, 4, rows_B[:, None], hidden_BM).argsort(dim=1, stable=True)
    return View(view.visible_BT, hidden_BM.gather(1, order_BM[:, :count].sort(dim=1).values))


def mask_tokens(
    tokens_BS: Tensor,
    hidden_BM: Tensor,
    mask_id: int,
    special_ids: tuple[int, ...],
    replace: ReplaceArgs | None = None,
    rows_B: Tensor | None = None,
    seed: int = 0,
    vocab_size: int = 0,
) -> Tensor:
    """BERT's input: ``mask_id`` at the hidden positions, except where a special token stands.

    Args:
        replace: what else than ``mask_id`` stands there at times; needs ``rows_B`` (global row indices),
            ``seed`` and ``vocab_size``, of which the choice is a function. Random tokens are uniform over the ids
            that are not special.
    """
    original_BM = tokens_BS.gather(1, hidden_BM)
    shown_BM = torch.full_like(original_BM, mask_id)
    if replace is not None and (replace.random_fraction or replace.keep_fraction):
        # 53 bits of one hash choose what is shown, another hash chooses the random token.
        chance = (counter_hash(seed, 1, rows_B[:, None], hidden_BM) >> 11 & (1 << 53) - 1).double() / (1 << 53)
        random_BM = counter_hash(seed, 2, rows_B[:, None], hidden_BM) % (vocab_size - len(set(special_ids)))
        for token_id in sorted(set(special_ids)):  # the n-th ordinary token: one further for each special id before it
            random_BM = random_BM + (random_BM >= token_id)
        shown_BM = torch.where(chance < replace.random_fraction, random_BM, shown_BM)
        shown_BM = torch.where(chance >= 1.0 - replace.keep_fraction, original_BM, shown_BM)
    is_special = target_weights(original_BM, special_ids) == 0
    return tokens_BS.scatter(1, hidden_BM, torch.where(is_special, original_BM, shown_BM))


def documents(tokens_BS: Tensor, start_id: int) -> Tensor:
    """Number of the document that each token of a row belongs to, int64 [B, S]; ``start_id`` opens one."""
    return (tokens_BS == start_id).cumsum(dim=1)


def same_document(queries_BS: Tensor, keys_BT: Tensor) -> Tensor:
    """Attention mask [B, 1, S, T] that keeps queries to keys of their own document."""
    return (queries_BS[:, :, None] == keys_BT[:, None, :])[:, None]


def target_weights(targets: Tensor, special_ids: tuple[int, ...], weight_B: Tensor | None = None) -> Tensor:
    """1.0 where a token counts as a prediction target, else 0.0 (special tokens, padding rows).

    Args:
        targets: [B, S] token ids.
        special_ids: ids that are never predicted; empty to predict all.
        weight_B: 0.0 for rows that only pad the batch.
    """
    weights = torch.ones_like(targets, dtype=torch.float32)
    for token_id in special_ids:
        weights = weights * (targets != token_id)
    return weights if weight_B is None else weights * weight_B[:, None]
