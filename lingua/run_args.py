"""What every app's training config has, and what those of pretraining have besides."""

from __future__ import annotations

from dataclasses import dataclass, field

from lingua.data import DataArgs
from lingua.distributed import DistributedArgs
from lingua.errors import UserError
from lingua.logger import LoggingArgs
from lingua.masking import hidden_count
from lingua.optim import OptimArgs
from lingua.profiling import ProfilingArgs
from lingua.saving import CheckpointArgs
from lingua.stats import StatsArgs
from lingua.transformer import TransformerArgs
from lingua.validate import ValidationArgs


@dataclass
class ResumeArgs:
    """What a resumed run may change."""

    allow: list[str] = field(default_factory=list)  # config keys allowed to differ from the run's own, by name


@dataclass
class InitArgs:
    """Where a new run starts from, if not from scratch. A run that has a checkpoint of its own ignores it."""

    path: str | None = None  # run folder (its newest checkpoint) or checkpoint folder of the same model shape
    optimizer: bool = False  # also take its optimizer state, as for the decay branch of a wsd run
    position: bool = False  # also go on where it was in each source of the data; else from the beginning
    fresh: list[str] = field(default_factory=list)  # parts that start anew, of any shape, such as [predictor]

    def __post_init__(self) -> None:
        if self.fresh and (self.path is None or self.optimizer):
            raise UserError(
                f"init.fresh={self.fresh} needs init.path and goes without init.optimizer: there is no optimizer state "
                "of new weights"
            )
        if self.path is None and (self.optimizer or self.position):
            raise UserError("init.optimizer and init.position need init.path")


@dataclass
class RunArgs:
    """What every app's training config has."""

    dump_dir: str = "???"  # run folder; a run that is there already is resumed
    seed: int = 0  # initial weights, masks and the order of later epochs
    steps: int | None = None  # optimizer steps
    micro_rows: int = 32  # rows in one forward and backward pass; memory decides
    dtype: str = "auto"  # compute precision: auto, bf16, fp32, fp64
    compile: bool = False  # torch.compile each block
    optim: OptimArgs = field(default_factory=OptimArgs)
    distributed: DistributedArgs = field(default_factory=DistributedArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    logging: LoggingArgs = field(default_factory=LoggingArgs)
    stats: StatsArgs = field(default_factory=StatsArgs)
    profiling: ProfilingArgs = field(default_factory=ProfilingArgs)
    resume: ResumeArgs = field(default_factory=ResumeArgs)

    def __post_init__(self) -> None:
        if self.micro_rows < 1:
            raise UserError(f"micro_rows={self.micro_rows}: expected at least 1")
        given = {name: value for name, value in self.lengths().items() if value is not None}
        if len(given) != 1:
            *others, last = self.lengths()
            raise UserError(f"give exactly one of {', '.join(others)} and {last}; found {given or 'none'}")
        name, value = next(iter(given.items()))
        if value <= 0:
            raise UserError(f"{name}={value}: expected more than 0")

    def lengths(self) -> dict[str, float | None]:
        """The fields of which exactly one says how long the run is."""
        return {"steps": self.steps}


@dataclass
class PretrainingArgs(RunArgs):
    """What the config of every pretraining has."""

    # Length of the run: give exactly one of steps, tokens and flops.
    tokens: float | None = None  # view tokens, as the paper counts: each view of a row counts data.seq_len
    flops: float | None = None  # training FLOPs, as the paper counts: C = F * tokens
    batch_tokens: int = 393216  # view tokens in an optimizer step, over all ranks
    model: TransformerArgs = field(default_factory=TransformerArgs)  # each app's own
    data: DataArgs = field(default_factory=DataArgs)
    init: InitArgs = field(default_factory=InitArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)

    def __post_init__(self) -> None:
        super().__post_init__()
        for ratio in self.validation.ratios:
            hidden_count(self.data.seq_len, ratio)

    def lengths(self) -> dict[str, float | None]:
        return {**super().lengths(), "tokens": self.tokens, "flops": self.flops}
