"""What every training run has around its loop: folder, logs, signals, resuming, saving, validation."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lingua import checkpoint, resume
from lingua.args import to_yaml
from lingua.checkpoint import CheckpointArgs
from lingua.data import DataArgs, Position, Rows, TokenStream
from lingua.distributed import pick_device, pick_dtype, precision
from lingua.errors import UserError
from lingua.loss import LossSum
from lingua.masking import View, hidden_count
from lingua.metrics import Console, Metrics, start_logging
from lingua.optim import OptimArgs, Optimizer, learning_rate
from lingua.source import TokenSource
from lingua.tokenizer import build_tokenizer, save_copy
from lingua.transformer import TransformerArgs
from lingua.validate import ValidationArgs, validate

log = logging.getLogger(__name__)


@dataclass
class LoggingArgs:
    """How often and where metrics go."""

    every: int = 10  # steps between records
    tensorboard: bool = True  # write tb/ beside metrics.jsonl

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"logging.every={self.every}: expected at least 1")


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

    def __post_init__(self) -> None:
        if self.path is None and (self.optimizer or self.position):
            raise UserError("init.optimizer and init.position need init.path")


@dataclass
class RunArgs:
    """What every app's training config has."""

    dump_dir: str = "???"  # run folder; a run that is there already is resumed
    seed: int = 0  # initial weights, masks and the order of later epochs
    # Length of the run: give exactly one of steps, tokens and flops.
    steps: int | None = None  # optimizer steps
    tokens: float | None = None  # view tokens, as the paper counts: each view of a row counts data.seq_len
    flops: float | None = None  # training FLOPs, as the paper counts: C = F * tokens
    batch_tokens: int = 393216  # view tokens in an optimizer step, over all ranks
    micro_rows: int = 32  # rows in one forward and backward pass; memory decides
    dtype: str = "auto"  # compute precision: auto, bf16, fp32, fp64
    compile: bool = False  # torch.compile each block
    model: TransformerArgs = field(default_factory=TransformerArgs)  # each app's own
    data: DataArgs = field(default_factory=DataArgs)
    optim: OptimArgs = field(default_factory=OptimArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    init: InitArgs = field(default_factory=InitArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)
    logging: LoggingArgs = field(default_factory=LoggingArgs)
    resume: ResumeArgs = field(default_factory=ResumeArgs)

    def __post_init__(self) -> None:
        lengths = {"steps": self.steps, "tokens": self.tokens, "flops": self.flops}
        given = {name: value for name, value in lengths.items() if value is not None}
        if len(given) != 1:
            raise UserError(f"give exactly one of steps, tokens and flops; found {given or 'none'}")
        name, value = next(iter(given.items()))
        if value <= 0:
            raise UserError(f"{name}={value}: expected more than 0")
        if self.micro_rows < 1:
            raise UserError(f"micro_rows={self.micro_rows}: expected at least 1")
        for ratio in self.validation.ratios:
            hidden_count(self.data.seq_len, ratio)


class Run:
    """One training run; see ``apps/crossbert/train.py`` for how a loop uses it.

    Args:
        args: the app's config.
        views: how many views of each row the objective trains on (2 with complementary masks).
    """

    def __init__(self, args: RunArgs, views: int) -> None:
        row_tokens = views * args.data.seq_len
        if args.batch_tokens < row_tokens or args.batch_tokens % row_tokens:
            nearest = max(1, round(args.batch_tokens / row_tokens)) * row_tokens
            raise UserError(
                f"batch_tokens={args.batch_tokens} is not a whole number of rows: a row of data.seq_len="
                f"{args.data.seq_len} counts {row_tokens} tokens with {views} view{'s' * (views > 1)}; "
                f"the nearest that fits is {nearest}"
            )
        self.args, self.views = args, views
        self.folder = Path(args.dump_dir)
        self.device = pick_device()
        self.dtype = pick_dtype(args.dtype, self.device)
        self.tokenizer = build_tokenizer(args.data.tokenizer)
        if args.model.vocab_size not in (-1, self.tokenizer.vocab_size):
            raise UserError(
                f"model.vocab_size={args.model.vocab_size}, but the tokenizer has {self.tokenizer.vocab_size}: use -1"
            )
        args.model.vocab_size = self.tokenizer.vocab_size
        self.console: Console | None = None
        self.metrics: Metrics | None = None
        self._stop: signal.Signals | None = None
        self._away = 0.0  # seconds of this interval spent in validation and checkpoints

    def __enter__(self) -> Run:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            start_logging(self.folder)
            self._lock = resume.lock(self.folder)
        except OSError as error:
            raise UserError(f"dump_dir={self.folder}: cannot be written: {error.strerror}") from None
        try:
            self._open_data()
        except BaseException:
            self._lock.close()
            raise
        self._old_handlers = {
            s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
        }
        return self

    def __exit__(self, *exc: object) -> None:
        for part in (self.console, self.metrics, self._lock):
            if part is not None:
                part.close()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)

    def _open_data(self) -> None:
        """Find where the run stands, check that it is the same run, and open its data there."""
        args, state = self.args, None
        self._own = checkpoint.newest(self.folder)
        source = self._own
        if source is None and args.init.path is not None:
            source = checkpoint.verified(checkpoint.resolve(args.init.path))
        if source is not None:
            state = checkpoint.read_state(source)
            resume.check_tokenizer(source, state, self.tokenizer, args.data.tokenizer)
        start = None
        if self._own is not None:
            resume.check_config(self._own, args)
            start = Position(**state["stream_start"])
        elif args.init.position:
            start = Position(**state["stream_end"])
        rows = args.batch_tokens // (self.views * args.data.seq_len)
        self.stream = TokenStream(
            args.data, self.tokenizer, args.seed, rows, args.micro_rows, views=self.views, start=start
        )
        if self._own is not None:
            resume.check_data(self._own, state, self.stream.fingerprints(), args.resume.allow)
        self.validation_sets = {
            name: TokenSource(folder, args.data.seq_len, 0, self.tokenizer, cache=self.stream.cache)
            for name, folder in args.data.validation.items()
        }
        self._init = None if self._own is not None else source
        partial = self.folder / "config.yaml.partial"
        partial.write_text(to_yaml(args))
        partial.replace(self.folder / "config.yaml")
        save_copy(self.tokenizer, self.folder / "tokenizer")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stop is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop = signal.Signals(signum)
        log.info("%s: saving after this step, then stopping (Ctrl-C again stops at once)", self._stop.name)

    def total_steps(self, flops_per_token: Callable[[int], float]) -> int:
        """Optimizer steps of the whole run: the nearest whole number, at least one.

        Args:
            flops_per_token: the paper's F per view token, as a function of the row length.
        """
        self.flops_per_token = flops_per_token
        if self.args.steps is not None:
            return self.args.steps
        if self.args.tokens is not None:
            return max(1, round(self.args.tokens / self.args.batch_tokens))
        # F depends on the row length, so a budget is used up phase by phase; the last phase has no end.
        left = self.args.flops
        for phase, steps in self.stream.phase_steps(sys.maxsize):
            a_step = self.args.batch_tokens * flops_per_token(phase.seq_len)
            if left <= steps * a_step:
                break
            left -= steps * a_step
        return max(1, phase.first_step - 1 + round(left / a_step))

    def flops(self, step: int) -> float:
        """Training FLOPs of the first ``step`` steps, as the paper counts them."""
        return sum(
            steps * self.args.batch_tokens * self.flops_per_token(phase.seq_len)
            for phase, steps in self.stream.phase_steps(step)
        )

    def steps(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, list[Rows]]]:
        """Yield ``(step, micro-batches)`` from where the run stopped to its end, or to a signal.

        Exit status after a signal: 128 + its number (130 for Ctrl-C), with everything saved.
        """
        self.model, self.optimizer = model, optimizer
        done = self._restore()
        self.metrics = Metrics(self.folder, done, self.args.logging.tensorboard)
        if done > optimizer.steps:
            raise UserError(f"{self.folder} has {done} steps done already, this config asks for {optimizer.steps}")
        if done == optimizer.steps:
            log.info("%s: finished already, %d of %d steps done", self.folder, done, optimizer.steps)
            return
        self.console = Console(self.folder.name, optimizer.steps, done)
        model.train()
        self._interval_start, self._interval_step, self._waited = time.perf_counter(), done, 0.0
        batches = self.stream.steps(done + 1, optimizer.steps)
        for step in range(done + 1, optimizer.steps + 1):
            asked = time.perf_counter()
            micro_batches = next(batches)
            self._waited += time.perf_counter() - asked
            yield step, [rows.to(self.device) for rows in micro_batches]
            self.console.step(step)
            if self._stop is not None:
                log.info("stopped by %s after step %d; the same command goes on from there", self._stop.name, step)
                raise SystemExit(128 + self._stop)
        log.info("done: %d steps in %s", optimizer.steps, self.folder)

    def _restore(self) -> int:
        """Load what there is to start from; returns the number of steps done."""
        if self._own is None:
            if self._init is not None:
                checkpoint.load(self._init, self.model, self.optimizer.adamw if self.args.init.optimizer else None)
                log.info("starting from the weights of %s", self._init)
            return 0
        state = checkpoint.load(self._own, self.model, self.optimizer.adamw)
        for name, counter in self.optimizer.counters().items():
            counter.fill_(state["optimizer"][name])
        log.info("resumed %s at step %d", self._own, state["step"])
        return state["step"]

    def precision(self) -> Any:
        """Context for the forward pass in the run's compute precision."""
        return precision(self.dtype, self.device)

    def log(self, step: int, loss: LossSum, grad_norm: Tensor) -> None:
        """Record the step's figures at the logging cadence; otherwise do nothing and wait for nothing."""
        if step % self.args.logging.every and step != self.optimizer.steps:
            return
        now = time.perf_counter()
        seconds = now - self._interval_start - self._away
        tokens = (step - self._interval_step) * self.args.batch_tokens
        record = {
            "step": step,
            "tokens": step * self.args.batch_tokens,
            "data_tokens": step * self.args.batch_tokens // self.views,
            "flops": self.flops(step),
            "loss": float(loss.loss / loss.targets),
            "grad_norm": float(grad_norm),
            "lr": learning_rate(step, self.optimizer.steps, self.args.optim),
            "skipped_steps": int(self.optimizer.skipped),
            **self.stream.progress(step),
            "tokens_per_second": tokens / seconds,
            "data_tokens_per_second": tokens / self.views / seconds,
            "data_wait_share": self._waited / seconds,
        }
        self.metrics.write(record)
        self.console.say(record)
        self.optimizer.check(step)
        self._interval_start, self._interval_step, self._waited, self._away = now, step, 0.0, 0.0

    def validate(self, step: int, loss: Callable[[Tensor, View], LossSum]) -> None:
        """Losses on every validation set at every ratio, at the validation cadence and at the end.

        Args:
            loss: summed loss of tokens [B, S] on the hidden positions of a view.
        """
        if step % self.args.validation.every and step != self.optimizer.steps:
            return
        with self._elsewhere(), self.precision():
            self.model.eval()
            record = validate(self.validation_sets, self.args.validation, self.device, loss)
            self.model.train()
        if record:
            self.metrics.write({"step": step, **record})
            log.info("step %d  %s", step, "  ".join(f"{key} {value:.4f}" for key, value in record.items()))

    def save(self, step: int) -> None:
        """Write a checkpoint at the cadence, at the end, and when a signal has asked to stop."""
        if step % self.args.checkpoint.dump.every and step != self.optimizer.steps and self._stop is None:
            return
        self.optimizer.check(step)
        with self._elsewhere():
            state = {
                "step": step,
                "optimizer": {k: int(v) for k, v in self.optimizer.counters().items()},
                "stream_start": asdict(self.stream.position(0)),
                "stream_end": asdict(self.stream.position(step)),
                "tokenizer": self.tokenizer.identity(),
                "data": self.stream.fingerprints(),
            }
            folder = self.folder / "checkpoints" / f"{step:010d}"
            checkpoint.save(folder, self.model, self.optimizer.adamw, state, to_yaml(self.args))
            checkpoint.remove_old(self.folder, self.args.checkpoint.dump.keep)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Time that does not count as training in tokens per second."""
        start = time.perf_counter()
        yield
        self._away += time.perf_counter() - start
