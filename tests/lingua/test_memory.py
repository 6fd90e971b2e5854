"""Estimates of memory against what PyTorch's allocator gives out in a real training step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.bert.stages import StageArgs
from lingua.memory import MODES, Spread, backward_passes, training_memory
from tests.allocations import ROWS, make, measure
from tests.ranks import run_ranks


def estimate(app: str, passes: int = 1, ranks: int = 1, **case: Any) -> float:
    config, model = make(app, **case)
    distributed = config.distributed
    shard = ranks if distributed.dp_shard == -1 else distributed.dp_shard
    spread = Spread(ranks, shard, distributed.activation_checkpointing, distributed.reshard_after_forward)
    return training_memory(model, config, ROWS, passes, spread, "cpu").total


@pytest.mark.parametrize(
    ("app", "case"),
    [
        ("bert", {"passes": 2}),
        ("bert", {"checkpointing": "selective"}),
        ("bert", {"vocab": 20000}),
        ("bert", {"objective": "clm", "vocab": 20000}),
        ("crossbert", {}),
        ("crossbert", {"checkpointing": "block", "passes": 2}),
        ("crossbert", {"dtype": "bf16"}),
        ("bert", {"qk_norm": True}),
        ("bert", {"qk_norm": True, "dtype": "bf16"}),
        ("bert", {"n_heads": 8, "n_kv_heads": 2, "ffn_dim": 1024}),
        ("crossbert", {"predictor": {"self_attention": True}}),
    ],
    ids=str,
)
def test_it_is_near_what_the_allocator_counts(app: str, case: dict[str, Any]) -> None:
    assert estimate(app, **case) == pytest.approx(measure(app, **case), rel=0.15)


@pytest.mark.slow
def test_it_is_near_that_on_ranks_too(tmp_path: Path) -> None:
    cases = [
        {"app": app, "shard": shard, "passes": passes}
        for app, shard, passes in (("bert", -1, 1), ("bert", 1, 1), ("crossbert", -1, 2), ("crossbert", 1, 2))
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = ["-m", "tests.allocations", str(tmp_path / "out.json"), str(tmp_path / "cases.json")]
    ended = run_ranks(2, words, tmp_path / "ranks")
    assert (tmp_path / "out.json").exists(), ended[0].text
    measured = json.loads((tmp_path / "out.json").read_text())
    estimates = [estimate(**case, ranks=2) for case in cases]
    assert estimates == [pytest.approx(bytes_, rel=0.15) for bytes_ in measured]


def test_what_sharding_and_checkpointing_save() -> None:
    config, model = make("crossbert", dtype="bf16", vocab=50265)
    alone = training_memory(model, config, 64, 1, Spread())
    shared = training_memory(model, config, 64, 1, Spread(ranks=8, shard=8))
    assert shared.weights == alone.weights / 8
    assert shared.optimizer == alone.optimizer / 8
    totals = [training_memory(model, config, 64, 1, Spread(8, 8, mode)).total for mode in MODES]
    assert totals == sorted(totals, reverse=True)
    parameters = sum(p.numel() for p in model.parameters())
    assert (alone.weights, alone.optimizer) == (4 * parameters, 8 * parameters)


def test_a_stage_of_clm_decides_as_it_predicts_every_position() -> None:
    config, model = make("bert")
    alone = training_memory(model, config, 64, 1, Spread()).loss
    config.stages = {name: StageArgs(name) for name in ("clm", "mlm")}
    both = training_memory(model, config, 64, 1, Spread()).loss
    config.stages, config.objective = {}, "clm"
    assert training_memory(model, config, 64, 1, Spread()).loss == both > alone


def test_views_of_half_a_row_pass_together() -> None:
    config, _ = make("crossbert")
    assert backward_passes(config, 3) == 3
    config.masking.hidden_ratio = 0.25
    assert backward_passes(config, 3) == 6
    config.masking.complementary = False
    assert backward_passes(config, 3) == 3
