"""Watching a run: each checkpoint once, those that come later, those that go; the curve; when it ends."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.bert.model import Bert, BertArgs
from lingua import checkpoint as checkpoint_module
from lingua.args import build
from lingua.errors import UserError
from lingua.evaluation import evaluate as evaluate_module
from lingua.evaluation import watch as watch_module
from lingua.evaluation.evaluate import EvalArgs, Evaluation, evaluate
from tests.tiny_run import SENTENCES, make_pieces_run

ROWS = [
    {"text": " ".join(sentence.split()[i:]), "label": "the" if "the" in sentence.split()[i:] else "none"}
    for sentence in SENTENCES
    for i in range(6)
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.05)
    run = make_pieces_run(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return run


def add_checkpoint(run: Path, step: int) -> Path:
    """A copy of the run's checkpoint, as if written at ``step``."""
    source, folder = run / "checkpoints/0000000003", run / "checkpoints" / f"{step:010d}"
    partial = folder.with_name("partial")
    shutil.copytree(source, partial)
    state = json.loads((partial / "state.json").read_text()) | {"step": step}
    rewrite(partial / "state.json", json.dumps(state))
    partial.rename(folder)
    return folder


def rewrite(path: Path, text: str) -> None:
    """Change a file of a checkpoint together with its checksum."""
    path.write_text(text)
    files = json.loads((path.parent / "COMPLETE").read_text())
    files[path.name] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path.parent / "COMPLETE").write_text(json.dumps(files))


def set_config(run: Path, **values: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text()) | values
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def args_of(run: Path, **changes: Any) -> EvalArgs:
    rows = str(run.parent / "rows.jsonl")
    values = {"ckpt": str(run), "tasks": {"a": {"train": rows, "test": rows}}, "watch": True, "device": "cpu"}
    return build(EvalArgs, ("a test", {**values, "probe": {"samples": 1}, **changes}))


def test_it_follows_a_run_to_its_last_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(run, steps=9)
    evaluated = []
    probe = evaluate_module.probe_task
    monkeypatch.setattr(evaluate_module, "probe_task", lambda *a: evaluated.append(1) or probe(*a))
    later = threading.Timer(1.0, lambda: (add_checkpoint(run, 6), time.sleep(0.3), add_checkpoint(run, 9)))
    later.start()
    last = evaluate(args_of(run), Bert, BertArgs)
    later.join()
    assert last["step"] == 9
    assert sorted(path.parent.name for path in run.glob("eval/*/results.json")) == [
        "0000000003", "0000000006", "0000000009",
    ]  # fmt: skip
    assert len(evaluated) == 3
    lines = [line for line in (run / "eval/curve.md").read_text().splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines[:5]] == ["at step", ":------", "3", "6", "9"]
    score = last["tasks"]["a"]["layers"]["2"]["ridge"]["paper"]["accuracy"]
    assert lines[4].split("|")[3].strip() == f"{100 * score:.1f}" == lines[4].split("|")[4].strip()
    assert (run / "eval/curve.png").stat().st_size > 1000
    assert not list(run.glob("checkpoints/*/IN_USE*"))

    evaluate(args_of(run), Bert, BertArgs)  # everything is there
    assert len(evaluated) == 3
    evaluate(args_of(run, final_norm=False), Bert, BertArgs)  # other settings
    assert len(evaluated) == 6
    with (run.parent / "rows.jsonl").open("a") as file:  # other data
        file.write(json.dumps(ROWS[0]) + "\n")
    evaluate(args_of(run, final_norm=False), Bert, BertArgs)
    assert len(evaluated) == 9


def test_it_ends_when_nothing_comes(run: Path) -> None:
    set_config(run, flops=1e12)
    assert evaluate(args_of(run, watch_minutes=0.0), Bert, BertArgs)["step"] == 3
    shutil.rmtree(run / "checkpoints/0000000003")
    evaluation_args = args_of(run, watch_minutes=0.0)
    with pytest.raises(UserError, match="no complete checkpoint came in 0 minutes"):
        evaluate(evaluation_args, Bert, BertArgs)
    with pytest.raises(UserError, match="nowhere: no such run folder"):
        evaluate(args_of(run.parent / "nowhere"), Bert, BertArgs)


def test_it_waits_for_the_first_checkpoint(run: Path) -> None:
    set_config(run, steps=3)
    checkpoint, config = run / "checkpoints/0000000003", run / "config.yaml"
    checkpoint.rename(run / "hidden")
    config.rename(run / "hidden.yaml")

    def begin() -> None:
        (run / "hidden.yaml").rename(config)
        (run / "hidden").rename(checkpoint)

    later = threading.Timer(0.5, begin)
    later.start()
    assert evaluate(args_of(run), Bert, BertArgs)["step"] == 3
    later.join()


def test_a_checkpoint_that_retention_removed_is_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_checkpoint(run, 6)
    set_config(run, steps=6)
    whole = Evaluation.of_checkpoint

    def removed_first(self: Evaluation, folder: Path) -> dict[str, Any]:
        if folder.name == "0000000003":
            shutil.rmtree(folder)
        return whole(self, folder)

    monkeypatch.setattr(Evaluation, "of_checkpoint", removed_first)
    assert evaluate(args_of(run), Bert, BertArgs)["step"] == 6
    assert "0000000003 was removed before it could be evaluated" in capsys.readouterr().out


def test_retention_leaves_what_is_being_loaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(run, steps=3)
    load = evaluate_module.load_encoder

    def with_retention(folder: Path, *rest: Any) -> Any:
        deadline = time.monotonic() + 10
        while not list(folder.glob("IN_USE.*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        add_checkpoint(run, 6)
        checkpoint_module.remove_old(run / "checkpoints", keep=1)
        assert folder.is_dir()
        return load(folder, *rest)

    monkeypatch.setattr(evaluate_module, "load_encoder", with_retention)
    args = args_of(run, watch=False)
    assert evaluate(args, Bert, BertArgs)["step"] == 3
    checkpoint_module.remove_old(run / "checkpoints", keep=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["0000000006"]


def test_the_curve_counts_tokens_where_they_are_known(run: Path) -> None:
    set_config(run, tokens=3000, batch_tokens=1000)
    for path in run.glob("checkpoints/*/config.yaml"):
        rewrite(path, yaml.safe_dump(yaml.safe_load(path.read_text()) | {"batch_tokens": 1000}))
    assert evaluate(args_of(run), Bert, BertArgs)["tokens"] == 3000
    assert "| at step | tokens |" in (run / "eval/curve.md").read_text().replace("  ", " ")


def test_the_curve_of_glue_has_the_mean_of_its_eight(tmp_path: Path) -> None:
    def results(step: int, average: float | None) -> dict[str, Any]:
        scores = {name: {"accuracy": value} for name, value in (("paper", 0.5), ("honest", 0.25), ("full", None))}
        task = {"metric": "accuracy", "train": {"rows": 9}, "layers": {"2": {"knn": scores}}}
        means = average and {"2": {"knn": {"paper": average, "honest": average / 2, "full": None}}}
        config = {"probe": {"kinds": ["knn"], "max_samples": 10, "full": True}}
        tasks = {"mnli": task, "mnli_mm": task}
        return {"step": step, "tokens": None, "layers": [2], "tasks": tasks, "config": config, "glue_average": means}

    watch_module.write_curve([results(3, 0.625), results(6, 0.75)], tmp_path)
    paper, honest = (tmp_path / "curve.md").read_text().split("`honest`")
    assert "| at step | step | mean of 8 | mnli | mnli_mm |" in paper.replace("  ", " ")
    assert "|      62.5 | 50.0 |    50.0 |" in paper
    assert "|      37.5 | 25.0 |    25.0 |" in honest
    watch_module.write_curve([results(3, None)], tmp_path)
    assert "| mean | mnli |" in (tmp_path / "curve.md").read_text()
