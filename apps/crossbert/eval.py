"""Probe a frozen CrossBERT encoder: ``python -m apps.crossbert.eval ckpt=runs/x tasks=glue`` (docs/evaluation.md).

The work is :mod:`lingua.evaluation.evaluate`'s, the same for every app. This adds the model: parameters are counted
with the predictor, per token and for the encoder alone, and a run of another app is refused.
"""

from __future__ import annotations

from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.args import cli
from lingua.evaluation.evaluate import EvalArgs, evaluate


def run(args: EvalArgs) -> None:
    """Probe the checkpoint and write the results."""
    evaluate(args, CrossBert, CrossBertArgs)


if __name__ == "__main__":
    cli(EvalArgs, run, "python -m apps.crossbert.eval")
