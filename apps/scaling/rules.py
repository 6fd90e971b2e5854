"""From a budget to a model and its run, by the paper's rules or by laws of one's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lingua import paper
from lingua.args import build, read_yaml
from lingua.errors import UserError, check_fields
from lingua.evaluation.results import writable_folder, write_whole
from lingua.flops import peak_flops
from lingua.scaling import BATCH_LAWS, LR_LAWS, MOST_WIDTH, RATIO, PowerLaw, Shape, head_size, shape_of, widths
from lingua.stool.plan import accepted, load_script, meta_model
from lingua.tokenizer import build_tokenizer

KINDS = ("flops", "params", "tokens", "gpu_hours")  # of budgets
# Fields of ``model`` that belong to one width: a plan that looks for the width cannot keep them.
OF_ONE_WIDTH = ("ffn_dim", "head_dim", "n_kv_heads", "predictor.dim", "predictor.n_heads")


@dataclass
class RuleArgs:
    """What decides a model for a budget. Laws are ``constant * FLOPs ** exponent``."""

    family: str = "crossbert"  # crossbert or bert
    base: str | None = None  # YAML of apps.FAMILY.train to start from: data, masking, all that is not planned
    ratio: float = RATIO  # D/F: view tokens over FLOPs per view token
    lr_law: PowerLaw | None = None  # peak learning rate; none: the paper's
    batch_law: PowerLaw | None = None  # view tokens a step; none: the paper's
    laws: str | None = None  # fits.json of apps.scaling.fit, whose laws of this family take their place
    lr: float | None = None  # instead of a law
    batch_tokens: int | None = None  # instead of a law
    dim: int | None = None  # instead of the width nearest to the ratio; it is the budget that is kept
    n_layers: int | None = None  # instead of the depth-width rule
    head_dim: int | None = None  # instead of 64 up to a width of 1,024 and 128 beyond; smaller heads for small models
    gpus: int = 8
    gpu: str = "h100"  # a name that lingua/flops.py has the peak of
    tflops: float | None = None  # peak of a device that it does not have
    mfu: float = 0.4  # share of the peak that training reaches

    def __post_init__(self) -> None:
        positive = {"ratio": self.ratio, "mfu": self.mfu}
        positive |= {k: v for k in ("lr", "batch_tokens", "tflops") if (v := getattr(self, k)) is not None}
        checks = {name: (0 < value < math.inf, "a finite number above 0") for name, value in positive.items()}
        checks |= {
            "family": (self.family in paper.FAMILIES, " or ".join(paper.FAMILIES)),
            "gpus": (self.gpus >= 1, "1 or more"),
        }
        whole = {k: v for k in ("dim", "n_layers", "head_dim") if (v := getattr(self, k)) is not None}
        check_fields("scaling", self, checks | {name: (value >= 1, "at least 1") for name, value in whole.items()})
        if self.mfu > 1:
            raise UserError(f"scaling.mfu={self.mfu}: expected a share of the peak, at most 1")
        if self.head_dim is not None and (self.head_dim % 2 or self.head_dim > MOST_WIDTH):
            raise UserError(f"scaling.head_dim={self.head_dim}: expected an even number, at most {MOST_WIDTH}")
        if self.dim is not None and self.dim % (head := self.head_dim or head_size(self.dim)):
            rule = "" if self.head_dim else " (the rule): give head_dim=..., or another dim"
            raise UserError(f"scaling.dim={self.dim} does not split into heads of head_dim={head}{rule}")

    def law(self, name: str) -> PowerLaw:
        """The law in force: ``lr`` or ``batch_tokens``."""
        given = {"lr": self.lr_law, "batch_tokens": self.batch_law}[name]
        if given is not None:
            return given
        if self.laws is not None:
            try:
                return PowerLaw(**json.loads(Path(self.laws).read_text())["families"][self.family]["laws"][name]["law"])
            except OSError as error:
                raise UserError(f"laws={self.laws}: cannot be read: {error.strerror}") from None
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"laws={self.laws}: has no law of {name} for {self.family}: make it with python -m apps.scaling.fit"
                    f" from runs at three budgets or more, or give {name}=..."
                ) from None
        return {"lr": LR_LAWS, "batch_tokens": BATCH_LAWS}[name][self.family]

    def peak(self) -> float:
        """FLOP/s of one device."""
        if self.tflops is not None:
            return self.tflops * 1e12
        peak = peak_flops(f"NVIDIA {self.gpu.upper()}", torch.bfloat16)
        if peak is None:
            raise UserError(f"gpu={self.gpu}: lingua/flops.py has no peak of it in bf16: give tflops=...")
        return peak


@dataclass
class Plan:
    """A model and its run."""

    family: str
    shape: Shape
    batch_tokens: int  # view tokens a step
    steps: int
    lr: float
    counts: dict[str, int]  # parameters: full, per_token, encoder
    flops_per_token: float  # the paper's F
    hardware_per_token: float  # FLOPs per view token as the hardware sees them
    views: int
    config: Any = field(repr=False)  # the app's, whole
    values: dict[str, Any] = field(repr=False)  # the same as a YAML file would say it
    model: nn.Module = field(repr=False)  # on the meta device

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def data_tokens(self) -> int:
        return self.tokens // self.views

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    @property
    def ratio(self) -> float:
        return self.tokens / self.flops_per_token

    def gpu_hours(self, args: RuleArgs) -> float:
        return self.tokens * self.hardware_per_token / (args.peak() * args.mfu) / 3600


class Planner:
    """Plans of one family; reads the config and the vocabulary once."""

    def __init__(self, args: RuleArgs) -> None:
        self.args = args
        self.script = load_script(f"apps.{args.family}.train")
        self.base = read_yaml(args.base) if args.base is not None else {"data": {"seq_len": paper.SEQ_LEN}}
        # Lengths that the base sets, which a plan replaces by steps.
        self.replaced = [name for name in ("steps", "tokens", "flops") if self.base.pop(name, None) is not None]
        self.base.pop("dump_dir", None)  # a plan is another run
        config = self._config({})
        fixed = {name: value for name in OF_ONE_WIDTH if (value := _at(config.model, name)) not in (None, -1)}
        if fixed and args.dim is None:
            raise UserError(
                f"{args.base}: model.{', model.'.join(f'{name}={value}' for name, value in fixed.items())} would stand "
                "beside every width that is tried: leave it out (-1: it follows the width), or give dim=..."
            )
        self.vocab_size = config.model.vocab_size
        if self.vocab_size == -1:
            self.vocab_size = build_tokenizer(config.data.tokenizer).vocab_size
        self.views = 2 if getattr(config.masking, "complementary", False) else 1
        self.row_tokens = self.views * config.data.seq_len
        self._known: dict[int, tuple[nn.Module, float, float]] = {}

    def plan(self, **budget: float) -> Plan:
        """For ``flops=``, ``params=`` (per token), ``tokens=`` (views) or ``gpu_hours=``."""
        ((kind, amount),) = budget.items()
        if not 0 < amount < math.inf:
            raise UserError(f"{kind}={amount}: expected a finite number above 0")
        args = self.args
        dim = args.dim or self._nearest(kind, amount)
        shape = self._shape(dim)
        model, flops_per_token, hardware = self._model(dim)
        tokens = self._tokens(kind, amount, dim)
        compute = tokens * flops_per_token
        batch, lr = self._batch(compute), args.lr or args.law("lr")(compute)
        steps = max(1, round(tokens / batch))
        planned = {"steps": steps, "batch_tokens": batch, "model": shape.config(), "optim": {"lr": float(f"{lr:.3g}")}}
        values = _merged(self.base, planned)
        config = self._config(planned)
        config.model.vocab_size = self.vocab_size
        return Plan(
            args.family, shape, batch, steps, config.optim.lr, model.parameter_counts(),  # type: ignore[operator]
            flops_per_token, hardware, self.views, config, values, model,
        )  # fmt: skip

    def flops_per_token(self, dim: int) -> float:
        """The paper's F of a width."""
        return self._model(dim)[1]

    def _config(self, planned: dict[str, Any]) -> Any:
        where = {"dump_dir": "planned", "data": {"root_dir": "planned"}}
        known = _merged(_merged(where, self.base), planned or {"steps": 1})
        return build(self.script.config_class, (self.args.base or "the plan", known))

    def _shape(self, dim: int) -> Shape:
        return shape_of(self.args.family, dim, self.args.head_dim, self.args.n_layers)

    def _model(self, dim: int) -> tuple[nn.Module, float, float]:
        """The model of a width on the meta device, its F, and its hardware FLOPs per view token."""
        if dim not in self._known:
            config = self._config({"steps": 1, "model": self._shape(dim).config()})
            config.model.vocab_size = self.vocab_size
            model = meta_model(self.script.module, config)
            paper_flops = model.flops_per_token(**accepted(model.flops_per_token, config))
            row = model.row_flops(**accepted(model.row_flops, config))
            self._known[dim] = model, paper_flops, row.training / self.row_tokens
        return self._known[dim]

    def _tokens(self, kind: str, amount: float, dim: int) -> float:
        """View tokens that a budget gives a model."""
        _, flops_per_token, hardware = self._model(dim)
        if kind == "flops":
            return amount / flops_per_token
        if kind == "params":
            return self.args.ratio * flops_per_token
        if kind == "tokens":
            return amount
        return amount * 3600 * self.args.peak() * self.args.mfu / hardware

    def _distance(self, kind: str, amount: float, dim: int) -> float:
        """0 where a width is just right, above where it is too small; falls with the width."""
        model, flops_per_token, _ = self._model(dim)
        if kind == "params":
            return math.log(amount / model.parameter_counts()["per_token"])  # type: ignore[operator]
        return math.log(self._tokens(kind, amount, dim) / flops_per_token / self.args.ratio)

    def _nearest(self, kind: str, amount: float) -> int:
        known = widths(self.args.head_dim)
        low, high = 0, len(known) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._distance(kind, amount, known[middle]) > 0 else (low, middle)
        best = min((known[low], known[high]), key=lambda dim: abs(self._distance(kind, amount, dim)))
        if abs(self._distance(kind, amount, best)) > math.log(4):
            advice = "Give dim= and n_layers=, or a smaller budget"
            if best == known[0]:
                advice = "For a small budget give a smaller head_dim=..., or dim= and n_layers="
            raise UserError(
                f"{kind}={amount:g}: no {self.args.family} of heads of {self.args.head_dim or 'the rules'} comes near; "
                f"the nearest is {best} wide. {advice}"
            )
        return best

    def _batch(self, compute: float) -> int:
        """View tokens a step: whole rows, as many on each GPU."""
        if self.args.batch_tokens is not None:
            if self.args.batch_tokens % self.row_tokens:
                raise UserError(
                    f"batch_tokens={self.args.batch_tokens} is not a whole number of rows of {self.row_tokens} tokens"
                )
            return self.args.batch_tokens
        unit = self.row_tokens * self.args.gpus
        return unit * max(1, round(self.args.law("batch_tokens")(compute) / unit))


def _at(section: Any, path: str) -> Any:
    """A field of a config's section, dotted; None where the family does not have it."""
    for name in path.split("."):
        section = getattr(section, name, None)
    return section


def write_text(path: str, text: str) -> None:
    """Write a file whole, making its folder. Raises UserError."""
    write_whole(writable_folder(Path(path).parent) / Path(path).name, text.encode())


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts, the second winning."""
    inner = {k: _merged(base[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | over | inner
