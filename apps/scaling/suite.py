"""A family of models between two budgets, or the paper's: ``python -m apps.scaling.suite suite=paper out=FILE.csv``."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field, fields
from typing import Any

from apps.scaling.rules import Plan, Planner, RuleArgs, write_text
from lingua import paper
from lingua.args import cli
from lingua.errors import UserError
from lingua.scaling import BATCH_LAWS, LR_LAWS, RATIO, SECOND_CROSSBERT_LR, depth_law, head_size, predictor_layers

# Columns of Tables 10 and 11, which name the encoder's shape differently; the other family's stay empty.
SHAPE = {
    "bert": ("dim", "n_layers", "n_heads", "head_dim"),
    "crossbert": ("enc_dim", "enc_layers", "enc_heads", "enc_head_dim", "pred_dim", "pred_layers", "pred_heads"),
}
RUN = ("steps", "tokens_b", "batch_tokens", "gpus", "grad_acc", "lr", "min_lr", "beta1", "beta2")
PRINTED = ("id", "params_m", "flops", *SHAPE["bert"], *SHAPE["crossbert"], *RUN)
# Beside them: which columns the authors set by hand, and how far these are from the rules.
BESIDE = (
    "set_by_hand", "ratio", "batch_law", "batch_off", "lr_law", "lr_off", "second_lr_off", "depth_rule", "depth_off",
    "pred_layers_rule",
)  # fmt: skip
COLUMNS = ("family", *PRINTED, *BESIDE)


@dataclass
class SuiteArgs(RuleArgs):
    """Plans of several budgets, one row a model."""

    suite: str = "rules"  # rules, between two budgets; or paper: Tables 10 and 11, all 17 models
    budgets: list[float] = field(default_factory=lambda: [2e18, 1e21])  # the least and the largest, in FLOPs
    n: int = 6  # models, at equal steps of log FLOPs
    out: str | None = None  # CSV file; none: print it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite not in ("rules", "paper"):
            raise UserError(f"suite={self.suite}: expected rules or paper")
        given = [f"{f.name}=" for f in fields(RuleArgs) if getattr(self, f.name) != f.default]
        if self.suite == "paper" and given:
            raise UserError(f"suite=paper is Tables 10 and 11 as they are: leave out {', '.join(given)}")
        if len(self.budgets) != 2 or not 0 < self.budgets[0] <= self.budgets[1] < math.inf or self.n < 1:
            raise UserError(f"budgets={self.budgets}, n={self.n}: expected [least, largest] and one model at least")


def suite(args: SuiteArgs) -> list[dict[str, Any]]:
    """Print or write the rows of :data:`COLUMNS`."""
    if args.suite == "paper":
        rows = paper_suite()
    else:
        low, high = map(math.log, args.budgets)
        planner, last = Planner(args), max(1, args.n - 1)
        budgets = [math.exp(low + (high - low) * i / last) for i in range(args.n)]
        rows = [planned_row(i, planner.plan(flops=flops), args) for i, flops in enumerate(budgets)]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if args.out is None:
        print(text.getvalue(), end="")
    else:
        write_text(args.out, text.getvalue())
        print(f"{len(rows)} models written to {args.out}")
    return rows


def shape_cells(made: Plan) -> dict[str, Any]:
    """The cells of a shape, named as in the family's table."""
    shape = made.shape
    head = shape.dim // shape.n_heads
    encoder = (shape.dim, shape.n_layers, shape.n_heads, head)
    cells = encoder if made.family == "bert" else (*encoder, shape.dim, shape.pred_layers, shape.n_heads)
    return dict(zip(SHAPE[made.family], cells, strict=True))


def planned_row(number: int, made: Plan, args: RuleArgs) -> dict[str, Any]:
    """A planned model as a row; nothing in it was set by hand but what ``args`` fixes."""
    optim, config = made.config.optim, made.config
    own = made.batch_tokens / (made.views * config.data.seq_len * args.gpus)  # rows of a step on each GPU
    return {
        "family": made.family,
        "id": number,
        "params_m": round(made.counts["per_token"] / 1e6, 2),
        "flops": f"{made.flops:.3g}",
        **shape_cells(made),
        "steps": made.steps,
        "tokens_b": float(f"{made.tokens / 1e9:.4g}"),
        "batch_tokens": made.batch_tokens,
        "gpus": args.gpus,
        "grad_acc": math.ceil(own / min(config.micro_rows, math.ceil(own))),
        "lr": made.lr,
        "min_lr": optim.min_lr,
        "beta1": optim.beta1,
        "beta2": optim.beta2,
        "set_by_hand": " ".join(name for name in ("lr", "batch_tokens", "dim", "n_layers") if getattr(args, name)),
        "ratio": round(made.ratio, 2),
    }


def paper_suite() -> list[dict[str, Any]]:
    """Tables 10 and 11: parameters, FLOPs, tokens, steps and the law's learning rates computed, the rest as printed."""
    return [paper_row(family, row) for family in paper.FAMILIES for row in paper.suite(family)]


def paper_row(family: str, printed: dict[str, Any]) -> dict[str, Any]:
    """One of the paper's models."""
    prefix = {"bert": "", "crossbert": "enc_"}[family]
    dim = printed[f"{prefix}dim"]
    layers = printed["n_layers" if family == "bert" else "enc_layers"]
    batch = printed["batch_tokens"]
    planner = Planner(RuleArgs(family, dim=dim, n_layers=layers, batch_tokens=batch, head_dim=head_size(dim)))
    flops_per_token = planner.flops_per_token(dim)
    made = planner.plan(tokens=RATIO * flops_per_token)
    untied = family == "crossbert" and printed["id"] == 8  # prints all parameters, with an output matrix of its own
    parameters = made.counts["full"] + paper.VOCAB_SIZE * dim if untied else made.counts["per_token"]
    lr_law, batch_law = LR_LAWS[family](made.flops), BATCH_LAWS[family](made.flops)
    off_law = family == "crossbert" and printed["id"] in (7, 8)
    lr = printed["lr"] if off_law else float(f"{lr_law:.3g}")
    depth = depth_law(family).law(dim)
    by_hand = ["batch_tokens", "gpus", "grad_acc", "min_lr", "beta1", "beta2", *["lr"] * off_law]
    return {
        "family": family,
        "id": printed["id"],
        "params_m": round(parameters / 1e6, 2),
        "flops": float(f"{made.flops:.4g}"),
        **shape_cells(made),
        "steps": made.steps,
        "tokens_b": round(made.tokens / 1e9, 2),
        **{name: printed[name] for name in ("batch_tokens", "gpus", "grad_acc", "min_lr", "beta1", "beta2")},
        "lr": lr,
        "set_by_hand": " ".join([*SHAPE[family][:2], *by_hand]),
        "ratio": round(made.ratio, 2),
        "batch_law": round(batch_law),
        "batch_off": round(batch / batch_law - 1, 4),
        "lr_law": float(f"{lr_law:.4g}"),
        "lr_off": round(printed["lr"] / lr_law - 1, 4),
        "second_lr_off": round(printed["lr"] / SECOND_CROSSBERT_LR(made.flops) - 1, 4) if off_law else "",
        "depth_rule": round(depth, 1),
        "depth_off": round(layers / depth - 1, 4),
        "pred_layers_rule": predictor_layers(layers) if family == "crossbert" else "",
    }


if __name__ == "__main__":
    cli(SuiteArgs, suite, "python -m apps.scaling.suite")
