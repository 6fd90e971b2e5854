"""Both pretraining models against the paper's tables, a slow reference, and each other."""

from __future__ import annotations

import csv

import pytest
import torch

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.loss import LossSum
from lingua.masking import View, complementary_views, mask_tokens, split_positions
from lingua.paper import FOLDER
from lingua.predictor import PredictorArgs

SPECIAL = (0, 1, 2, 3, 4)


def paper_rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}_models.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", paper_rows("bert"), ids=lambda row: f"bert-{row['id']}")
def test_bert_parameters_and_flops_equal_table_10(row: dict[str, str]) -> None:
    shape = {"dim": int(row["dim"]), "n_layers": int(row["n_layers"]), "n_heads": int(row["n_heads"])}
    with torch.device("meta"):
        model = Bert(BertArgs(**shape, vocab_size=50265))
    assert shape["dim"] // shape["n_heads"] == int(row["head_dim"])
    assert model.parameter_counts()["full"] == pytest.approx(float(row["params_m"]) * 1e6, rel=5e-4)
    assert model.flops_per_token(512) * float(row["tokens_b"]) * 1e9 == pytest.approx(float(row["flops"]), rel=5e-3)


@pytest.mark.parametrize("row", paper_rows("crossbert"), ids=lambda row: f"crossbert-{row['id']}")
def test_crossbert_parameters_and_flops_equal_table_11(row: dict[str, str]) -> None:
    last = row["id"] == "8"
    args = CrossBertArgs(
        dim=int(row["enc_dim"]),
        n_layers=int(row["enc_layers"]),
        n_heads=int(row["enc_heads"]),
        vocab_size=50265,
        predictor=PredictorArgs(int(row["pred_dim"]), int(row["pred_layers"]), int(row["pred_heads"])),
    )
    with torch.device("meta"):
        model = CrossBert(args)
    counts = model.parameter_counts()
    printed = float(row["params_m"]) * 1e6
    if last:  # this row prints the full count, with an output matrix of its own
        assert counts["full"] + 50265 * args.dim == pytest.approx(printed, rel=5e-4)
    else:
        assert counts["per_token"] == pytest.approx(printed, rel=5e-4)
    width, ffn = args.dim, 256 * -(-int(8 * args.dim / 3) // 256)
    assert counts["full"] - counts["encoder"] == args.predictor.n_layers * (4 * width**2 + 3 * width * ffn)
    flops = model.flops_per_token(512, 0.5, complementary=True) * float(row["tokens_b"]) * 1e9
    # The last row's printed 5.0e21 has two digits and is 2% under its own formula.
    assert flops == pytest.approx(5.10e21 if last else float(row["flops"]), rel=5e-3)


def test_encoder_only_counts_of_the_paper() -> None:
    """'CrossBERT 1B' (id 7) is an encoder of 1.91B at inference, against BERT's 1.21B; Table 3 prints 279M."""
    with torch.device("meta"):
        large = CrossBert(CrossBertArgs(1920, 41, 15, 50265, predictor=PredictorArgs(n_layers=10)))
        base = CrossBert(CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(n_layers=6)))
    assert large.parameter_counts()["encoder"] == pytest.approx(1.91e9, rel=5e-3)
    assert base.parameter_counts()["full"] == pytest.approx(279e6, rel=5e-3)


def test_flops_follow_the_ratio_only_without_complementary_masks() -> None:
    with torch.device("meta"):
        model = CrossBert(CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(n_layers=6)))
    both = {ratio: model.flops_per_token(512, ratio, True) for ratio in (0.2, 0.5, 0.8)}
    assert len(set(both.values())) == 1
    encoder = 6 * 28 * (4 * 768**2 + 3 * 768 * 2048) + 12 * 768 * 28 * 512
    predictor = 6 * 6 * (4 * 768**2 + 3 * 768 * 2048) + 12 * 768 * 6 * 512
    assert model.flops_per_token(512, 0.2, False) == pytest.approx(0.8 * encoder + 0.2 * predictor)
    assert both[0.5] == pytest.approx((encoder + predictor) / 2)


def tiny_crossbert(**changes: object) -> CrossBert:
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}
    return CrossBert(CrossBertArgs(**shape, predictor=PredictorArgs(n_layers=2), **changes), SPECIAL, seed=1)


def tokens_and_rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0)), torch.tensor([5, 6, 900])


@torch.no_grad()
def test_nothing_of_a_hidden_token_reaches_encoder_or_predictor() -> None:
    model = tiny_crossbert()
    tokens, rows = tokens_and_rows()
    view = split_positions(rows, 12, 0.5, 0)

    def outputs(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        visible = model.encoder(tokens.gather(1, view.visible_BT), view.visible_BT)
        return visible, model.predictor(visible, view.visible_BT, view.hidden_BM)

    visible, predicted = outputs(tokens)
    for slot in range(view.hidden_BM.shape[1]):
        changed = tokens.scatter(1, view.hidden_BM[:, slot : slot + 1], 49)
        assert all(torch.equal(a, b) for a, b in zip(outputs(changed), (visible, predicted), strict=True))
    # and the visible ones do reach both, so that the test can fail
    changed = tokens.scatter(1, view.visible_BT[:, :1], 49)
    assert not torch.equal(outputs(changed)[0], visible)
    assert not torch.equal(outputs(changed)[1], predicted)


@torch.no_grad()
def test_rows_do_not_see_each_other() -> None:
    model = tiny_crossbert()
    tokens, rows = tokens_and_rows()
    order = torch.tensor([2, 0, 1])
    view, permuted = (complementary_views(r, 12, 0.5, 0)[0] for r in (rows, rows[order]))
    states = model.encoder(tokens.repeat(2, 1).gather(1, view.visible_BT), view.visible_BT)
    again = model.encoder(tokens[order].repeat(2, 1).gather(1, permuted.visible_BT), permuted.visible_BT)
    torch.testing.assert_close(states.unflatten(0, (2, 3))[:, order].flatten(0, 1), again, rtol=0, atol=1e-6)
    torch.testing.assert_close(model(tokens, view).loss, model(tokens[order], permuted).loss)


@pytest.mark.parametrize("kind", ["bert", "crossbert"])
def test_isolated_documents_are_as_rows_of_their_own(kind: str) -> None:
    """A row of three documents, one of which a view may hide as a whole, gives the sum of their losses."""
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "init_std": 0.2}
    lengths = [5, 2, 5]
    tokens = torch.randint(5, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    starts = [sum(lengths[:i]) for i in range(3)]
    tokens[0, starts] = 0
    view = View(torch.tensor([[0, 2, 3, 8, 9, 11]]), torch.tensor([[1, 4, 5, 6, 7, 10]]))  # document 2 is hidden
    if kind == "bert":
        model = Bert(BertArgs(**shape), SPECIAL, 1, document_start=0).double()
        call = lambda t, v: model(mask_tokens(t, v.hidden_BM, 4, SPECIAL), t, v)  # noqa: E731
    else:
        model = CrossBert(CrossBertArgs(**shape, predictor=PredictorArgs(n_layers=2)), SPECIAL, 1, 0).double()
        call = model
    whole, alone = call(tokens, view), []
    for start, length in zip(starts, lengths, strict=True):
        visible, hidden = (
            part[(part >= start) & (part < start + length)][None] - start for part in (view.visible_BT, view.hidden_BM)
        )
        if visible.numel() or kind == "bert":
            alone.append(call(tokens[:, start : start + length], View(visible, hidden)))
        else:  # nothing to look at: attention brings nothing, the rest of the predictor remains
            x = model.predictor.mask_vector.expand(1, length, -1)
            for layer in model.predictor.layers:
                x = x + layer.ffn(layer.ffn_norm(x))
            logits = model.predictor.norm(x)[0] @ model.encoder.embedding.weight.T
            targets = tokens[0, start : start + length]
            losses = -logits.log_softmax(-1).gather(1, targets[:, None])[targets != 0]
            alone.append(LossSum(losses.sum(), torch.tensor(float(len(losses)))))
    torch.testing.assert_close(whole.loss, sum(part.loss for part in alone), rtol=1e-5, atol=0)  # angles are float32
    assert whole.targets == sum(part.targets for part in alone)
    model.document_start = None
    assert abs(call(tokens, view).loss.item() / whole.loss.item() - 1) > 1e-3  # without isolation it is another loss


def slow_complementary_loss(model: CrossBert, tokens: torch.Tensor, views: list[View]) -> torch.Tensor:
    """The loss row by row, view by view and target by target."""
    total = torch.zeros((), dtype=torch.float64)
    for view in views:
        for i in range(len(view.visible_BT)):
            row = tokens[i % len(tokens)]
            seen, hidden = view.visible_BT[i], view.hidden_BM[i]
            states = model.encoder(row[seen][None], seen[None])
            for position in hidden:
                if int(row[position]) in SPECIAL:
                    continue
                # One hidden position alone: the others must not matter.
                state = model.predictor(states, seen[None], position.reshape(1, 1))[0, 0]
                logits = model.encoder.embedding.weight @ state
                total = total - logits.log_softmax(0)[row[position]]
    return total


@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_complementary_loss_and_gradient_equal_plain_loops(ratio: float) -> None:
    model = tiny_crossbert().double()
    tokens, rows = tokens_and_rows()
    views = complementary_views(rows, 12, ratio, 0)
    parts = [model(tokens, view) for view in views]
    sum(part.loss for part in parts).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = slow_complementary_loss(model, tokens, views)
    expected.backward()
    # Every token that is not special is a target exactly once.
    assert sum(int(part.targets) for part in parts) == sum(int(t) not in SPECIAL for t in tokens.flatten())
    torch.testing.assert_close(sum(part.loss for part in parts), expected, rtol=1e-10, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-10)
        assert parameter.grad.abs().max() > 0, name


def test_rows_of_weight_zero_count_for_nothing() -> None:
    model = tiny_crossbert()
    tokens, rows = tokens_and_rows()
    view = complementary_views(rows, 12, 0.5, 0)[0]
    padded = model(tokens, view, torch.tensor([1.0, 0.0, 1.0]))
    kept = complementary_views(rows[[0, 2]], 12, 0.5, 0)[0]
    alone = model(tokens[[0, 2]], kept)
    torch.testing.assert_close(padded.loss, alone.loss)
    assert padded.targets == alone.targets


def test_a_predictor_of_another_width_has_the_papers_parameters() -> None:
    """Table 4: 12 blocks of width 192 read an encoder of 768 with 7.96M weights in their blocks."""
    args = CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(192, 12, 3))
    with torch.device("meta"):
        predictor = CrossBert(args).predictor
    assert sum(p.numel() for p in predictor.layers.parameters() if p.dim() == 2) == pytest.approx(7.96e6, rel=1e-3)


@torch.no_grad()
def test_bert_predicts_masked_positions_from_the_whole_row() -> None:
    model = Bert(BertArgs(dim=32, n_layers=2, n_heads=2, vocab_size=50, init_std=0.2), SPECIAL, seed=1)
    tokens, rows = tokens_and_rows()
    view = split_positions(rows, 12, 0.25, 0)
    inputs = mask_tokens(tokens, view.hidden_BM, 4, SPECIAL)
    loss, targets = model(inputs, tokens, view)
    logits = model.encoder(inputs) @ model.encoder.embedding.weight.T
    expected, count = 0.0, 0
    for i, row in enumerate(tokens):
        for position in view.hidden_BM[i]:
            if int(row[position]) not in SPECIAL:
                expected -= float(logits[i, position].log_softmax(0)[row[position]])
                count += 1
    assert int(targets) == count
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_bert_and_crossbert_start_from_the_same_encoder() -> None:
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50}
    bert, crossbert = Bert(BertArgs(**shape), seed=4), CrossBert(CrossBertArgs(**shape), seed=4)
    for name, parameter in bert.encoder.named_parameters():
        assert torch.equal(parameter, crossbert.encoder.get_parameter(name))


@pytest.mark.parametrize("kind", ["bert", "crossbert"])
def test_eight_rows_are_learnt_by_heart(kind: str) -> None:
    tokens = torch.randint(5, 50, (8, 16), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(8)
    shape = {"dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 50}
    view = complementary_views(rows, 16, 0.5, 0)[0] if kind == "crossbert" else split_positions(rows, 16, 0.25, 0)
    if kind == "crossbert":
        model = CrossBert(CrossBertArgs(**shape, predictor=PredictorArgs(n_layers=1)), SPECIAL)
        call = lambda: model(tokens, view)  # noqa: E731
    else:
        model = Bert(BertArgs(**shape), SPECIAL)
        call = lambda: model(mask_tokens(tokens, view.hidden_BM, 4, SPECIAL), tokens, view)  # noqa: E731
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        part = call()
        (part.loss / part.targets).backward()
        adam.step()
        adam.zero_grad()
    assert float(part.loss.detach() / part.targets) < 0.02
