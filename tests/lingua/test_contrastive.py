"""The loss against sentence-transformers and float64 loops, and GradCache against one pass."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apps.embed.batches import share
from lingua.contrastive import Candidates, ContrastiveArgs, ContrastiveSum, backward_in_parts, gather_rows, info_nce
from lingua.errors import UserError
from tests.pairs import cosine

QUERIES, NEGATIVES, DIM = 5, 3, 12
NUMBERS = np.arange(QUERIES * (2 + NEGATIVES)).reshape(QUERIES, -1)  # every text a number of its own
OWN = {"in_batch": False, "cross_rank": False}


def vectors(seed: int = 0) -> tuple[Tensor, Tensor, Candidates]:
    """Queries, and passages as a rank has them: positives, then all first negatives, ..."""
    x_TD = torch.randn(NUMBERS.size, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    texts, n_queries, candidates = share(NUMBERS, 0, 1, True)
    x_TD = x_TD[torch.from_numpy(texts)]
    candidates = candidates._replace(weight_N=candidates.weight_N.double())
    return x_TD[:n_queries].requires_grad_(), x_TD[n_queries:].detach().requires_grad_(), candidates


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_own_negatives_are_equation_5_by_a_float64_loop(temperature: float) -> None:
    queries_ND, passages_MD, candidates = vectors()
    args = ContrastiveArgs(temperature=temperature, **OWN)
    found = info_nce(queries_ND, passages_MD, candidates, args, temperature)
    score_NM = np.exp(cosine(queries_ND.detach().numpy(), passages_MD.detach().numpy()) / temperature)
    expected = 0.0
    for n in range(QUERIES):
        positive = score_NM[n, n]
        negatives = [score_NM[n, n + QUERIES * (1 + k)] for k in range(NEGATIVES)]
        expected -= np.log(positive / (positive + sum(negatives)))
    assert float(found.loss) == pytest.approx(expected, rel=1e-12)
    assert found.figures()["negatives"] == NEGATIVES
    gradient = torch.autograd.grad(found.loss, queries_ND)[0]
    with torch.no_grad():  # by differences
        moved = queries_ND.clone()
        moved[2, 5] += 1e-6
        difference = info_nce(moved, passages_MD, candidates, args, temperature).loss - found.loss
    assert float(difference) / 1e-6 == pytest.approx(float(gradient[2, 5]), rel=1e-4)


def test_in_batch_negatives_are_sentence_transformers_multiple_negatives_ranking_loss() -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    queries_ND, passages_MD, candidates = vectors(1)
    found = info_nce(queries_ND, passages_MD, candidates, ContrastiveArgs(), 0.05)
    gradients = torch.autograd.grad(found.loss / found.targets, [queries_ND, passages_MD])
    theirs = MultipleNegativesRankingLoss(nn.Identity(), scale=20.0)
    expected = theirs.compute_loss_from_embeddings([queries_ND, *passages_MD.split(QUERIES)], None)
    assert float(found.loss / found.targets) == pytest.approx(float(expected), rel=1e-12)
    for ours, other in zip(gradients, torch.autograd.grad(expected, [queries_ND, passages_MD]), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-12, rtol=1e-9)
    assert found.figures()["negatives"] == QUERIES * (1 + NEGATIVES) - 1


def test_switches_choose_the_negatives() -> None:
    queries_ND, passages_MD, candidates = vectors(2)
    counts = {}
    for name, switches in {
        "both": {},
        "own": OWN,
        "others": {"own_negatives": False},
    }.items():
        counts[name] = info_nce(queries_ND, passages_MD, candidates, ContrastiveArgs(**switches), 0.1).figures()
    others = (QUERIES - 1) * (1 + NEGATIVES)
    assert {name: figures["negatives"] for name, figures in counts.items()} == {
        "both": others + NEGATIVES,
        "own": NEGATIVES,
        "others": others,
    }
    assert len({figures["loss"] for figures in counts.values()}) == 3


def test_matryoshka_is_the_mean_over_lengths() -> None:
    queries_ND, passages_MD, candidates = vectors(3)
    found = info_nce(queries_ND, passages_MD, candidates, ContrastiveArgs(matryoshka=[8, 3]), 0.05)
    parts = [
        info_nce(queries_ND[:, :dim], passages_MD[:, :dim], candidates, ContrastiveArgs(), 0.05).loss
        for dim in (12, 8, 3)
    ]
    assert float(found.loss) == pytest.approx(float(sum(parts)) / 3, rel=1e-12)


def test_the_margin_leaves_out_negatives_that_are_too_near() -> None:
    """By hand: one query along x; its passage at cosine 0.6; negatives at 0.8, 0.65 and 0."""
    queries_ND = torch.tensor([[1.0, 0.0]])
    passages_MD = torch.tensor([[0.6, 0.8], [0.8, 0.6], [0.65, (1 - 0.65**2) ** 0.5], [0.0, 1.0]])
    one = torch.zeros(1, dtype=torch.int64)
    real_M = torch.ones(4, dtype=torch.bool)
    positive_M = torch.tensor([True, False, False, False])
    candidates = Candidates(one, torch.ones(1), one.expand(4), positive_M, real_M)
    for margin, left in ((0.1, [0.65, 0.0]), (-0.1, [0.0]), (0.3, [0.8, 0.65, 0.0])):
        args = ContrastiveArgs(false_negative_margin=margin)
        found = info_nce(queries_ND, passages_MD, candidates, args, 1.0)
        expected = -np.log(np.exp(0.6) / (np.exp(0.6) + np.exp(left).sum()))
        assert float(found.loss) == pytest.approx(expected, abs=1e-6)
        assert (float(found.negatives), float(found.left_out)) == (len(left), 3 - len(left))
        assert float(found.found) == 0


def test_a_text_that_is_there_to_fill_up_counts_nothing() -> None:
    """Of two ranks with five queries, one has a sixth place; a row without a negative another."""
    numbers = NUMBERS.copy()
    numbers[3, 4] = -1
    texts, per_rank, candidates = share(numbers, 1, 2, True)
    assert (per_rank, candidates.query_N.tolist(), candidates.weight_N.tolist()) == (3, [1, 3, -1], [1, 1, 0])
    assert (texts >= 0).all()
    assert int(candidates.real_M.sum()) == QUERIES * (1 + NEGATIVES) - 1
    x_TD = torch.randn(NUMBERS.size, DIM, generator=torch.Generator().manual_seed(0))
    parts = [share(numbers, rank, 2, True) for rank in (0, 1)]
    passages_MD = torch.cat([x_TD[torch.from_numpy(part[0])][per_rank:] for part in parts])
    args, total = ContrastiveArgs(), ContrastiveSum(*torch.zeros(5))
    for part in parts:
        queries_ND = x_TD[torch.from_numpy(part[0])][:per_rank]
        found = info_nce(queries_ND, passages_MD, part[2], args, 0.05)
        total = ContrastiveSum(*(a + b for a, b in zip(total, found, strict=True)))
    alone = share(numbers, 0, 1, True)
    whole_TD = x_TD[torch.from_numpy(alone[0])]
    expected = info_nce(whole_TD[:QUERIES], whole_TD[QUERIES:], alone[2], args, 0.05)
    for ours, other in zip(total, expected, strict=True):
        assert float(ours) == pytest.approx(float(other), rel=1e-5)


def test_all_channels_decide_for_every_length_what_the_margin_leaves_out() -> None:
    """By hand: of the negatives, one is nearer in all channels, the other in the first alone."""
    queries_ND = torch.tensor([[1.0, 1.0]]).double()
    passages_MD = torch.tensor(
        [[-1.0, 2.0], [1.0, 1.0], [1.0, -3.0]]
    ).double()  # cosines 0.32, 1, -0.45; first: -1, 1, 1
    one = torch.zeros(1, dtype=torch.int64)
    positive_M = torch.tensor([True, False, False])
    candidates = Candidates(one, torch.ones(1), one.expand(3), positive_M, torch.ones(3, dtype=torch.bool))
    args = ContrastiveArgs(false_negative_margin=0.5, matryoshka=[1])
    found = info_nce(queries_ND, passages_MD, candidates, args, 1.0)
    whole = [0.1**0.5, -(0.2**0.5)]
    expected = sum(-np.log(np.exp(pair[0]) / np.exp(pair).sum()) for pair in (whole, [-1.0, 1.0])) / 2
    assert float(found.loss) == pytest.approx(expected, rel=1e-12)
    assert (float(found.negatives), float(found.left_out)) == (1, 1)


def test_a_query_that_only_fills_up_has_no_negatives_left_out() -> None:
    queries_ND, passages_MD, candidates = vectors(5)
    args = ContrastiveArgs(false_negative_margin=0.0)
    left = []
    for counted in ([1, 1, 1, 1, 1], [1, 0, 1, 1, 1], [0, 1, 0, 0, 0]):
        weighted = candidates._replace(weight_N=torch.tensor(counted, dtype=torch.float64))
        left.append(float(info_nce(queries_ND, passages_MD, weighted, args, 1.0).left_out))
    assert min(left) > 0
    assert left[0] == left[1] + left[2]


def test_an_encoder_that_gives_all_texts_one_vector_finds_nothing() -> None:
    _, _, candidates = vectors()
    found = info_nce(
        torch.ones(QUERIES, 4), torch.ones(QUERIES * (1 + NEGATIVES), 4), candidates, ContrastiveArgs(), 1.0
    )
    assert found.figures()["found"] == 0
    assert found.figures()["loss"] == pytest.approx(np.log(QUERIES * (1 + NEGATIVES)), rel=1e-6)


def test_gathered_rows_have_the_gradient_of_all_ranks_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks, the first played: its rows are ones, its gradient for all rows is 10."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_gather", lambda parts, x_ND: (parts[0].fill_(1.0), parts[1].copy_(x_ND)))
    monkeypatch.setattr(dist, "all_reduce", lambda grad: grad.add_(10.0))
    x_ND = torch.tensor([[2.0, 3.0], [4.0, 5.0]], requires_grad=True)
    found = gather_rows(x_ND)
    assert found.tolist() == [[1, 1], [1, 1], [2, 3], [4, 5]]
    (found * torch.arange(8.0).view(4, 2)).sum().backward()
    assert x_ND.grad.tolist() == [[14, 15], [16, 17]]


@dataclass
class Part:
    x_BD: Tensor

    def arguments(self) -> tuple[Tensor]:
        return (self.x_BD,)


class Model(nn.Module):
    def __init__(self, learn_temperature: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(DIM, 20), nn.Tanh(), nn.Linear(20, DIM)).double()
        self.log_temperature = nn.Parameter(torch.tensor([-2.0], dtype=torch.float64)) if learn_temperature else None

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x_BD), x_BD.new_ones(1) if self.log_temperature is None else self.log_temperature.exp()


@pytest.mark.parametrize("learn_temperature", [False, True])
@pytest.mark.parametrize("sizes", [(10, 10, 5), (1,) * 25])
def test_gradcache_gives_the_gradient_of_one_pass(sizes: tuple[int, ...], learn_temperature: bool) -> None:
    queries_ND, passages_MD, candidates = vectors(4)
    x_TD = torch.cat((queries_ND, passages_MD)).detach()

    def loss(vectors_TD: Tensor, temperature: Tensor) -> ContrastiveSum:
        temperature = temperature if learn_temperature else torch.tensor(0.05)
        return info_nce(vectors_TD[:QUERIES], vectors_TD[QUERIES:], candidates, ContrastiveArgs(), temperature)

    gradients, sums = [], []
    for parts in ([[Part(x_TD)]], [[Part(part)] for part in x_TD.split(sizes)], [[Part(p) for p in x_TD.split(9)]]):
        model = Model(learn_temperature)
        sums.append(backward_in_parts(model, parts, loss, contextlib.nullcontext))
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in (1, 2):
        assert float(sums[0].loss) == pytest.approx(float(sums[other].loss), rel=1e-12)
        for name, gradient in gradients[0].items():
            assert gradient.abs().max() > 1e-4
            torch.testing.assert_close(gradients[other][name], gradient, atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"loss\.temperature=0\.0: expected a finite number above 0"),
        ({"in_batch": False, "own_negatives": False}, r"loss\.in_batch=False: .* there are no others"),
        ({"in_batch": False}, r"loss\.cross_rank=True: expected false where loss\.in_batch is false"),
        ({"matryoshka": [0]}, r"loss\.matryoshka=\[0\]"),
        ({"false_negative_margin": float("nan")}, r"loss\.false_negative_margin=nan"),
    ],
)
def test_impossible_losses_are_named(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ContrastiveArgs(**change)
