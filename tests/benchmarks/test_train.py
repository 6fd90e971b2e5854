"""benchmarks.train at toy size: what it counts, what its contestants do, and what it calls met."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train
from benchmarks.contestants import Size, bare_products, ours, peer
from benchmarks.overheads import head_memory, shares_of_training
from benchmarks.train import BARS, TOY_SIZES, Comparison, TrainSpeedArgs, bars, main, measure
from lingua.errors import UserError

SIZE = Size(32, 2, 2, predictor_layers=1, rows=2, seq_len=20, vocab_size=50)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["bert", "crossbert"])
def test_bare_products_are_those_of_the_model(kind: str) -> None:
    assert (
        bare_products(kind, SIZE, CPU, torch.float32).products == ours(kind, SIZE, CPU, torch.float32, False).products
    )


def test_products_of_bert_by_hand() -> None:
    # 32 wide, feed-forward 256: 4 * 32 * 32 + 3 * 32 * 256 weights a block; 8 of 40 positions masked; 50 entries.
    by_hand = 6 * (40 * 2 * (4 * 32 * 32 + 3 * 32 * 256) + 8 * 32 * 50)
    bert = ours("bert", SIZE, CPU, torch.float32, False)
    assert bert.products == by_hand
    assert bert.all_flops == by_hand + 3 * 40 * 2 * 4 * 32 * 20  # attention: 2 products of 20 x 16 x 20, 2 heads
    assert bert.tokens == 40
    assert ours("crossbert", SIZE, CPU, torch.float32, False).tokens == 80


def test_peers_train_on_real_tokens_only() -> None:
    for kind in ("modernbert", "eurobert", "bert"):
        shipped = peer(kind, SIZE, CPU, torch.float32, False, as_shipped=True)
        shipped.step()
        assert shipped.tokens == 10 + 20  # rows of half and full length


def test_a_bar_is_met_from_the_right_side() -> None:
    least, most = "6x256: bert over the fastest compiled peer", "seconds to the first step"
    found = {bar["name"]: bar["met"] for bar in bars({least: 1.2, most: 21.0, "something else": 1.0})}
    assert found == {least: True, most: False}
    assert not bars({least: math.nan})[0]["met"]
    assert not bars({most: math.nan})[0]["met"]


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match="sizes="):
        TrainSpeedArgs(out="x", sizes=["7x7"])
    with pytest.raises(UserError, match="parts="):
        TrainSpeedArgs(out="x", parts=["peer"])
    for empty in ({"sizes": []}, {"parts": []}):
        with pytest.raises(UserError, match="expected at least one of each"):
            TrainSpeedArgs(out="x", **empty)
    for name in ("rounds", "rows"):
        with pytest.raises(UserError, match=f"{name}=0: expected at least 1"):
            TrainSpeedArgs(out="x", **{name: 0})


def test_rows_replace_those_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(Comparison, "peers", lambda self, name, size: taken.append((size.dim, size.rows)))
    for rows in (None, 1):
        measure(TrainSpeedArgs(out="x", rows=rows), "peers", "28x768")
    assert taken == [(768, 4), (768, 1)]


def test_without_transformers_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"peers\] needs the package transformers .* -r requirements-eval.txt"):
        main(TrainSpeedArgs(out=str(tmp_path / "x"), toy=True))


def killed(args: TrainSpeedArgs, part: str, name: str) -> tuple[dict[str, float], list]:
    """In place of a measurement that the system ends for want of memory."""
    if part == "crossbert":
        os.kill(os.getpid(), signal.SIGKILL)
    return {f"{name}: {part}": 2.0}, [{"size": name}]


def test_what_was_killed_is_named_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "measure", killed)
    out = tmp_path / "train.json"
    with pytest.raises(UserError, match=r"want of memory: crossbert of 6x256\. The rest is in .*train\.json"):
        main(TrainSpeedArgs(out=str(out), sizes=["6x256"], parts=["products", "crossbert"]))
    result = json.loads(out.read_text())
    assert (result["figures"], result["killed"]) == ({"6x256: products": 2.0}, ["crossbert of 6x256"])


@pytest.mark.slow
def test_the_command_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "train.json"
    main(TrainSpeedArgs(out=str(out), rounds=1, toy=True, parts=["products", "crossbert"]))
    result = json.loads(out.read_text())
    measured = {name for name in BARS if "over its bare" in name or "ratio" in name}
    assert measured == set(BARS) & set(result["figures"])
    assert result["bars"] == []
    assert result["figures"]["6x256: FLOPs ratio of bert and crossbert"] > 1
    assert len(result["steps"]) == 2 * 2 * len(TOY_SIZES)
    assert "6x256: FLOP rate of bert" in capsys.readouterr().out
    assert {bar["name"] for bar in bars(result["figures"])} == measured
    shares = shares_of_training(toy=True)
    assert all(0 < share < 1 for share in shares.values())
    memory = head_memory(torch.float32, 1, toy=True)
    assert memory["peak GB at the naive output"] > 512 * 50265 * 4 / 1e9  # its logits at least
