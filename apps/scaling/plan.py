"""A model and its run for a budget: ``python -m apps.scaling.plan family=crossbert flops=1e19``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import OmegaConf

from apps.scaling.rules import KINDS, Plan, Planner, RuleArgs, write_text
from lingua.args import cli
from lingua.errors import UserError
from lingua.memory import MODES, Memory, Spread, backward_passes, training_memory
from lingua.scaling import depth_law


@dataclass
class PlanArgs(RuleArgs):
    """Plan one run. Give exactly one budget: flops, params, tokens or gpu_hours."""

    flops: float | None = None  # training FLOPs, as the paper counts them
    params: float | None = None  # matrix weights used per token: what the paper's tables print
    tokens: float | None = None  # view tokens
    gpu_hours: float | None = None  # of all GPUs together
    gpu_gb: float | None = None  # memory of one GPU: the plan takes the first way of spreading that fits
    out: str | None = None  # file for the config; none: print it

    def budget(self) -> dict[str, float]:
        """The one that was given. Raises UserError for none or several."""
        given = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}
        if len(given) != 1:
            raise UserError(f"give exactly one of {', '.join(KINDS)}; found {given or 'none'}")
        return given


def plan(args: PlanArgs) -> Plan:
    """Print the plan and write its config."""
    made = Planner(args).plan(**args.budget())
    table = memory_table(made, args)
    if args.gpu_gb is not None:
        choose_spread(made, table, args)
    print("\n".join([*describe(made, args), *memory_lines(table, made, args)]))
    run = f"python -m apps.{made.family}.train config={args.out or 'FILE.yaml'} dump_dir=... data.root_dir=..."
    text = f"# Planned: {made.flops:.4g} FLOPs, {made.counts['per_token']:,} parameters per token.\n# {run}\n"
    text += OmegaConf.to_yaml(OmegaConf.create(made.values))
    if args.out is None:
        print(f"\n{text}", end="")
    else:
        write_text(args.out, text)
        print(f"config        {args.out}")
    return made


def describe(made: Plan, args: RuleArgs) -> list[str]:
    """The plan for a person."""
    shape, counts = made.shape, made.counts
    head = made.config.model.head_size
    rule = depth_law(made.family)
    predictor = "" if shape.pred_layers is None else f", predictor of {blocks(shape.pred_layers)}"
    hours = made.gpu_hours(args)
    device = args.gpu.upper() if args.tflops is None else f"devices of {args.tflops:g} TFLOP/s"
    return [
        f"model         {made.family}: {blocks(shape.n_layers)}, {shape.dim} wide, {shape.n_heads} heads of "
        f"{head}{predictor}",
        f"              depth by n_layers = {rule.law.constant:.3g} * dim ** {rule.law.exponent:.3f}, within "
        f"{rule.spread:.0%} on the paper's suite"
        if args.n_layers is None
        else "              depth as given",
        f"parameters    {counts['full']:,} full, {counts['per_token']:,} per token, {counts['encoder']:,} encoder",
        f"length        {made.steps:,} steps of {made.batch_tokens:,} tokens = {made.tokens:,} view tokens, "
        f"{made.data_tokens:,} of text",
        f"FLOPs         {made.flops:.4g}, {made.flops_per_token:.4g} per view token: D/F {made.ratio:.3g}",
        f"learning rate {made.lr:.3g}, at the end {made.config.optim.min_lr:.3g}",
        f"time          {hours:,.4g} GPU hours at {args.mfu:.0%} of {device}; "
        f"{hours / args.gpus:,.4g} h on {args.gpus} GPU{'s' * (args.gpus > 1)}",
    ]


def blocks(number: int) -> str:
    """A number of them, in words."""
    return f"{number} block{'s' * (number != 1)}"


Table = dict[tuple[str, str], Memory]  # by way of spreading and mode of activation checkpointing


def ways(gpus: int) -> dict[str, int]:
    """Ways of spreading a model: how many ranks share a copy."""
    if gpus == 1:
        return {"one GPU": 1}
    nodes = {"shards in nodes of 8": 8} if gpus > 8 and gpus % 8 == 0 else {}
    return {"copies": 1, **nodes, "one shard each": gpus}


def memory_table(made: Plan, args: RuleArgs) -> Table:
    """Peak on each GPU, by ways of spreading and activation checkpointing."""
    rows = made.batch_tokens // (made.views * made.config.data.seq_len)
    own = math.ceil(rows / args.gpus)
    micro_rows = min(made.config.micro_rows, own)
    passes = backward_passes(made.config, math.ceil(own / micro_rows))
    return {
        (way, mode): training_memory(made.model, made.config, micro_rows, passes, Spread(args.gpus, shard, mode))
        for way, shard in ways(args.gpus).items()
        for mode in MODES
    }


def choose_spread(made: Plan, table: Table, args: PlanArgs) -> None:
    """Put the first way that fits into the config. Raises UserError if none does."""
    for (way, mode), memory in table.items():
        if memory.total / 1e9 <= args.gpu_gb:  # type: ignore[operator]
            shard = ways(args.gpus)[way]
            chosen = {"dp_shard": -1 if shard == args.gpus > 1 else shard, "activation_checkpointing": mode}
            made.values["distributed"] = {**made.values.get("distributed", {}), **chosen}
            return
    least = min(memory.total for memory in table.values()) / 1e9
    raise UserError(
        f"gpu_gb={args.gpu_gb:g}: {least:.1f} GB are needed on each GPU at least: ask for more gpus, or lower "
        "micro_rows in the config"
    )


def memory_lines(table: Table, made: Plan, args: PlanArgs) -> list[str]:
    """The table for a person, GB with what they go to."""
    lines = [
        f"memory        GB on each GPU, micro-batches of up to {made.config.micro_rows} rows; activation checkpointing:"
    ]
    lines.append(" " * 14 + f"{'':24}" + "".join(f"{mode:>11}" for mode in MODES))
    for way in ways(args.gpus):
        cells = []
        for mode in MODES:
            gb = table[way, mode].total / 1e9
            cells.append(f"{gb:10.3g}" + ("!" if args.gpu_gb is not None and gb > args.gpu_gb else " "))
        lines.append(" " * 14 + f"{way:24}" + "".join(cells))
    first = table[next(iter(ways(args.gpus))), "none"]
    parts = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in vars(first).items())
    lines.append(f"              the first of them: {parts}")
    return lines


if __name__ == "__main__":
    cli(PlanArgs, plan, "python -m apps.scaling.plan")
