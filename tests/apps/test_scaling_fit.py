"""From plans to sweep points, from run folders to tables, from tables to laws."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from apps.scaling.collect import CollectArgs, collect
from apps.scaling.fit import FitArgs, fit
from apps.scaling.sweep import SweepArgs, sweep
from lingua.args import build, parse
from lingua.errors import UserError
from lingua.run_table import read_table, write_table
from lingua.source import TokenSource
from lingua.stool import records
from lingua.stool.plan import load_script, meta_model
from lingua.stool.sweep import names, read_points
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.support import run_app, tiny_words

BASE = "data: {seq_len: 32, tokenizer: {name: bytes}, root_dir: x}\ndump_dir: x\nmodel: {init_std: 0.1}\n"


# --- sweep


def test_points_of_a_sweep_are_runs_of_the_app(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "points.yaml"
    base.write_text(BASE)
    words = [f"base={base}", "family=crossbert", "budgets=[2e11,8e11]", "lr_factors=[0.5,1]", "batch_factors=[1,2]"]
    words += ["lr=1e-3", "batch_tokens=512", "head_dim=16", "gpus=1", f"out={out}"]
    sweep(parse(SweepArgs, words))
    said = capsys.readouterr().out
    assert f"script=apps.crossbert.train config={base} dump_dir={tmp_path}/points sweep.file={out}" in said
    points = read_points(str(out))  # as the launcher reads them
    assert len(points) == 8 == len(set(names(points)))
    script = load_script("apps.crossbert.train")
    for place, point in enumerate(points):
        config = parse(script.config_class, [f"config={base}", *(f"{key}={value}" for key, value in point.items())])
        model = meta_model(script.module, config)
        flops = config.steps * config.batch_tokens * model.flops_per_token(32, 0.5, True)
        assert flops == pytest.approx(2e11 if place < 4 else 8e11, rel=0.05)
        assert config.optim.lr in (5e-4, 1e-3)
        assert config.batch_tokens in (512, 1024)
    with pytest.raises(UserError, match="no budgets"):
        SweepArgs(out="x")
    with pytest.raises(UserError, match=r"lr_factors=.*different finite numbers"):
        SweepArgs(out="x", budgets=[1.0], lr_factors=[1.0, 1.0])


# --- collect


def test_a_real_run_comes_back_with_what_it_was(tmp_path: Path, corpus: Path) -> None:
    run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "runs/a", steps=4, validation__every=4))
    (tmp_path / "runs/b").mkdir()  # never started
    (row,) = collect(CollectArgs([str(tmp_path / "runs")], str(tmp_path / "runs.parquet")))
    assert read_table(str(tmp_path / "runs.parquet")) == [row]
    assert (row["state"], row["family"], row["steps"], row["step"], row["lr"]) == ("done", "crossbert", 4, 4, 3e-3)
    config = yaml.safe_load((tmp_path / "runs/a/config.yaml").read_text())
    last = json.loads((tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()[-1])
    assert row["valid/made_up/loss@0.5"] == last["valid/made_up/loss@0.5"]
    script = load_script("apps.crossbert.train")
    model = meta_model(script.module, build(script.config_class, ("run", config)))
    assert row["params_full"] == model.parameter_counts()["full"]
    assert row["budget"] == row["flops"] == 4 * 512 * model.flops_per_token(32, 0.5, True)
    assert row["ratio"] == pytest.approx(row["tokens"] / row["flops_per_token"])
    # The entropy of the validation rows, by a plain loop.
    tokenizer = build_tokenizer(TokenizerArgs())
    source = TokenSource(config["data"]["validation"]["made_up"], 32, 0, tokenizer)
    rows = source.rows(np.arange(source.tokens // 32))
    counts = Counter(int(token) for token in rows.flatten() if token not in tokenizer.special_ids)
    total = sum(counts.values())
    assert row["unigram/made_up"] == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()))


def write_run(folder: Path, steps: int, reached: int, loss: float | None = 3.0, **changes: Any) -> Path:
    """A folder as a run leaves it: ``changes`` are of its config."""
    folder.mkdir(parents=True)
    config = {
        "dump_dir": str(folder), "steps": steps, "batch_tokens": 640, "objective": "mlm",
        "data": {"root_dir": "x", "seq_len": 64, "validation": {}, "tokenizer": {"name": "bytes"}},
        "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 300}, "optim": {"lr": 1e-3}, **changes,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    record = {
        "step": reached,
        "tokens": 640 * reached,
        "data_tokens": 640 * reached,
        "flops": 1e9 * reached,
        "loss": loss,
    }
    lines = [] if not reached else [record, {"step": reached, "valid/books/loss@0.5": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_did_not_end_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path / "s/done", 10, 10)
    write_run(tmp_path / "s/half", 10, 4)
    crashed = write_run(tmp_path / "s/crashed", 10, 4)
    records.append(crashed, "submit", job="1", launcher="local", host="h")
    records.append(crashed, "end", job="1", state=records.FAILED, exit=1, reason="exit status 1", failure=None)
    write_run(tmp_path / "s/silent", 10, 0)
    write_run(tmp_path / "s/odd", 10, 10, nonsense=1)
    index = [{"name": name, "values": {}} for name in ("done", "half", "crashed", "silent", "odd", "gone")]
    (tmp_path / "s/sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in index))
    rows = collect(CollectArgs([str(tmp_path / "s")], str(tmp_path / "t.csv")))
    states = [row["state"] for row in rows]
    unfinished = "unfinished: step 4 of 10"
    assert states == ["done", unfinished, f"failed: exit status 1 ({unfinished})", "no step logged", "done", "missing"]
    assert "unknown key nonsense" in rows[4]["note"]
    said = capsys.readouterr().out
    assert f"{tmp_path}/s/gone: missing" in said
    assert "6 runs, 2 of them done" in said
    # None of them is dropped in silence, and only what is done enters a law.
    found = fit(FitArgs(str(tmp_path / "t.csv"), str(tmp_path / "laws"), min_span=0.0))
    why = {Path(left["run"]).name: left["why"] for left in found["left_out"]}
    assert list(why) == ["half", "crashed", "silent", "odd", "gone"]
    assert "unknown key nonsense" in why["odd"]
    assert found["families"]["bert"]["runs"] == 1
    assert all(
        f"- {left['run']}: {left['why']}" in (tmp_path / "laws/fits.md").read_text() for left in found["left_out"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"runs": []}, "no runs"),
        ({"runs": ["a"], "out": "x.json"}, "expected a file that ends in"),
    ],
)
def test_what_collect_refuses(words: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CollectArgs(**{"out": "x.csv", **words})


# --- fit


def row(budget: float, lr: float, loss: float | None, **more: Any) -> dict[str, Any]:
    values = {
        "run": f"run-{budget:.2g}-{lr:.3g}-{more.get('ratio', 20)}",
        "state": "done",
        "note": "",
        "family": "bert",
    }
    values |= {"dim": 64, "n_layers": 2, "pred_layers": None, "ratio": 20.0, "batch_tokens": 1024, "unigram/a": 7.0}
    return values | {"budget": budget, "lr": lr, "valid/a/loss@0.5": loss, **more}


def made_up(noise: float = 0.0) -> list[dict[str, Any]]:
    """Loss 20 C^-0.05, lowest at lr 2 C^-0.3, over five budgets and seven learning rates."""
    rows = []
    for i, budget in enumerate((1e12, 4e12, 1.6e13, 6.4e13, 2.6e14)):
        for factor in (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0):
            loss = 20 * budget**-0.05 * (1 + 0.02 * math.log(factor) ** 2)
            rows.append(row(budget, 2 * budget**-0.3 * factor, loss * (1 + noise * math.sin(7 * i))))
    return rows


def test_a_damaged_file_is_told_of_its_run_and_costs_no_other(tmp_path: Path) -> None:
    for name, file in (("a", "config.yaml"), ("b", "metrics.jsonl"), ("c", "eval/1/results.json")):
        path = write_run(tmp_path / f"s/{name}", 10, 10) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n{}\n")
    write_run(tmp_path / "s/d", 10, 10)
    rows = collect(CollectArgs([str(tmp_path / "s")], str(tmp_path / "t.csv")))
    expected = [
        "config.yaml: not valid YAML",
        "metrics.jsonl, line 1: not a JSON record",
        "results.json: not the results",
    ]
    for name, found, what in zip("abc", rows, expected, strict=False):
        assert found["state"].startswith("damaged: ")
        assert f"/s/{name}/" in found["state"]
        assert what in found["state"]
    assert rows[3]["state"] == "done"
    with pytest.raises(UserError, match=r"a run comes twice: .*s/d"):
        collect(CollectArgs([str(tmp_path / "s"), str(tmp_path / "s/d")], str(tmp_path / "t.csv")))


def fitted(rows: list[dict[str, Any]], tmp_path: Path, **changes: Any) -> dict[str, Any]:
    table = str(tmp_path / "table.csv")
    columns = list(dict.fromkeys(name for r in rows for name in r))
    write_table([{name: r.get(name) for name in columns} for r in rows], columns, table)
    found = fit(FitArgs(table, str(tmp_path / "laws"), **changes))
    assert json.loads((tmp_path / "laws/fits.json").read_text()) == found
    return found


def test_known_laws_come_back(tmp_path: Path) -> None:
    laws = fitted(made_up(), tmp_path)["families"]["bert"]["laws"]
    assert laws["loss"]["law"]["exponent"] == pytest.approx(-0.05)
    assert laws["loss"]["law"]["constant"] == pytest.approx(20)
    assert laws["loss"]["largest"]["error"] == pytest.approx(0, abs=1e-9)
    # The best three of seven are the factors 0.8, 1 and 1.25, whose geometric mean is 1.
    assert (laws["lr"]["law"]["exponent"], laws["lr"]["law"]["constant"]) == pytest.approx((-0.3, 2.0))
    assert "nothing was found out" in laws["batch_tokens"]["none"]


def test_the_largest_budget_is_predicted_without_it(tmp_path: Path) -> None:
    rows = [r | {"valid/a/loss@0.5": r["valid/a/loss@0.5"] * (1.1 if r["budget"] > 1e14 else 1)} for r in made_up()]
    largest = fitted(rows, tmp_path)["families"]["bert"]["laws"]["loss"]["largest"]
    assert largest["predicted"] == pytest.approx(20 * 2.6e14**-0.05)
    assert largest["error"] == pytest.approx(1 / 1.1 - 1)


def test_runs_that_stayed_at_unigram_or_are_not_finite_are_named(tmp_path: Path) -> None:
    rows = [*made_up(), row(1e12, 1.0, 6.71), row(4e12, 1.0, 6.69), row(4e12, 2.0, None)]
    found = fitted(rows, tmp_path)
    assert {left["run"]: left["why"] for left in found["left_out"]} == {
        "run-1e+12-1-20": "valid/a/loss@0.5 of 6.710 is not 0.3 nat below a unigram model's 7.000",
        "run-4e+12-2-20": "no finite valid/a/loss@0.5",
    }
    assert found["families"]["bert"]["runs"] == 36


def test_what_a_row_does_not_say_is_told(tmp_path: Path) -> None:
    """No budget: no law. No score: not in its law. No unigram loss: nobody knows whether it ever got going."""
    rows = [r | {"score/pos": 50.0} for r in made_up()]
    changes: list[dict[str, Any]] = [
        {"budget": None}, {"lr": 0.0}, {"dim": "wide"}, {"score/pos": None}, {"unigram/a": None},
    ]  # fmt: skip
    rows = [
        r | changed | {"run": f"odd {i}"} for i, (r, changed) in enumerate(zip(rows, changes, strict=False))
    ] + rows[5:]
    found = fitted(rows, tmp_path, score="score/pos")
    text = (tmp_path / "laws/fits.md").read_text()
    assert [(left["run"], left["why"].split("found ")[1]) for left in found["left_out"]] == [
        ("odd 0", "budget=None"), ("odd 1", "lr=0.0"), ("odd 2", "dim=wide"),
    ]  # fmt: skip
    assert found["families"]["bert"]["runs"] == len(rows) - 3
    assert (found["unscored"], found["unchecked"]) == (["odd 3"], ["odd 4"])
    assert "so not in a law of it:\n\n- odd 3\n" in text
    assert "Of 1 of the runs that entered it is not known" in text


def test_losses_that_hardly_differ_are_no_law(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = fitted(made_up(), tmp_path, min_span=2.0)
    assert "losses span 1.2" in found["families"]["bert"]["laws"]["loss"]["none"]
    assert "there is no law to fit" in capsys.readouterr().out
    assert "law" in found["families"]["bert"]["laws"]["lr"]
    few = fitted([r for r in made_up() if r["budget"] < 1e13], tmp_path, min_span=0.0)
    assert few["families"]["bert"]["laws"]["loss"]["none"] == "2 budgets, and a law needs 3"


def test_scores_are_fitted_as_what_is_missing_to_100(tmp_path: Path) -> None:
    rows = [r | {"score/pos": 100 - 1e3 * r["budget"] ** -0.1} for r in made_up()]
    law = fitted(rows, tmp_path, score="score/pos")["families"]["bert"]["laws"]["100 - score"]
    assert (law["law"]["constant"], law["law"]["exponent"]) == pytest.approx((1e3, -0.1))


def test_sizes_at_the_same_flops_give_the_best_ratio(tmp_path: Path) -> None:
    """Loss 5 + 0.1 ln(ratio / r0)^2 with r0 of 10 and 40: their geometric mean is 20."""
    rows = [
        row(budget, 1e-3, 5 + 0.1 * math.log(ratio / best) ** 2, ratio=ratio, dim=int(1000 / ratio))
        for budget, best in ((1e12, 10.0), (1e13, 40.0))
        for ratio in (2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
    ]
    rows += [row(1e14, 1e-3, 5.0 - r / 100, ratio=r, dim=int(r)) for r in (2.0, 4.0, 8.0)]
    known = fitted(rows, tmp_path)["families"]["bert"]["isoflop"]
    assert [curve["best"] for curve in known["budgets"][:2]] == pytest.approx([10, 40])
    assert known["budgets"][2]["best"] is None
    assert known["best_ratio"] == pytest.approx(20)
    text = (tmp_path / "laws/fits.md").read_text()
    assert known["budgets"][2]["why"] in text
    assert "at some budgets only" not in text


def test_sizes_searched_at_some_budgets_only_are_told_of(tmp_path: Path) -> None:
    one_more = made_up()[0] | {"run": "larger", "dim": 4096}
    found = fitted([*made_up(), one_more], tmp_path)["families"]["bert"]["sizes"]
    first = f"{one_more['budget']:.3g}"
    assert found == {f"{r['budget']:.3g}": 1 for r in made_up()} | {first: 2}
    assert f"sizes were searched at some budgets only (2 at {first}, 1 at " in (tmp_path / "laws/fits.md").read_text()
    assert fitted(made_up(), tmp_path)["families"]["bert"]["sizes"] is None


def test_the_papers_table(tmp_path: Path) -> None:
    families = fit(FitArgs("paper", str(tmp_path)))["families"]
    exponents = {
        (f, name): law["law"]["exponent"] for f, known in families.items() for name, law in known["laws"].items()
    }
    expected = {("bert", "lr"): -0.24, ("bert", "batch_tokens"): 0.24}
    expected |= {("crossbert", "lr"): -0.279, ("crossbert", "batch_tokens"): 0.101}
    assert exponents == pytest.approx(expected, abs=0.01)
    assert families["crossbert"]["laws"]["lr"]["number"] == 7


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; python -m apps.scaling.collect makes it"):
        fit(FitArgs(str(tmp_path / "none.csv"), str(tmp_path)))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a table of runs: no column run, state"):
        fit(FitArgs(str(tmp_path / "other.csv"), str(tmp_path)))
    with pytest.raises(UserError, match="no column valid/b/loss"):
        fitted(made_up(), tmp_path, loss="valid/b/loss@0.5")
    two = [r | {"valid/b/loss@0.5": 1.0} for r in made_up()]
    with pytest.raises(UserError, match=r"give loss=COLUMN; the table's validation losses: valid/a/loss@0.5, valid/b"):
        fitted(two, tmp_path)
