"""The shipped configs of apps/embed say what the paper says, or that it does not."""

from __future__ import annotations

import pytest

from apps.embed.run import EmbedTrainArgs
from lingua.args import parse
from tests.support import ROOT


def read(name: str) -> EmbedTrainArgs:
    words = ["dump_dir=x", "backbone=y", "data.path=z"]
    return parse(EmbedTrainArgs, [f"config={ROOT / 'apps/embed/configs' / name}.yaml", *words])


@pytest.mark.parametrize("name", ["paper_literal", "msmarco"])
def test_one_epoch_of_512_queries_from_5e_5_to_5e_7(name: str) -> None:
    args = read(name)
    assert (args.epochs, args.steps, args.batch_queries) == (1, None, 512)
    assert (args.optim.lr, args.optim.min_lr, args.optim.scheduler) == (5e-5, 5e-7, "cosine")
    assert (args.data.prompt.query, args.data.prompt.passage) == ("", "")
    assert args.loss.own_negatives
    assert args.pooler.warm_start


def test_what_they_differ_in() -> None:
    literal, msmarco = read("paper_literal").loss, read("msmarco").loss
    assert (literal.temperature, literal.in_batch, literal.cross_rank) == (1.0, False, False)
    assert (msmarco.temperature, msmarco.in_batch, msmarco.cross_rank) == (0.05, True, True)
    assert read("debug").steps == 20
