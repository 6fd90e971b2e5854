"""The experiment's words make configs that both programs accept, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

from apps.finetune.args import FinetuneArgs
from apps.finetune.grid import GridArgs, points
from experiments.finetuning import TASKS, compared, task_words
from lingua.args import parse
from lingua.evaluation.evaluate import EvalArgs
from tests.support import ROOT


def test_its_words_are_those_of_both_programs() -> None:
    words = ["ckpt=x", *task_words(-1)]
    args = parse(GridArgs, [*words, f"sweep={ROOT}/experiments/finetuning.yaml", "dump_dir=y", "epochs=3"])
    runs = points(args)
    assert len(runs) == 2 * 2 * 3
    assert {run.task for run in runs} == set(TASKS)
    probe = parse(EvalArgs, [*words, "probe.max_samples=80000"])
    for name, task in probe.tasks.items():  # the same rows
        own = args.tasks[name]
        for key in ("train", "test", "kind", "max_train_rows", "max_test_rows", "seed"):
            assert getattr(task, key) == getattr(own, key)
    few = parse(FinetuneArgs, ["ckpt=x", "dump_dir=y", *task_words(500)])
    assert {task.max_train_rows for task in few.tasks.values()} == {500}


def test_what_is_compared(tmp_path: Path) -> None:
    for lr, values in ((1e-3, [0.7, 0.72, 0.5]), (3e-4, [0.9, 0.9, 0.9])):
        for seed, value in enumerate(values):
            run = tmp_path / f"{lr}_{seed}"
            run.mkdir()
            result = {"task": "pos", "lr": lr, "seed": seed, "scores": {"accuracy": value}}
            (run / "result.json").write_text(json.dumps(result))
    row = {
        "task": "pos", "lr": 1e-3, "diverged": {"2": "why"}, "baselines": {"majority": {"accuracy": 0.25}},
        "all_seeds": {"accuracy": {"mean": 0.64, "plus_minus": 0.3}},
    }  # fmt: skip
    probed = {"layers": {str(i): {"ridge": {"honest": {"accuracy": a}}} for i, a in enumerate((0.3, 0.68, 0.6))}}
    found = compared(row, probed, tmp_path)
    assert found["fine-tuned"] == {0: 70.0, 1: 72.0, 2: 50.0}
    assert found["mean"] == {"mean": 64.0, "plus_minus": 30.0}
    assert (found["probe, last layer"], found["probe, best layer on the evaluation rows"]) == (60.0, 68.0)
    assert found["without context"] == {"majority": 25.0}
    assert found["every seed above the last layer's probe"] is False
    assert found["diverged"] == {"2": "why"}
    for path in tmp_path.glob("*_2/result.json"):
        path.unlink()
    assert compared(row, probed, tmp_path)["every seed above the last layer's probe"] is True
