"""Plans and suites against the paper's Tables 10 and 11 and against the apps' own models."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from apps.bert.model import Bert
from apps.bert.train import BertTrainArgs
from apps.crossbert.train import CrossBertTrainArgs
from apps.scaling.plan import PlanArgs, plan
from apps.scaling.rules import Planner, RuleArgs
from apps.scaling.suite import COLUMNS, PRINTED, SHAPE, SuiteArgs, suite
from apps.scaling.sweep import SweepArgs
from lingua import paper
from lingua.args import parse
from lingua.errors import UserError


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, str]]:
    out = tmp_path_factory.mktemp("suite") / "paper.csv"
    suite(SuiteArgs(suite="paper", out=str(out)))
    with out.open() as file:
        return {(row["family"], int(row["id"])): row for row in csv.DictReader(file)}


def test_all_models_with_all_columns(papers: dict) -> None:
    assert len(papers) == 17
    for family in paper.FAMILIES:
        for printed in paper.suite(family):
            ours = papers[family, printed["id"]]
            assert tuple(ours) == COLUMNS
            assert set(printed) <= set(PRINTED)
            other = SHAPE["crossbert" if family == "bert" else "bert"]
            assert {ours[name] for name in other} == {""}


def test_columns_equal_the_printed_ones(papers: dict) -> None:
    """Within 0.5%, but for the FLOPs of the last CrossBERT and what learning-rate laws say."""
    for family in paper.FAMILIES:
        for printed in paper.suite(family):
            ours, last = papers[family, printed["id"]], (family, printed["id"]) == ("crossbert", 8)
            for name, value in printed.items():
                near = 0.012 if name == "lr" and family == "crossbert" else 0.005
                expected = 5.10e21 if last and name == "flops" else value
                assert float(ours[name]) == pytest.approx(expected, rel=near), (family, printed["id"], name)
            assert int(ours["steps"]) == printed["steps"]
            assert float(ours["ratio"]) == pytest.approx(20.0, abs=0.01)


def test_deviations_from_the_laws(papers: dict) -> None:
    for (family, number), row in papers.items():
        assert abs(float(row["batch_off"])) < 0.07
        by_hand = set(row["set_by_hand"].split())
        assert {"batch_tokens", "gpus", "grad_acc"} < by_hand
        assert ("lr" in by_hand) == (family == "crossbert" and number in (7, 8))
        if "lr" not in by_hand:
            assert abs(float(row["lr_off"])) < (0.004 if family == "bert" else 0.011)
            assert row["second_lr_off"] == ""
    # 1.15 and 1.20 times the first law; the second constant is within 0.7%, and 5.2% for the printed 5.0e21 FLOPs.
    assert float(papers["crossbert", 7]["lr_off"]) == pytest.approx(0.15, abs=0.01)
    assert float(papers["crossbert", 8]["lr_off"]) == pytest.approx(0.20, abs=0.015)
    assert abs(float(papers["crossbert", 7]["second_lr_off"])) < 0.007
    assert abs(float(papers["crossbert", 8]["second_lr_off"])) < 0.06


def test_a_suite_between_two_budgets(tmp_path: Path) -> None:
    rows = suite(SuiteArgs(family="bert", budgets=[1e18, 1e20], n=3, gpus=4, out=str(tmp_path / "suite.csv")))
    assert [float(row["flops"]) for row in rows] == pytest.approx([1e18, 1e19, 1e20], rel=0.01)
    assert all(10 < row["ratio"] < 40 for row in rows)
    assert all(row["batch_tokens"] % (512 * 4) == 0 for row in rows)
    assert all(row["batch_tokens"] <= 512 * 4 * row["grad_acc"] * 32 for row in rows)
    with pytest.raises(UserError, match="expected rules or paper"):
        SuiteArgs(suite="mine")
    with pytest.raises(UserError, match="largest"):
        SuiteArgs(budgets=[1e20, 1e18])


@pytest.mark.parametrize("family", paper.FAMILIES)
def test_every_kind_of_budget_is_kept(family: str) -> None:
    planner = Planner(RuleArgs(family, gpu="a100", gpus=4))
    by_flops = planner.plan(flops=3e19)
    assert by_flops.flops == pytest.approx(3e19, rel=1e-3)
    assert by_flops.tokens == by_flops.steps * by_flops.batch_tokens == by_flops.data_tokens * by_flops.views
    by_tokens = planner.plan(tokens=by_flops.tokens)
    assert by_tokens.tokens == pytest.approx(by_flops.tokens, rel=1e-3)
    assert by_tokens.shape == by_flops.shape
    by_params = planner.plan(params=by_flops.counts["per_token"])
    assert by_params.shape == by_flops.shape
    assert by_params.ratio == pytest.approx(20, rel=1e-3)
    hours = by_flops.gpu_hours(planner.args)
    # By hand: FLOPs of all rows over 40% of the A100's 312 TFLOP/s.
    rows = by_flops.data_tokens / 512
    masking = (0.5, True) if family == "crossbert" else (0.2,)
    row = by_flops.model.row_flops(512, *masking)
    assert hours == pytest.approx(row.training * rows / (312e12 * 0.4) / 3600)
    by_hours = planner.plan(gpu_hours=hours)
    assert by_hours.shape == by_flops.shape
    assert by_hours.flops == pytest.approx(by_flops.flops, rel=1e-3)


def test_the_config_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "plan.yaml"
    words = ["family=bert", "flops=1e18", "gpus=16", f"out={out}", "gpu_gb=20"]
    made = plan(parse(PlanArgs, words))
    said = capsys.readouterr().out
    for expected in (
        "shards in nodes of 8",
        "one shard each",
        f"{made.tokens:,} view tokens",
        "GPU hours at 40% of H100",
    ):
        assert expected in said
    args = parse(BertTrainArgs, [f"config={out}", "dump_dir=x", "data.root_dir=y"])
    assert (args.steps, args.batch_tokens, args.optim.lr) == (made.steps, made.batch_tokens, made.lr)
    assert args.data.seq_len == 512
    args.model.vocab_size = 50265
    assert sum(p.numel() for p in Bert(args.model).parameters()) == sum(p.numel() for p in made.model.parameters())


def test_a_plan_starts_from_a_config_and_from_laws(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "dump_dir: runs/another\nsteps: 5\ndata: {seq_len: 64, tokenizer: {name: bytes}}\n"
        "model: {rope_theta: 100}\nmasking: {hidden_ratio: 0.4}\n"
    )
    small = {"base": str(base), "head_dim": 32, "gpus": 1}
    made = Planner(RuleArgs(**small, lr=1e-3, batch_tokens=2048)).plan(flops=1e13)
    assert made.values["model"]["rope_theta"] == 100
    assert "dump_dir" not in made.values  # the folder of the base's own run
    assert made.values["masking"] == {"hidden_ratio": 0.4}
    assert (made.lr, made.batch_tokens, made.shape.dim // made.shape.n_heads) == (1e-3, 2048, 32)
    fits = tmp_path / "fits.json"
    fits.write_text('{"families": {"crossbert": {"laws": {"lr": {"law": {"constant": 2.0, "exponent": -0.25}}}}}}')
    made = Planner(RuleArgs(**small, laws=str(fits), batch_tokens=2048)).plan(flops=1e12)
    assert made.lr == pytest.approx(2.0 * 1e12**-0.25, rel=1e-2)
    with pytest.raises(UserError, match="has no law of batch_tokens for crossbert"):
        Planner(RuleArgs(**small, laws=str(fits))).plan(flops=1e12)
    fixed = parse(PlanArgs, [f"base={base}", "dim=64", "n_layers=3", "head_dim=32", "batch_law.constant=4096",
                             "batch_law.exponent=0", "lr=1e-3", "flops=1e13", "gpus=1"])  # fmt: skip
    assert (plan(fixed).batch_tokens, plan(fixed).shape.n_layers) == (4096, 3)
    assert isinstance(plan(fixed).config, CrossBertTrainArgs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flops=1e19", "tokens=1e9"], "give exactly one of flops, params, tokens, gpu_hours"),
        ([], "found none"),
        (["flops=-1"], "flops=-1.0: expected a finite number above 0"),
        (["flops=1e9"], "the nearest is 64 wide. For a small budget"),
        (["flops=1e19", "family=gpt"], "scaling.family=gpt: expected bert or crossbert"),
        (["gpu_hours=10", "gpu=abacus"], "gpu=abacus: lingua/flops.py has no peak"),
        (["flops=1e19", "gpu_gb=0.1"], "gpu_gb=0.1: .* GB are needed on each GPU at least"),
        (["flops=1e19", "laws=nowhere.json"], "laws=nowhere.json: cannot be read"),
        (["flops=1e19", "batch_tokens=1000"], "batch_tokens=1000 is not a whole number of rows of 1024"),
        (["flops=1e19", "dim=100", "head_dim=64"], "scaling.dim=100 does not split into heads"),
        (["flops=1e19", "mfu=40"], "scaling.mfu=40"),
        (["flops=1e19", "dim=100"], r"dim=100 does not split into heads of head_dim=64 \(the rule\): give head_dim="),
        (["flops=1e19", "head_dim=7"], "head_dim=7: expected an even number"),
        (["flops=1e19", "head_dim=20000"], "head_dim=20000: expected an even number, at most 16384"),
        (["flops=1e30"], "the nearest is 16384 wide. Give dim= and n_layers=, or a smaller budget"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(parse(PlanArgs, words))


def test_a_base_that_fixes_what_follows_the_width(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("data: {seq_len: 64}\nmodel: {ffn_dim: 3072, head_dim: 128, n_kv_heads: 2}\n")
    words = ["family=bert", "flops=1e16", f"base={base}", "gpus=1"]
    with pytest.raises(UserError, match=r"model.ffn_dim=3072, model.head_dim=128, model.n_kv_heads=2 would stand"):
        plan(parse(PlanArgs, words))
    made = plan(parse(PlanArgs, [*words, "dim=256", "n_layers=2"]))
    # By hand: 4 heads of queries and 2 of keys and of values, of 128; SwiGLU of 3,072; the paper's F.
    matrices = 2 * (256 * 8 * 128 + 4 * 128 * 256 + 3 * 256 * 3072)
    assert made.flops_per_token == 6 * matrices + 12 * 4 * 128 * 2 * 64


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"suite=paper .* leave out lr=, dim="):
        SuiteArgs(suite="paper", dim=64, lr=1e-3)
    with pytest.raises(UserError, match="dim=512 is one size at every D/F"):
        SweepArgs(budgets=[1e19], dim=512, ratios=[10, 20], out="points.yaml")
    with pytest.raises(UserError, match=r"out=runs/sweep: expected a file that ends in .yaml"):
        SweepArgs(budgets=[1e19], out="runs/sweep")  # the runs' folder gets the file's name without its ending
