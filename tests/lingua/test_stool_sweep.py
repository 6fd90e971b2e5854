"""The points of sweeps, their names and their index."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.stool import records, sweep


def write(folder: Path, text: str) -> str:
    (folder / "points.yaml").write_text(text)
    return str(folder / "points.yaml")


def test_a_grid_is_every_combination() -> None:
    points = sweep.points({"optim.lr": ["1e-3", "2e-3"], "model.n_layers": ["12", "16"]}, None)
    assert points == [{"optim.lr": lr, "model.n_layers": layers} for lr in ("1e-3", "2e-3") for layers in ("12", "16")]
    assert sweep.names(points)[:2] == ["lr=1e-3_n_layers=12", "lr=1e-3_n_layers=16"]


def test_names_use_whole_keys_where_their_ends_are_the_same() -> None:
    points = sweep.points({"model.n_layers": ["2"], "model.predictor.n_layers": ["1"], "data.root_dir": ["/a/b"]}, None)
    assert sweep.names(points) == ["model.n_layers=2_model.predictor.n_layers=1_root_dir=-a-b"]
    with pytest.raises(UserError, match="several points would be called root_dir=-a-b"):
        sweep.names([{"root_dir": "/a/b"}, {"root_dir": ":a:b"}])
    with pytest.raises(UserError, match="seed=1 comes twice"):
        sweep.points({"seed": ["1", "1"]}, None)
    assert len(sweep.names([{"note": "x" * 1000}])[0]) == 200  # file systems have a limit


def test_listed_points_are_combined_with_a_grid(tmp_path: Path) -> None:
    file = write(tmp_path, "points: [{optim.lr: 0.001, compile: true}, {optim.lr: 0.002, data.sources: {a: 1}}]")
    assert sweep.points({"seed": ["0", "1"]}, file)[1:3] == [
        {"optim.lr": "0.001", "compile": "true", "seed": "1"},
        {"optim.lr": "0.002", "data.sources": '{"a": 1}', "seed": "0"},
    ]


def test_draws_are_a_function_of_the_seed(tmp_path: Path) -> None:
    text = (
        "n: {n}\nseed: {seed}\ndraw:\n"
        "  optim.lr: {{log_uniform: [1e-4, 1e-2]}}\n  optim.weight_decay: {{uniform: [0, 0.2]}}\n"
        "  model.n_layers: {{choice: [6, 12]}}\n  seed: {{int: [3, 5]}}\n"
    )
    points = sweep.read_points(write(tmp_path, text.format(n=400, seed=1)))
    assert sweep.read_points(write(tmp_path, text.format(n=400, seed=1))) == points
    assert sweep.read_points(write(tmp_path, text.format(n=10, seed=1))) == points[:10]  # more later changes none
    assert sweep.read_points(write(tmp_path, text.format(n=10, seed=2))) != points[:10]
    rates = [math.log10(float(point["optim.lr"])) for point in points]
    assert -4 <= min(rates) < -3.9
    assert -2.1 < max(rates) <= -2
    # Uniform in the logarithm: the mean of 400 is within 5 standard errors, 2 / sqrt(12 * 400).
    assert abs(sum(rates) / 400 + 3) < 5 * 2 / math.sqrt(12 * 400)
    decays = [float(point["optim.weight_decay"]) for point in points]
    assert 0 <= min(decays) < 0.01
    assert 0.19 < max(decays) <= 0.2
    assert abs(sum(decays) / 400 - 0.1) < 5 * 0.2 / math.sqrt(12 * 400)
    for key, values in (("model.n_layers", {"6", "12"}), ("seed", {"3", "4", "5"})):
        assert {point[key] for point in points} == values


def test_a_grid_file_is_every_combination(tmp_path: Path) -> None:
    found = sweep.read_points(write(tmp_path, "grid: {task: [cola, rte], optim.lr: [1e-5, 2e-5]}"))
    assert [tuple(point.values()) for point in found] == [
        ("cola", "1e-05"), ("cola", "2e-05"), ("rte", "1e-05"), ("rte", "2e-05"),
    ]  # fmt: skip
    assert sweep.names(found)[0] == "task=cola_lr=1e-05"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=1e-3 seed=1\n" * 500, "a YAML mapping of keys to values, found only 'lr=1e-3 seed=1 lr.{0,80}'$"),
        ("".join(f"key{i}: 1\n" for i in range(500)), r"perhaps seed:; found key0, key1.{0,90}\.\.\.$"),
        ("1: 2", "perhaps seed:; found 1$"),
        (f"n: 2\ndraw: {{a: {'x' * 500}}}", r"draw\.a=x{100}\.\.\.: expected one of choice"),
        ("points: {seed: 3}", "points: expected a list of mappings"),
        ("points: []", "points: expected a list of mappings"),
        ("grid: {seed: 3}", "grid: expected keys, each with a list of values"),
        ("values: [1]", "expected points:, grid:, or n:, draw: with keys"),
        ("n: 2\ndraw: {}", "expected points:, grid:, or n:, draw: with keys"),
        ("n: 0\ndraw: {a: {int: [0, 1]}}", "n=0, seed=0: expected whole numbers"),
        ("n: 2\ndraw: {a: {normal: [0, 1]}}", "draw.a={'normal': .*expected one of choice, int"),
        ("n: 2\ndraw: {a: {log_uniform: [0, 1]}}", r"expected log_uniform: \[low, high\], 0 < low"),
        ("n: 2\ndraw: {a: {uniform: [2, 1]}}", r"expected uniform: \[low, high\]"),
        ("n: 2\ndraw: {a: {uniform: [null, 1]}}", r"expected uniform: \[low, high\]"),
        ("n: 2\ndraw: {a: {choice: []}}", "draw.a="),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.read_points(write(tmp_path, text))


def test_the_index_follows_the_records(tmp_path: Path) -> None:
    lines = [{"name": name, "values": {"seed": name}} for name in ("0", "1")]
    records.append(tmp_path / "0", "submit", job="5_0", launcher="slurm", host="here")
    records.append(tmp_path / "0", "end", job="5_0", state=records.FINISHED, exit=0, reason="finished")
    (tmp_path / "0/metrics.jsonl").write_text('{"step": 3, "loss": 2.5}\n{"step": 3, "valid/web/loss@0.5": 2.25}\n')
    (tmp_path / "stool").mkdir()
    sweep.refresh(tmp_path, lines)
    first, second = map(json.loads, (tmp_path / "sweep.jsonl").read_text().splitlines())
    assert (first["state"], first["job"], first["exit"], first["values"]) == ("FINISHED", "5_0", 0, {"seed": "0"})
    assert first["metrics"] == {"step": 3, "valid/web/loss@0.5": 2.25, "loss": 2.5}
    assert (second["state"], second["metrics"]) == (None, {})
    records.append(tmp_path / "1", "submit", job="5_1", launcher="slurm", host="here")
    sweep.refresh(tmp_path)
    assert [line["state"] for line in sweep.runs(tmp_path)] == ["FINISHED", "SUBMITTED"]
    sweep.refresh(tmp_path, [{"name": "2", "values": {"seed": "2"}}])  # more points keep those that are there
    assert [line["name"] for line in sweep.runs(tmp_path)] == ["0", "1", "2"]
