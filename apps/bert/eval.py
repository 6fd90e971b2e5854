"""Probe a frozen BERT: ``python -m apps.bert.eval ckpt=runs/bert tasks=glue`` (docs/evaluation.md).

The work is :mod:`lingua.evaluate`'s, the same for every app. This adds the model: its parameter counts are
reported, and a run of another app is refused.
"""

from __future__ import annotations

from apps.bert.model import Bert, BertArgs
from lingua.args import cli
from lingua.evaluate import EvalArgs, evaluate


def run(args: EvalArgs) -> None:
    """Probe the checkpoint and write the results."""
    evaluate(args, Bert, BertArgs)


if __name__ == "__main__":
    cli(EvalArgs, run, "python -m apps.bert.eval")
