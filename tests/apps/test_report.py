"""The report from invented run folders: every figure traced to its source, every gap shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import image

from apps.plots.report import ReportArgs, report
from lingua.errors import UserError

RATIOS = ("0.15", "0.3", "0.5")


def write_run(folder: Path, steps: int, reached: int, floor: float = 3.0, **length: Any) -> Path:
    """A run that logs every 10 steps and validates every 50."""
    folder.mkdir(parents=True)
    config = {"steps": None, "tokens": None, "flops": None, "batch_tokens": 1000, **(length or {"steps": steps})}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in range(10, reached + 1, 10):
        loss = floor + 4 * math.exp(-step / 80)
        record = {"step": step, "tokens": step * 1000, "data_tokens": step * 500, "flops": step * 2e9, "loss": loss}
        record |= {"tokens_per_second": 900.0 + step, "data_tokens_per_second": 450.0, "skipped_steps": 0}
        lines.append(record)
        if step % 50 == 0:
            losses = {f"valid/books/loss@{r}": loss + i / 4 for i, r in enumerate(RATIOS)}
            lines.append({"step": step, **losses})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_results(folder: Path, step: int, scores: list[float], random_init: bool = False) -> None:
    """An evaluation whose honest score is half a point under the paper's."""
    layers = {}
    for layer, score in enumerate(scores):
        paper, honest = {"lambda": 1.0, "accuracy": score}, {"lambda": 10.0, "accuracy": score - 0.005}
        layers[str(layer)] = {"ridge": {"paper": paper, "honest": honest, "grid": [paper, honest]}}
    task = {"kind": "tokens", "metric": "accuracy", "majority": {"accuracy": 0.228}, "layers": layers}
    name = "untrained" if random_init else f"{step:010d}"
    (folder / "eval" / name).mkdir(parents=True)
    results = {"step": step, "random_init": random_init, "tasks": {"pos": task}}
    (folder / "eval" / name / "results.json").write_text(json.dumps(results))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    bert = write_run(tmp_path / "bert", 300, 300, floor=3.2)
    cross = write_run(tmp_path / "crossbert", 300, 300, floor=3.0, tokens=300_000.0)
    write_results(bert, 300, [0.61, 0.668, 0.643, 0.637, 0.623])
    write_results(cross, 100, [0.5] * 5)  # an older checkpoint's
    write_results(cross, 300, [0.62, 0.687, 0.699, 0.7, 0.719])
    write_results(bert, 300, [0.58, 0.56, 0.52, 0.49, 0.47], random_init=True)
    return [bert, cross]


def make(runs: list[Path], out: Path, **changes: Any) -> dict[str, list[str]]:
    """The table as {line: cells}; checks what every report must have."""
    table = report(ReportArgs([str(run) for run in runs], out=str(out), **changes))
    assert table in (out / "report.md").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["report.md", "report.png"]
    picture = image.imread(out / "report.png")
    assert picture.shape[1] > picture.shape[0] > 500
    assert picture[..., :3].std() > 0.02
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_every_figure_comes_from_its_run(runs: list[Path], tmp_path: Path) -> None:
    rows = make(runs, tmp_path / "out")
    assert rows[""] == ["untrained", "bert", "crossbert"]
    assert rows["state"] == ["-", "done", "done"]
    assert rows["steps"] == ["-", "300", "300"]
    assert rows["training FLOPs"] == ["-", "6e+11", "6e+11"]
    assert rows["tokens"] == ["-", "300,000", "300,000"]
    assert rows["text tokens"] == ["-", "150,000", "150,000"]
    assert rows["tokens/s"] == ["-", "1,055", "1,055"]  # the median of 910, 920, ... 1200
    loss = 3.2 + 4 * math.exp(-300 / 80)
    for i, ratio in enumerate(RATIOS):
        assert rows[f"validation loss, books, {ratio} hidden"][1] == f"{loss + i / 4:.3f}"
    assert rows["pos, ridge accuracy, layer 0"] == ["58.0 / 57.5", "61.0 / 60.5", "62.0 / 61.5"]
    assert rows["pos, ridge accuracy, layer 4"] == ["47.0 / 46.5", "62.3 / 61.8", "71.9 / 71.4"]
    assert rows["pos, majority"] == ["22.8"] * 3
    assert "\n- " not in (tmp_path / "out" / "report.md").read_text()  # nothing to be warned of


def test_the_same_runs_give_the_same_bytes(runs: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(runs, tmp_path / name)
    for file in ("report.md", "report.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_picture_shows_the_score_asked_for(runs: list[Path], tmp_path: Path) -> None:
    make(runs, tmp_path / "honest")
    make(runs, tmp_path / "paper", score="paper")
    pictures = [(tmp_path / name / "report.png").read_bytes() for name in ("honest", "paper")]
    assert pictures[0] != pictures[1]


def test_what_is_missing_or_unfinished_is_shown(runs: list[Path], tmp_path: Path) -> None:
    bert, cross = runs
    half = write_run(tmp_path / "half", 300, 120, flops=6e11)
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"step": 125, "los')  # killed while writing
    empty = tmp_path / "empty"
    empty.mkdir()
    write_results(half, 50, [0.3, 0.4])
    rows = make([half, tmp_path / "gone", empty, cross], tmp_path / "out", baseline=str(tmp_path / "nothing"))
    assert rows["state"] == ["missing", "unfinished: step 120 of 300", "missing", "no step logged", "done"]
    assert rows["steps"] == ["-", "120", "-", "-", "300"]
    assert rows["pos, ridge accuracy, layer 1"] == ["-", "40.0 / 39.5", "-", "-", "68.7 / 68.2"]
    assert rows["pos, ridge accuracy, layer 4"] == ["-", "-", "-", "-", "71.9 / 71.4"]
    text = (tmp_path / "out" / "report.md").read_text()
    for note in (
        f"untrained: no results in {tmp_path}/nothing",
        "half: unfinished: step 120 of 300",
        "half: probed at step 50, its newest step is 120",
        f"gone: no folder {tmp_path}/gone",
        "empty: no step logged",
        "empty: not probed yet",
    ):
        assert f"- {note}" in text
    assert bert.is_dir()


def test_steps_that_were_not_finite_are_told(runs: list[Path], tmp_path: Path) -> None:
    path = runs[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace('"skipped_steps": 0', '"skipped_steps": 4', 30))
    make(runs, tmp_path / "out")
    assert "- bert: 4 steps were not finite" in (tmp_path / "out" / "report.md").read_text()


def test_losses_that_were_not_finite_are_shown_as_such(runs: list[Path], tmp_path: Path) -> None:
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 310, "loss": null, "tokens_per_second": null, "valid/books/loss@0.3": null}\n')
    rows = make(runs, tmp_path / "out")
    assert rows["validation loss, books, 0.3 hidden"][1] == "nan"
    assert rows["validation loss, books, 0.15 hidden"][1] != "nan"
    assert rows["tokens/s"][1] == "1,055"  # the median of what was finite


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "an empty file"), ("a: [", "not valid YAML"), ("steps: many", "steps=many: expected a number above 0")],
)
def test_a_damaged_config_of_a_run_is_named(runs: list[Path], tmp_path: Path, content: str, message: str) -> None:
    (runs[0] / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=rf"bert/config\.yaml: .*{message}"):
        make(runs, tmp_path / "out")


def test_without_validation_the_training_loss_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 40, 40)  # ends before the first validation
    rows = make([run], tmp_path / "out")
    assert not any(name.startswith("validation") for name in rows)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "bert", 50, 50) for parent in ("a", "b")]
    assert make(runs, tmp_path / "out")[""] == ["untrained", str(runs[0]), str(runs[1])]


def test_baseline_from_its_own_folder_or_from_a_run(runs: list[Path], tmp_path: Path) -> None:
    line = "pos, ridge accuracy, layer 0"
    for baseline in (runs[0], runs[0] / "eval" / "untrained"):
        rows = make(runs[::-1], tmp_path / "out", baseline=str(baseline))
        assert rows[line] == ["58.0 / 57.5", "62.0 / 61.5", "61.0 / 60.5"]
    assert make(runs[::-1], tmp_path / "out")[line][0] == "-"  # crossbert, now the first, has none of its own


def test_errors(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        ReportArgs([], out="x")
    with pytest.raises(UserError, match="score=best: expected honest or paper"):
        ReportArgs(["x"], out="x", score="best")
    with pytest.raises(UserError, match="none of the run folders exists: nowhere"):
        report(ReportArgs(["nowhere"], out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        report(ReportArgs([str(runs[0])], out=str(tmp_path / "file" / "out")))
    results = runs[0] / "eval" / f"{300:010d}" / "results.json"
    for broken in ("", "{", "[]", "{}"):
        results.write_text(broken)
        with pytest.raises(UserError, match=f"{results}: not the results of an evaluation"):
            report(ReportArgs([str(runs[0])], out=str(tmp_path / "out")))
