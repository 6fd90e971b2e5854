"""Every run of the experiment is a config that its app accepts, and its figures are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from apps.bert.train import BertTrainArgs
from apps.crossbert.train import CrossBertTrainArgs
from experiments import objectives
from experiments.objectives import ObjectivesArgs, compare, rounded_interval, summary, train_words
from lingua.args import parse, read_yaml
from lingua.errors import UserError
from tests.support import ROOT

CLASSES = {"bert": BertTrainArgs, "crossbert": CrossBertTrainArgs}


def test_every_run_parses_and_differs_in_what_its_name_says_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = read_yaml(objectives.RUNS)
    made = {
        name: parse(CLASSES[options["app"]], train_words(options, Path("x") / name, 10, 1e12))
        for name, options in runs.items()
    }
    for name, args in made.items():
        assert (args.seed, args.flops, args.dump_dir) == (10, 1e12, f"x/{name}")
        assert (args.data, args.optim, args.validation) == (
            made["bert"].data,
            made["bert"].optim,
            made["bert"].validation,
        )
        rows = args.batch_tokens // args.data.seq_len
        assert rows // (2 if getattr(args.masking, "complementary", False) else 1) == 16  # the same text in a step
    assert [s.objective for s in made["clm_mlm"].stages.values()] == ["clm", "mlm"]
    assert made["electra"].objective == "rtd"
    assert not made["crossbert_single_65"].masking.complementary
    assert made["crossbert_65"].masking.hidden_ratio == made["crossbert_single_65"].masking.hidden_ratio == 0.65


def test_intervals_are_students() -> None:
    low, high = stats.t.interval(0.95, 2, loc=71.0, scale=stats.sem([70.0, 71.0, 72.0]))
    assert rounded_interval([70.0, 71.0, 72.0]) == {"mean": 71.0, "plus_minus": round((high - low) / 2, 2)}
    found = {
        "bert": [{"accuracy": [70.0, 65.0]}, {"accuracy": [72.0, 67.0]}],
        "other": [{"accuracy": [60.0, 70.0]}, {"accuracy": [62.0, 71.0]}],
    }
    compared = compare(found)
    assert compared["bert"]["best"]["layer"] == 0
    assert compared["bert"]["last above bert"] == {"mean": 0.0, "plus_minus": 0.0}
    assert compared["other"]["last above bert"]["mean"] == 4.5
    with pytest.raises(UserError, match="expected 2 or more, all different"):
        ObjectivesArgs(out="x", seeds=[1])


@pytest.mark.parametrize(("key", "value"), [("loss", 3.0), ("generator_loss", 4.0), ("loss", None)])
def test_a_summary_takes_the_masked_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: float
) -> None:
    last = {"step": 9, "loss": 5.0, "flops": 1.0, "tokens": 2, "data_tokens": 1}
    records = [last, {"step": 9, f"valid/english/{key}@0.15": value}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(objectives, "accuracies", lambda folder: [1.0])
    monkeypatch.setattr(objectives, "resolve", lambda folder: Path("0000000009"))
    found = summary(tmp_path)["loss"]
    assert math.isnan(found) if value is None else found == value
