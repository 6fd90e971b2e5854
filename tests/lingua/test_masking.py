from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lingua.errors import UserError
from lingua.hashing import counter_hash
from lingua.masking import (
    ReplaceArgs,
    complementary_views,
    hidden_count,
    mask_tokens,
    split_positions,
    target_weights,
)


@pytest.mark.parametrize(("ratio", "hidden"), [(0.2, 102), (0.5, 256), (0.65, 333), (0.15, 77)])
def test_every_row_hides_exactly_the_same_number(ratio: float, hidden: int) -> None:
    view = split_positions(torch.arange(50), 512, ratio, seed=1)
    assert view.hidden_BM.shape == (50, hidden)
    both = torch.cat((view.hidden_BM, view.visible_BT), dim=1).sort(dim=1).values
    assert (both == torch.arange(512)).all()
    assert (view.hidden_BM.diff(dim=1) > 0).all()
    assert (view.visible_BT.diff(dim=1) > 0).all()


def test_a_row_hides_its_positions_of_smallest_hash() -> None:
    view = split_positions(torch.tensor([41]), 10, 0.3, seed=9)
    hashes = [counter_hash(9, 41, position) for position in range(10)]
    assert view.hidden_BM[0].tolist() == sorted(np.argsort(hashes)[:3].tolist())


def test_every_position_is_hidden_equally_often() -> None:
    rows, seq_len, ratio = 20_000, 32, 0.25
    counts = torch.bincount(split_positions(torch.arange(rows), seq_len, ratio, 0).hidden_BM.flatten())
    expected = rows * ratio
    deviation = (rows * ratio * (1 - ratio)) ** 0.5
    assert (counts - expected).abs().max() < 4 * deviation


def test_masks_do_not_depend_on_batch_size_or_order() -> None:
    whole = split_positions(torch.arange(64), 64, 0.5, 3)
    for rows in (torch.tensor([5]), torch.tensor([63, 0, 5]), torch.arange(3, 20)):
        part = split_positions(rows, 64, 0.5, 3)
        assert (part.hidden_BM == whole.hidden_BM[rows]).all()


def test_masks_are_the_same_in_numpy_as_another_device_would_be() -> None:
    # No second device here: the same integer arithmetic in NumPy stands in for one.
    rows, positions = np.arange(30, dtype=np.int64)[:, None], np.arange(40, dtype=np.int64)
    order = np.argsort(counter_hash(4, rows, positions), axis=1, kind="stable")
    view = split_positions(torch.arange(30), 40, 0.5, 4)
    assert (np.sort(order[:, :20], axis=1) == view.hidden_BM.numpy()).all()


@pytest.mark.parametrize("seq_len", [64, 65])
@pytest.mark.parametrize("ratio", [0.5, 0.65])
def test_complementary_views_hide_every_position_exactly_once(seq_len: int, ratio: float) -> None:
    views = complementary_views(torch.arange(7), seq_len, ratio, 2)
    hidden = [part for view in views for part in view.hidden_BM.split(7)]
    assert (torch.cat(hidden, dim=1).sort(dim=1).values == torch.arange(seq_len)).all()
    for view in views:
        both = torch.cat((view.hidden_BM, view.visible_BT), dim=1).sort(dim=1).values
        assert (both == torch.arange(seq_len)).all()
    assert len(views) == (1 if seq_len == 64 and ratio == 0.5 else 2)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_what_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(UserError, match=f"hidden ratio {ratio}: expected a number above 0 and below 1"):
        hidden_count(64, ratio)


@pytest.mark.parametrize(("ratio", "count"), [(0.001, 0), (0.999, 64)])
def test_a_ratio_that_leaves_a_side_empty_is_refused(ratio: float, count: int) -> None:
    message = rf"hidden ratio {ratio} on rows of 64 positions hides {count} of them.* from 0\.015625 to 0\.984375 does"
    with pytest.raises(UserError, match=message):
        hidden_count(64, ratio)
    assert (hidden_count(64, 0.015625), hidden_count(64, 0.984375)) == (1, 63)  # what the message advises
    with pytest.raises(UserError, match=r"data\.seq_len=1: a row needs at least 2"):
        hidden_count(1, ratio)


def test_special_tokens_are_neither_masked_nor_targets() -> None:
    tokens = torch.tensor([[0, 10, 11, 2, 12, 13]])
    hidden = torch.tensor([[0, 2, 3]])
    assert mask_tokens(tokens, hidden, 4, special_ids=(0, 2)).tolist() == [[0, 10, 4, 2, 12, 13]]
    assert target_weights(tokens.gather(1, hidden), (0, 2)).tolist() == [[0.0, 1.0, 0.0]]
    assert mask_tokens(tokens, hidden, 4, special_ids=()).tolist() == [[4, 10, 4, 4, 12, 13]]
    assert target_weights(tokens, (), torch.tensor([0.0])).sum() == 0


def test_80_10_10() -> None:
    rows, seq_len, vocab = 2000, 64, 100
    special = (0, 1, 2, 3, 4)
    tokens = 5 + torch.arange(rows * seq_len).reshape(rows, seq_len) % 95
    index = torch.arange(rows)
    hidden = split_positions(index, seq_len, 0.25, 0).hidden_BM
    replace = ReplaceArgs(random_fraction=0.1, keep_fraction=0.1)
    inputs = mask_tokens(tokens, hidden, 4, special, replace, index, 0, vocab)
    shown, original = inputs.gather(1, hidden), tokens.gather(1, hidden)
    n = shown.numel()
    is_mask, kept = shown == 4, shown == original
    assert abs(float(is_mask.sum()) / n - 0.8) < 0.01
    assert abs(float(kept.sum()) / n - (0.1 + 0.1 / 95)) < 0.01  # a random token is the same by chance
    random = shown[~is_mask & ~kept]
    assert random.min() == 5
    assert random.max() == 99
    outside = torch.ones_like(tokens, dtype=torch.bool).scatter(1, hidden, False)
    assert (inputs[outside] == tokens[outside]).all()
    again = mask_tokens(tokens[7:9], hidden[7:9], 4, special, replace, index[7:9], 0, vocab)
    assert (again == inputs[7:9]).all()


@pytest.mark.parametrize("special", [(), (0,), (9,), (7, 0, 1, 8, 9), (2, 3, 5)])
def test_random_tokens_are_uniform_over_the_ids_that_are_not_special(special: tuple[int, ...]) -> None:
    rows, seq_len, vocab = torch.arange(2000), 20, 10
    ordinary = [i for i in range(vocab) if i not in special]
    tokens = torch.full((len(rows), seq_len), ordinary[0])
    hidden = split_positions(rows, seq_len, 0.5, 0).hidden_BM
    shown = mask_tokens(tokens, hidden, 4, special, ReplaceArgs(random_fraction=1.0), rows, 0, vocab).gather(1, hidden)
    counts = torch.bincount(shown.flatten(), minlength=vocab)
    n, share = shown.numel(), 1 / len(ordinary)
    assert (counts[list(special)] == 0).all()
    assert (counts[ordinary] - n * share).abs().max() < 4 * (n * share * (1 - share)) ** 0.5


def test_replacement_shares_are_checked() -> None:
    with pytest.raises(UserError, match=r"random_fraction=0\.6.*keep_fraction=0\.5"):
        ReplaceArgs(random_fraction=0.6, keep_fraction=0.5)
    for field in ("random_fraction", "keep_fraction"):
        for bad in (-0.1, math.nan, math.inf):
            with pytest.raises(UserError, match=f"{field}={bad}"):
                ReplaceArgs(**{field: bad})
