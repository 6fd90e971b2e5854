from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua import transformer
from lingua.attention import attention, document_mask
from lingua.distributed import DistributedArgs, World, parallelize, start
from lingua.errors import UserError
from lingua.masking import View, complementary_views, split_positions
from lingua.predictor import PredictorArgs
from lingua.rotary import apply_rotary, rotary_angles
from lingua.stats import Stats, StatsArgs, attention_statistics, parameter_statistics
from tests.ranks import run_ranks

SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 2, "vocab_size": 97, "init_std": 0.1}
STEPS = 5


def bert() -> Bert:
    return Bert(BertArgs(**SHAPE), special_ids=(0, 1), seed=1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, View]:
    tokens = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(step))
    view = split_positions(torch.arange(4) + 4 * step, 16, 0.25, 0)
    return tokens.scatter(1, view.hidden_BM, 96), tokens, view


def train(
    model: nn.Module, every: int, precision: Any = contextlib.nullcontext, ranks: int = 1
) -> tuple[list[float], list[dict]]:
    """Losses of a small training loop of two micro-batches a step, and the statistics it wrote.

    ``ranks`` multiplies the gradients, as that many ranks with the same rows do.
    """
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    records: list[dict] = []
    stats = Stats(StatsArgs(every=every), model, adamw, precision, records.append)
    losses = []
    for step in range(1, STEPS + 1):
        with stats.step(step):
            total = 0.0
            for half in (slice(0, 2), slice(2, 4)):
                inputs, tokens, view = batch(step)
                with precision():
                    part = model(inputs[half], tokens[half], View(view.visible_BT[half], view.hidden_BM[half]))
                (part.loss * ranks).backward()
                total += part.loss.detach()
            adamw.step()
            adamw.zero_grad()
        losses.append(float(total))
    return losses, records


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_off_no_hook_is_registered() -> None:
    model = bert()
    adamw = torch.optim.AdamW(model.parameters())
    for stats in (
        Stats(StatsArgs(), model, adamw, contextlib.nullcontext, print),
        Stats(StatsArgs(every=3), model, adamw, contextlib.nullcontext, print),
    ):
        context = stats.step(2)
        assert isinstance(context, contextlib.nullcontext)
        with context:
            assert hooks(model, adamw) == 0
    with stats.step(3):
        assert hooks(model, adamw) == 2
    assert hooks(model, adamw) == 0


@pytest.mark.parametrize("precision", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_training_is_the_same_bit_for_bit(precision: Any) -> None:
    plain, nothing = train(model_off := bert(), 0, precision)
    watched, records = train(model_on := bert(), 2, precision)
    assert nothing == []
    assert [record["step"] for record in records] == [2, 4]
    assert watched == plain
    for one, other in zip(model_off.parameters(), model_on.parameters(), strict=True):
        assert torch.equal(one, other)
    assert transformer.attention is attention


def test_compiled_blocks_are_watched_without_another_compilation() -> None:
    def compiled() -> Bert:
        model = bert()
        for block in model.encoder.layers:
            block.compile(backend="eager", fullgraph=True, dynamic=False)
        return model

    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    plain, _ = train(compiled(), 0)
    compiled_once = graphs["unique_graphs"]
    assert compiled_once > 0
    torch._dynamo.reset()
    graphs.clear()
    watched, records = train(compiled(), 2)
    assert graphs["unique_graphs"] == compiled_once
    assert watched == plain
    _, expected = train(bert(), 2)
    assert [record.keys() for record in records] == [record.keys() for record in expected]
    for one, other in zip(records, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_checkpointed_blocks_have_the_statistics_of_plain_ones(mode: str) -> None:
    _, expected = train(bert(), 5)
    model = bert()
    parallelize(model, World(torch.device("cpu")), DistributedArgs(activation_checkpointing=mode), torch.float32, False)
    _, records = train(model, 5)
    assert records == expected


def entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def test_attention_against_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 2, 4, generator=generator), torch.randn(2, 5, 2, 4, generator=generator)
    mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
    mask[1, 0, 2] = False  # a query that may look nowhere
    for allowed in (None, mask):
        entropies: list[list[float]] = [[], []]
        largest = 0.0
        for b in range(2):
            for s in range(3):
                keys = [t for t in range(5) if allowed is None or allowed[b, 0, s, t]]
                for head in range(2):
                    logits = [float(q[b, s, head] @ k[b, t, head]) / 2 for t in keys]
                    if not keys:
                        continue
                    largest = max(largest, *(abs(x) for x in logits))
                    total = sum(math.exp(x) for x in logits)
                    entropies[head].append(entropy([math.exp(x) / total for x in logits]))
        means = [sum(part) / len(part) for part in entropies]
        found = [float(x) for x in attention_statistics(q, k, allowed)]
        assert found == pytest.approx([sum(means) / 2, min(means), largest], rel=1e-5)


def test_documents_give_the_same_whatever_the_backend() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 12, 2, 16, generator=generator) for _ in range(2))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 3]).repeat(2, 1)
    plain = attention_statistics(q, k, document_mask("sdpa", documents, documents))
    for backend in ("flex", "varlen"):
        assert attention_statistics(q, k, document_mask(backend, documents, documents)) == plain
    assert plain[0] < attention_statistics(q, k)[0]


def test_the_numbers_of_a_step() -> None:
    """Weights, gradients, states, attention and logits of the first step, each computed here in another way."""
    _, records = train(bert(), 1)
    with torch.no_grad():
        check_the_numbers(records)


def check_the_numbers(records: list[dict]) -> None:
    record = {key.removeprefix("stats/"): value for key, value in records[0].items()}
    model = bert()
    inputs, tokens, view = batch(1)
    with torch.enable_grad():
        model(inputs, tokens, view).loss.backward()
    for name, p in model.named_parameters():
        assert record[f"weight/{name}/norm"] == pytest.approx(float(p.square().sum()) ** 0.5, rel=1e-5)
        assert record[f"weight/{name}/max"] == float(p.abs().max())
        assert record[f"gradient/{name}/norm"] == pytest.approx(float(p.grad.square().sum()) ** 0.5, rel=1e-4)
        assert record[f"gradient/{name}/max"] == pytest.approx(float(p.grad.abs().max()), rel=1e-4)
    states = list(model.encoder.states(inputs[:2]))  # the first micro-batch
    for i, x in enumerate(states[1:]):
        assert record[f"activation/encoder.layers.{i}/rms"] == pytest.approx(float(x.square().mean() ** 0.5), rel=1e-5)
        assert record[f"activation/encoder.layers.{i}/max"] == pytest.approx(float(x.abs().max()), rel=1e-5)
    block = model.encoder.layers[2]
    normed = block.attention_norm(states[2])
    rotary = rotary_angles(torch.arange(16), 16, 10000.0)
    out = block.attention(normed, rotary)
    assert record["activation/encoder.layers.2.attention/rms"] == pytest.approx(float(out.square().mean() ** 0.5))
    q, k, _ = block.attention.wqkv(normed).view(2, 16, 3, 2, 16).unbind(2)
    q, k = (apply_rotary(x, *rotary) for x in (q, k))
    expected = attention_statistics(q, k)
    for name, value in zip(("entropy", "entropy_lowest_head", "logit_max"), expected, strict=True):
        assert record[f"attention/encoder.layers.2.attention/{name}"] == pytest.approx(float(value), rel=1e-5)
    assert 0 < record["attention/encoder.layers.2.attention/entropy"] < math.log(16)
    logits = (model.encoder(inputs[:2]) @ model.encoder.embedding.weight.T)[0]
    assert record["output/logit_rms"] == pytest.approx(float(logits.square().mean() ** 0.5), rel=1e-5)
    assert record["output/logit_max"] == pytest.approx(float(logits.abs().max()), rel=1e-5)


def test_crossbert_shows_predictor_attention_and_the_logits_of_hidden_tokens() -> None:
    model = CrossBert(CrossBertArgs(**SHAPE, predictor=PredictorArgs(n_layers=2)), seed=1)
    tokens = batch(0)[1]
    view = complementary_views(torch.arange(4), 16, 0.5, 0)[0]
    adamw, records = torch.optim.AdamW(model.parameters()), []
    with Stats(StatsArgs(every=1), model, adamw, contextlib.nullcontext, records.append).step(1):
        model(tokens, view).loss.backward()
        adamw.step()
    assert {f"stats/attention/{part}.attention/entropy" for part in ("encoder.layers.2", "predictor.layers.1")} <= set(
        records[0]
    )
    fresh = CrossBert(model.args, seed=1)
    visible = fresh.encoder(tokens.repeat(2, 1).gather(1, view.visible_BT), view.visible_BT)
    states = fresh.predictor(visible, view.visible_BT, view.hidden_BM)[0]
    expected = float((states @ fresh.encoder.embedding.weight.T).detach().abs().max())
    assert records[0]["stats/output/logit_max"] == pytest.approx(expected, rel=1e-5)


def test_a_loop_that_does_not_call_the_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = bert()
    adamw, records = torch.optim.AdamW(model.parameters()), []
    with Stats(StatsArgs(every=1), model, adamw, contextlib.nullcontext, records.append).step(1):
        model.encoder(batch(0)[0]).sum().backward()
        adamw.step()
    assert "the loop does not call the model itself" in caplog.text
    assert records[0]["stats/gradient/encoder.norm.weight/norm"] > 0


def test_nan_is_seen_and_not_hidden() -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.norm.weight[3] = math.nan
    found = parameter_statistics(model)
    assert math.isnan(found["weight/encoder.norm.weight/norm"])
    assert math.isnan(found["weight/encoder.norm.weight/max"])


def test_a_negative_cadence_is_refused() -> None:
    with pytest.raises(UserError, match=r"stats\.every=-1"):
        StatsArgs(every=-1)


class WithScale(nn.Module):
    """A BERT and a parameter of one element, of which a second rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()
        self.scale = nn.Parameter(torch.full((1,), -2.0))

    def init_weights(self) -> None:
        self.bert.init_weights()
        nn.init.constant_(self.scale, -2.0)

    def forward(self, *args: Any) -> Any:
        part = self.bert(*args)
        return part._replace(loss=part.loss * self.scale.abs().sum())


def train_on_ranks(folder: Path) -> None:
    """What one rank does: train on shards and on copies, with and without statistics, and write what came out."""
    torch.set_num_threads(1)
    world, results = start(60), {}
    for dp_shard in (1, 2):
        for every in (0, 1):
            args = DistributedArgs(dp_shard=dp_shard, activation_checkpointing="block")
            model = parallelize(WithScale(), world, args, torch.float32, compile=False)
            results[f"{dp_shard}, {every}"] = train(model, every)
    (folder / f"{world.rank}.json").write_text(json.dumps(results))


@pytest.mark.slow
def test_sharded_parameters_have_the_statistics_of_whole_ones(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from tests.lingua.test_stats import *; train_on_ranks(Path({str(tmp_path)!r}))"
    ended = run_ranks(2, ["-c", code], tmp_path)
    plain, records = train(WithScale(), 1, ranks=2)
    for rank in range(2):
        assert (tmp_path / f"{rank}.json").is_file(), ended[rank].text
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for dp_shard in (1, 2):
            losses, found = results[f"{dp_shard}, 1"]
            assert losses == results[f"{dp_shard}, 0"][0]  # the same bits as without
            assert losses == pytest.approx(plain, rel=1e-4)
            for sharded, whole in zip(found, records, strict=True):
                assert sharded == pytest.approx(whole, rel=1e-2, abs=1e-4)
            # before the first update nothing has drifted yet
            assert found[0] == pytest.approx(records[0], rel=1e-4, abs=1e-6)
