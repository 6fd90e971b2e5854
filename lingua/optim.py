"""AdamW, or Muon for matrices, with learning-rate schedules and steps that skip non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lingua.distributed import full, local
from lingua.errors import UserError, check_fields
from lingua.loss import LossSum


@dataclass
class OptimArgs:
    """AdamW and its schedule. Learning rate and betas are the paper's; the rest takes Lingua's values."""

    lr: float = 6e-4  # peak learning rate
    min_lr: float = 1e-6  # learning rate at the end (Tables 10 and 11)
    beta1: float = 0.9  # decay of the gradient average
    beta2: float = 0.95  # decay of the squared gradient average
    epsilon: float = 1e-8  # added to the root (not in the paper)
    weight_decay: float = 0.1  # on matrices only, not on norms, embedding or vectors (not in the paper)
    clip: float = 1.0  # largest gradient norm; 0 turns clipping off (not in the paper)
    # What updates matrices: adamw, or muon, whose updates are scaled to the size of AdamW's so that the same lr and
    # weight_decay serve; norms, vectors and the embedding are AdamW's in any case.
    matrices: str = "adamw"
    muon_momentum: float = 0.95  # decay of muon's gradient average
    scheduler: str = "cosine"  # cosine, wsd (constant, then linear decay) or constant
    warmup: int = -1  # steps of linear warm-up; -1: 2000 or 10% of the run, whichever is less
    decay_fraction: float = 0.1  # wsd: share of the run that decays
    max_nonfinite: int = 20  # this many non-finite steps in a row end the run

    def __post_init__(self) -> None:
        if self.scheduler not in ("cosine", "wsd", "constant"):
            raise UserError(f"optim.scheduler={self.scheduler}: expected cosine, wsd or constant")
        if self.matrices not in ("adamw", "muon"):
            raise UserError(f"optim.matrices={self.matrices}: expected adamw or muon")
        checks = {
            "muon_momentum": (0.0 <= self.muon_momentum < 1.0, "at least 0 and less than 1"),
            "lr": (0.0 < self.lr < math.inf, "a finite number above 0"),
            "min_lr": (0.0 <= self.min_lr <= self.lr, f"a number between 0 and optim.lr={self.lr}"),
            "beta1": (0.0 <= self.beta1 < 1.0, "at least 0 and less than 1"),
            "beta2": (0.0 <= self.beta2 < 1.0, "at least 0 and less than 1"),
            "epsilon": (0.0 < self.epsilon < math.inf, "a finite number above 0"),
            "weight_decay": (0.0 <= self.weight_decay < math.inf, "a finite number, 0 or more"),
            "clip": (0.0 <= self.clip < math.inf, "a finite number, 0 (no clipping) or more"),
            "warmup": (self.warmup >= -1, "a number of steps, or -1"),
            "decay_fraction": (0.0 <= self.decay_fraction <= 1.0, "a share between 0 and 1"),
            "max_nonfinite": (self.max_nonfinite >= 1, "at least 1"),
        }
        check_fields("optim", self, checks)


def learning_rate(step: int, steps: int, args: OptimArgs) -> float:
    """Learning rate of update ``step`` (1 is the first) of a run of ``steps`` updates.

    Warm-up reaches ``lr`` at its last step; cosine and wsd reach ``min_lr`` at the last step of the run. A
    warm-up as long as the run is all the run has.
    """
    warmup = min(2000, steps // 10) if args.warmup < 0 else args.warmup
    if step <= warmup:
        return args.lr * step / warmup
    if args.scheduler == "constant":
        return args.lr
    if args.scheduler == "wsd":
        decay = max(1, round(steps * args.decay_fraction)) if args.decay_fraction else 0
        start = max(warmup, steps - decay)
        done = (step - start) / max(1, steps - start)
        return args.lr if done <= 0 else args.lr + (args.min_lr - args.lr) * min(1.0, done)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices with decay; norms, vectors and embeddings without."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed, others = [], []
    for parameter in (p for p in model.parameters() if p.requires_grad):  # without those of a frozen part
        is_matrix = parameter.dim() >= 2 and id(parameter) not in embeddings
        (decayed if is_matrix else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _check_muon(matrices: list[nn.Parameter]) -> None:
    """Raise UserError where the copies of a matrix could come out of Muon's products different.

    A matrix that a rank holds whole, or that all ranks share, has one result. With copies that are themselves spread
    over ranks, DTensor sums in several steps, in an order that PyTorch does not promise to be the same for all copies.
    """
    meshes = [m.device_mesh for m in matrices if isinstance(m, DTensor)]
    if meshes and all(size > 1 for size in meshes[0].shape):
        copies, ranks = meshes[0].shape
        raise UserError(
            f"optim.matrices=muon with {copies} copies of the model, each on {ranks} ranks: use distributed.dp_shard=1 "
            "(a copy on each rank) or -1 (one copy on all ranks)"
        )


class Optimizer:
    """AdamW, or Muon for matrices: takes summed gradients, clips, follows the schedule and skips non-finite steps.

    Nothing here waits for the device, but for Muon: counters stay on it until somebody reads them.

    Args:
        steps: of the whole run.
        schedule: learning rate of each step, if it is not :func:`learning_rate` over the whole run.
    """

    def __init__(
        self, model: nn.Module, args: OptimArgs, steps: int, schedule: Callable[[int], float] | None = None
    ) -> None:
        self.args, self.steps = args, steps
        self.learning_rate = schedule or (lambda step: learning_rate(step, steps, args))
        groups = parameter_groups(model, args.weight_decay)
        self.muon = None
        if args.matrices == "muon":
            matrices = groups.pop(0)["params"]
            _check_muon(matrices)
            self.muon = torch.optim.Muon(
                matrices, args.lr, args.weight_decay, args.muon_momentum, adjust_lr_fn="match_rms_adamw"
            )
        self.adamw = torch.optim.AdamW(
            groups,
            lr=args.lr,
            betas=(args.beta1, args.beta2),
            eps=args.epsilon,
            fused=True,
        )
        self.parts = [self.adamw] if self.muon is None else [self.adamw, self.muon]  # what a checkpoint holds
        self.parameters = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # non-finite steps so far
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, step: int, total: LossSum) -> Tensor:
        """One update from gradients of a loss that was summed over the targets of all ranks (``total``).

        A non-finite loss or gradient norm leaves weights and moments as they were, bit for bit.

        Returns:
            norm of the mean gradient before clipping (scalar tensor on the device).
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = full(torch.nn.utils.get_total_norm(gradients)) / total.targets
        bad = ~(torch.isfinite(norm) & torch.isfinite(total.loss))
        scale = 1.0 / total.targets
        if self.args.clip > 0:
            scale = scale * (self.args.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], scale)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate(step)
        # The fused kernel changes nothing where found_inf is 1: the way GradScaler skips, without a sync.
        self.adamw.grad_scale, self.adamw.found_inf = None, bad.float()
        self.adamw.step()
        if self.muon is not None and not bad:  # Muon cannot be told to skip, so here the host waits for the device
            self.muon.step()
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        self.skipped += bad
        self.in_a_row = (self.in_a_row + 1) * bad
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.in_a_row)
        return norm

    def check(self, step: int) -> None:
        """Raise UserError if ``max_nonfinite`` steps in a row were skipped since the last check (reads the device)."""
        most = int(self.most_in_a_row)
        if most >= self.args.max_nonfinite:
            raise UserError(
                f"step {step}: {most} steps in a row had a non-finite loss or gradient and were skipped "
                f"({int(self.skipped)} in all; optim.max_nonfinite={self.args.max_nonfinite}). Nothing was changed by "
                "them. Lower optim.lr, raise optim.warmup, or look at the data of these steps; if it comes back at "
                "once, the weights were spoilt before: remove the newest checkpoints to start from further back"
            )
        self.most_in_a_row.zero_()

    def counters(self) -> dict[str, Tensor]:
        """What must be saved beside the state of ``parts``."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}
