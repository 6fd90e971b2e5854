"""What a launch would do, worked out and checked before anything is submitted."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lingua.args import build, parse
from lingua.errors import UserError
from lingua.memory import Spread, backward_passes, training_memory
from lingua.run_args import PretrainingArgs
from lingua.stool.args import StoolArgs, script_words


@dataclass
class Script:
    """A module whose command line is ``cli(config_class, function, usage)``."""

    module: ModuleType
    config_class: type
    function: Callable[[Any], None]


def load_script(name: str) -> Script:
    """Import a script and find what it gives to :func:`lingua.args.cli`. Raises UserError."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"script={name}: {error}; expected a module as after `python -m`, such as apps.crossbert.train"
        ) from None
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cli":
            names = [word.id for word in node.args[:2] if isinstance(word, ast.Name)]
            if len(names) == 2:
                return Script(module, getattr(module, names[0]), getattr(module, names[1]))
    raise UserError(f"script={name}: has no call of cli(CONFIG, FUNCTION, ...), the command line of a script here")


def make_plan(script: Script, config: Any, args: StoolArgs) -> dict[str, Any]:
    """Size of the run by the numbers of its config.

    Returns:
        gpus, ranks, batch_tokens, rows, accumulation, and for the configs of pretraining: steps, tokens (view
        tokens), parameters, memory_gb (an estimate, for one rank). A script of another kind has the first two.

    Raises:
        UserError: a config that cannot run on what is asked for.
    """
    ranks = args.nodes * args.ranks_per_node
    plan: dict[str, Any] = {"gpus": args.nodes * args.ngpu, "ranks": ranks}
    if not isinstance(config, PretrainingArgs):
        return plan
    masking = getattr(config, "masking", None)
    views = 2 if getattr(masking, "complementary", False) else 1
    row_tokens = views * config.data.seq_len
    if config.batch_tokens % row_tokens:
        raise UserError(
            f"batch_tokens={config.batch_tokens} is not a whole number of rows of {row_tokens} tokens "
            f"(data.seq_len={config.data.seq_len}, {views} view{'s' * (views > 1)})"
        )
    rows = config.batch_tokens // row_tokens
    if rows < ranks:
        raise UserError(
            f"batch_tokens={config.batch_tokens} is {rows} rows a step, fewer than the {ranks} ranks of nodes="
            f"{args.nodes} x {args.ranks_per_node}: {ranks - rows} would have nothing to do; ask for fewer, or raise "
            "batch_tokens"
        )
    micro_rows = min(config.micro_rows, math.ceil(rows / ranks))
    plan |= {
        "batch_tokens": config.batch_tokens,
        "rows": rows,
        "micro_rows": micro_rows,
        "accumulation": math.ceil(rows / ranks / micro_rows),
    }
    shard = ranks if config.distributed.dp_shard == -1 else config.distributed.dp_shard
    if ranks % shard:
        raise UserError(f"distributed.dp_shard={shard} does not divide the {ranks} ranks of this run")
    model = meta_model(script.module, config)
    flops_per_token = model.flops_per_token(**accepted(model.flops_per_token, config))
    steps = max(1, config.steps or round((config.tokens or config.flops / flops_per_token) / config.batch_tokens))
    device = "cuda" if args.ngpu else "cpu"
    spread = Spread(ranks, shard, config.distributed.activation_checkpointing, config.distributed.reshard_after_forward)
    memory = training_memory(model, config, micro_rows, backward_passes(config, plan["accumulation"]), spread, device)
    plan |= {
        "steps": steps,
        "tokens": steps * config.batch_tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "memory_gb": memory.total / 1e9,
    }
    if args.gpu_gb is not None and args.ngpu and plan["memory_gb"] > args.gpu_gb:
        raise UserError(
            f"about {plan['memory_gb']:.1f} GB are needed on each GPU, which have gpu_gb={args.gpu_gb:g}: lower "
            f"micro_rows={config.micro_rows}, or leave gpu_gb out to try"
        )
    return plan


def plans_by(code: Path, cwd: str, launches: list[tuple[dict[str, Any], list[str]]]) -> list[dict[str, Any]]:
    """:func:`make_plan` of each ``(launch arguments, script's words)``, by a copy of the code, in the folder ``cwd``.

    Keys that today's code names otherwise are those of the copy then.

    Raises:
        UserError: what the script of that code would refuse.
    """
    path = ":".join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "lingua.stool.plan"]
    done = subprocess.run(command, input=json.dumps(launches), cwd=cwd, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return json.loads(done.stdout.splitlines()[-1])


def meta_model(module: ModuleType, config: Any) -> Any:
    """The app's model without storage: for its counts of parameters and FLOPs."""
    import torch

    from lingua.tokenizer import build_tokenizer

    classes = [value for value in vars(module).values() if hasattr(value, "parameter_counts")]
    is_rtd = getattr(config, "objective", None) == "rtd"
    model_class = next(c for c in classes if ("rtd" in inspect.signature(c).parameters) == is_rtd)
    if config.model.vocab_size == -1:
        config.model.vocab_size = build_tokenizer(config.data.tokenizer).vocab_size
    with torch.device("meta"):
        return model_class(config.model, config.rtd) if is_rtd else model_class(config.model)


def accepted(function: Callable, config: Any) -> dict[str, Any]:
    """The arguments of an app's ``flops_per_token`` or ``row_flops``, which differ by what its objective hides."""
    masking = getattr(config, "masking", None)
    known = {"seq_len": config.data.seq_len, **(vars(masking) if masking is not None else {})}
    return {name: known[name] for name in inspect.signature(function).parameters}


def describe(plan: dict[str, Any], args: StoolArgs, runs: int = 1) -> list[str]:
    """The plan as lines for a person."""
    lines = []
    if runs > 1:
        lines.append(f"{runs} runs, at most {args.max_parallel} at the same time; of the first:")
    per_node = f"{args.nodes} node{'s' * (args.nodes > 1)} x {args.ranks_per_node}"
    lines.append(f"ranks         {plan['ranks']} ({per_node}), {plan['gpus']} GPUs")
    if "rows" in plan:
        lines += [
            f"batch         {plan['batch_tokens']:,} tokens = {plan['rows']:,} rows a step over all ranks",
            f"accumulation  {plan['accumulation']} x {plan['micro_rows']} rows on each rank",
            f"length        {plan['steps']:,} steps, {plan['tokens']:,} tokens",
            f"parameters    {plan['parameters']:,}",
            f"memory        about {plan['memory_gb']:.2g} GB on each rank: weights, gradients, AdamW, activations",
        ]
    return lines


def resolve(args: StoolArgs, words: list[str]) -> tuple[Script, Any]:
    """The script and its resolved config. Raises UserError for what the script itself would refuse."""
    script = load_script(args.script)
    return script, parse(script.config_class, script_words(args.config, words))


if __name__ == "__main__":
    plans = []
    try:
        for values, words in json.load(sys.stdin):
            args = build(StoolArgs, ("the launch", values))
            script = load_script(args.script)
            plans.append(make_plan(script, parse(script.config_class, words), args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(plans))
