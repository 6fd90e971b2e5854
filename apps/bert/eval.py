"""Probe a frozen BERT or ELECTRA: ``python -m apps.bert.eval ckpt=runs/bert tasks=glue`` (docs/evaluation.md).

The work is :mod:`lingua.evaluation.evaluate`'s, the same for every app. This adds the model: its parameter counts are
reported, and a run of another app is refused.
"""

from __future__ import annotations

from typing import Any

from apps.bert.electra import Electra, RtdArgs
from apps.bert.model import Bert, BertArgs
from lingua.args import build, cli
from lingua.evaluation.evaluate import EvalArgs, evaluate


def run(args: EvalArgs) -> None:
    """Probe the checkpoint and write the results."""
    evaluate(args, Bert, BertArgs, make_model)


def make_model(args: BertArgs, config: dict[str, Any]) -> Bert | Electra:
    """The model that a run with such a config trains."""
    if config.get("objective") == "rtd":
        return Electra(args, build(RtdArgs, ("config.yaml", config.get("rtd") or {})))
    return Bert(args)


if __name__ == "__main__":
    cli(EvalArgs, run, "python -m apps.bert.eval")
