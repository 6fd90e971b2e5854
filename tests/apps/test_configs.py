"""Every config file that is shipped parses, and says what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.bert.train import BertTrainArgs
from apps.crossbert.train import CrossBertTrainArgs
from lingua.args import parse
from tests.support import ROOT

CLASSES = {"bert": BertTrainArgs, "crossbert": CrossBertTrainArgs}
CONFIGS = sorted(path.relative_to(ROOT) for app in CLASSES for path in ROOT.glob(f"apps/{app}/configs/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_it_parses(path: Path) -> None:
    args = parse(CLASSES[path.parts[1]], [f"config={ROOT / path}", "dump_dir=x", "data.root_dir=y"])
    views = 2 if path.parts[1] == "crossbert" else 1
    kind = path.stem.split("_")[0] if path.stem.startswith("debug") else path.stem
    rows = {"debug": 4, "quickstart": 16}.get(kind, 768 // views)
    assert args.batch_tokens == rows * args.data.seq_len * views


def test_base_is_the_papers_single_scale_run() -> None:
    """130,000 steps of 393,216 tokens of 512-token rows, 28 x 768, predictor of 6, LR 6e-4 (section 4.1)."""
    for app, args_class in CLASSES.items():
        args = parse(args_class, [f"config=apps/{app}/configs/base.yaml", "dump_dir=x", "data.root_dir=y"])
        assert (args.steps, args.batch_tokens, args.data.seq_len) == (130_000, 393_216, 512)
        assert (args.model.dim, args.model.n_layers, args.model.n_heads) == (768, 28, 12)
        assert (args.optim.lr, args.optim.beta1, args.optim.beta2) == (6e-4, 0.9, 0.95)
    assert args.model.predictor.n_layers == 6
    assert args.masking.complementary


def test_quickstart_trains_both_models_on_the_same_flops_and_rows() -> None:
    bert, crossbert = (
        parse(args_class, [f"config=apps/{app}/configs/quickstart.yaml"]) for app, args_class in CLASSES.items()
    )
    assert bert.flops == crossbert.flops
    assert bert.batch_tokens * 2 == crossbert.batch_tokens
    assert bert.optim == crossbert.optim
    assert bert.data == crossbert.data


def test_the_pair_of_continued_pretraining_differs_in_its_base_alone() -> None:
    clm, mlm = (
        parse(BertTrainArgs, [f"config=apps/bert/configs/continued_{base}.yaml", "dump_dir=x", "data.root_dir=y"])
        for base in ("clm", "mlm")
    )
    assert (clm.stages["base"].objective, mlm.stages["base"].objective) == ("clm", "mlm")
    clm.stages["base"].objective = "mlm"
    assert clm == mlm
    assert 0.5 < clm.stages["base"].fraction < 1  # the second stage is the shorter


def test_a_public_decoder_has_one_shape_in_both_apps() -> None:
    bert, crossbert = (
        parse(args_class, [f"config=apps/{app}/configs/smollm2.yaml", "dump_dir=x", "data.root_dir=y"])
        for app, args_class in CLASSES.items()
    )
    assert vars(bert.model).items() <= vars(crossbert.model).items()
    assert (bert.data, bert.init.path) == (crossbert.data, crossbert.init.path)
    assert crossbert.init.fresh == ["predictor"]
