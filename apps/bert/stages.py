"""What a BERT is trained for: one objective, or several one after another in one run (CLM, then MLM)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lingua.errors import UserError
from lingua.optim import OptimArgs, learning_rate

OBJECTIVES = ("mlm", "rtd", "clm")


@dataclass
class StageArgs:
    """A stage of a run. Its learning rate follows a schedule of its own, from warm-up to end."""

    objective: str = "???"  # mlm or clm
    fraction: float | None = None  # share of the run's steps; none: all that the others leave
    # Peak and schedule of this stage; none: what optim says, over the length of the stage.
    lr: float | None = None
    min_lr: float | None = None
    scheduler: str | None = None
    warmup: int | None = None  # steps; -1: 2000 or 10% of the stage, whichever is less
    decay_fraction: float | None = None  # share of the stage

    def optim(self, base: OptimArgs) -> OptimArgs:
        """``base`` with what this stage says otherwise. Raises UserError if the two do not fit."""
        names = ("lr", "min_lr", "scheduler", "warmup", "decay_fraction")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return dataclasses.replace(base, **own)


@dataclass(frozen=True)
class Stage:
    """A stage at its place in the run."""

    objective: str
    first_step: int  # 1 is the first of the run
    steps: int
    optim: OptimArgs


def check_stages(objective: str, stages: dict[str, StageArgs], optim: OptimArgs) -> list[float]:
    """Share of the run of each stage. Raises UserError unless they make up one run."""
    if objective not in OBJECTIVES:
        raise UserError(f"objective={objective}: expected one of {', '.join(OBJECTIVES)}")
    if not stages:
        return [1.0]
    if objective == "rtd":
        raise UserError("objective=rtd has no stages: they are of mlm and clm, which train the same weights")
    if objective != OBJECTIVES[0]:
        raise UserError(f"objective={objective} beside stages, each of which says its own: leave it out")
    for name, stage in stages.items():
        if stage.objective not in ("mlm", "clm"):
            raise UserError(f"stages.{name}.objective={stage.objective}: expected mlm or clm")
        try:
            stage.optim(optim)
        except UserError as error:
            raise UserError(f"stages.{name}: {error}") from None
    given = {name: stage.fraction for name, stage in stages.items() if stage.fraction is not None}
    for name, fraction in given.items():
        if not 0.0 < fraction <= 1.0:
            raise UserError(f"stages.{name}.fraction={fraction}: expected a share above 0 and at most 1")
    open_ones, left = [name for name in stages if name not in given], 1.0 - sum(given.values())
    if len(open_ones) > 1:
        raise UserError(f"stages.{open_ones[1]}.fraction: only one stage may be without; {open_ones[0]} is already")
    if (open_ones and left <= 1e-9) or (not open_ones and abs(left) > 1e-9):
        raise UserError(
            f"the fractions of the stages {given} are {1.0 - left:g} of the run: expected "
            f"{f'less than 1, for {open_ones[0]} to have the rest' if open_ones else '1 together'}"
        )
    return [left if stage.fraction is None else stage.fraction for stage in stages.values()]


class Stages:
    """The stages of a run of so many steps; a run without any is one stage of its ``objective``."""

    def __init__(self, objective: str, stages: dict[str, StageArgs], optim: OptimArgs, steps: int) -> None:
        fractions = check_stages(objective, stages, optim)
        self.all: list[Stage] = []
        done, share = 0, 0.0
        for (name, stage), fraction in zip((stages or {"": StageArgs(objective)}).items(), fractions, strict=True):
            share += fraction
            end = round(share * steps)
            if end <= done:
                raise UserError(f"stages.{name}: {fraction:g} of {steps} steps is less than one step")
            self.all.append(Stage(stage.objective, done + 1, end - done, stage.optim(optim)))
            done = end

    def at(self, step: int) -> Stage:
        """The stage that step ``step`` (1 is the first) belongs to."""
        return next(stage for stage in reversed(self.all) if stage.first_step <= max(step, 1))

    def learning_rate(self, step: int) -> float:
        """That of the stage's schedule."""
        stage = self.at(step)
        return learning_rate(step - stage.first_step + 1, stage.steps, stage.optim)
