"""What every training run has around its loop: folder, logs, signals, resuming, saving, validation."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lingua import checkpoint, resume
from lingua.args import to_dict, to_yaml
from lingua.attention import check_attention
from lingua.data import Position, Rows, TokenStream
from lingua.distributed import pick_dtype, precision, start
from lingua.errors import UserError
from lingua.flops import ForwardFlops, device_peak, utilization
from lingua.interrupt import Interrupt, requeue
from lingua.logger import Interval, Logger, peak_memory
from lingua.loss import Sums
from lingua.masking import View
from lingua.metrics import log_file_only, start_logging
from lingua.optim import Optimizer
from lingua.profiling import Profiler
from lingua.run_args import RunArgs
from lingua.saving import Checkpointer
from lingua.secrets import check_no_secrets
from lingua.source import TokenSource
from lingua.stats import Stats
from lingua.stool.evaluation import launch_evaluation
from lingua.storage import as_path, check_shared
from lingua.tokenizer import build_tokenizer, save_copy
from lingua.validate import validate
from lingua.watchdog import Watchdog

log = logging.getLogger(__name__)


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
        check_no_secrets(to_dict(args))
        self.args, self.views = args, views
        self.folder = Path(args.dump_dir)
        self.tokenizer = build_tokenizer(args.data.tokenizer)
        if args.model.vocab_size not in (-1, self.tokenizer.vocab_size):
            raise UserError(
                f"model.vocab_size={args.model.vocab_size}, but the tokenizer has {self.tokenizer.vocab_size}: use -1"
            )
        args.model.vocab_size = self.tokenizer.vocab_size
        # Collectives may take longer than the watchdog waits: it knows better whom to name.
        self.world = start(2 * args.distributed.timeout + 30, args.distributed.timeout)
        self._watchdog = Watchdog(self.world, args.distributed.timeout)
        self._interrupt = Interrupt(self.world)
        self._closing = ExitStack()

    def __enter__(self) -> Run:
        try:
            self._pick_precision()
            self._open_folder()
            self._open_data()
            self.world.check_same(
                {
                    "the config": resume.flat(to_dict(self.args)),
                    "the code": resume.code_version(),
                    "the data": self.stream.fingerprints(),
                }
            )
            self._write_config()
        except BaseException as error:
            self._closing.close()
            self._watchdog.fail(error)
            raise
        self._interrupt.open()
        self._closing.callback(self._interrupt.close)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, SystemExit) and self._interrupt.agreed is not None
        if error is not None and not stopped:
            if self.world.size > 1:  # the console hears of the cause only, from the watchdog
                log_file_only("".join(traceback.format_exception(error)))
            self._watchdog.fail(error)
        self._watchdog.tick("the end")
        try:
            self._closing.close()
            self.world.gather(None)  # nobody leaves while another still writes
        except BaseException as failure:
            self._watchdog.fail(failure)
            raise
        self._watchdog.stop()

    def _pick_precision(self) -> None:
        args, device = self.args, self.world.device
        self.dtype = pick_dtype(args.dtype, device)
        isolated = args.data.isolate_documents
        check_attention(args.model.attention, isolated, args.model.head_sizes(), device, self.dtype, args.compile)

    def _open_folder(self) -> None:
        """Take the run folder for this run, and start its logs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            start_logging(self.folder, self.world.rank)
            if self.world.is_first:
                self._closing.enter_context(resume.lock(self.folder))
        except OSError as error:
            raise UserError(f"dump_dir={self.folder}: cannot be written: {error.strerror}") from None
        path = self.args.checkpoint.path
        self._root = self.folder / "checkpoints" if path is None else as_path(path)
        check_shared(self._root, self.world)

    def _open_data(self) -> None:
        """Find where the run stands, check that it is the same run, and open its data there."""
        args, world, state = self.args, self.world, None
        source = checkpoint.newest(self._root) if world.is_first else None
        is_own = source is not None
        if world.is_first and source is None and args.init.path is not None:
            source = checkpoint.verified(checkpoint.resolve(args.init.path))
        source, is_own = world.from_first((source, is_own))
        self._own = source if is_own else None
        if source is not None:
            state = checkpoint.read_state(source)
            resume.check_tokenizer(source, state, self.tokenizer, args.data.tokenizer)
        start = None
        if self._own is not None:
            resume.check_config(self._own, args)
            resume.check_code(self._own, state)
            start = Position(**state["stream_start"])
        elif source is not None:
            resume.check_init(source, args.model, args.init.fresh)
            start = Position(**state["stream_end"]) if args.init.position else None
        rows = args.batch_tokens // (self.views * args.data.seq_len)
        self.stream = TokenStream(
            args.data, self.tokenizer, args.seed, rows, args.micro_rows, world.rank, world.size, self.views, start
        )
        if self._own is not None:
            resume.check_data(self._own, state, self.stream.fingerprints(), args.resume.allow)
        self.validation_sets = {
            name: TokenSource(folder, args.data.seq_len, 0, self.tokenizer, cache=self.stream.cache)
            for name, folder in args.data.validation.items()
        }
        self._init = None if self._own is not None else source

    def _write_config(self) -> None:
        if self.world.is_first:
            partial = self.folder / "config.yaml.partial"
            partial.write_text(to_yaml(self.args))
            partial.replace(self.folder / "config.yaml")
            save_copy(self.tokenizer, self.folder / "tokenizer")

    def total_steps(self, flops_per_token: Callable[[int], float], row_flops: Callable[[int], ForwardFlops]) -> int:
        """Optimizer steps of the whole run: the nearest whole number, at least one.

        Args:
            flops_per_token: the paper's F per view token, as a function of the row length.
            row_flops: what the forward pass of one row costs the hardware, likewise.
        """
        self.flops_per_token, self.row_flops = flops_per_token, row_flops
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
        if done > optimizer.steps:
            raise UserError(f"{self.folder} has {done} steps done already, this config asks for {optimizer.steps}")
        args, world = self.args, self.world
        self._logger = Logger(world, self.folder, args.logging, done, to_dict(args))
        self._closing.callback(self._logger.close)
        if done == optimizer.steps:
            log.info("%s: finished already, %d of %d steps done", self.folder, done, optimizer.steps)
            return
        self._checkpointer = Checkpointer(self._root, args.checkpoint, world.saving, self._saved)
        stats = Stats(args.stats, model, optimizer.adamw, self.precision, self._logger.write)
        profiler = Profiler(args.profiling, self.folder, world.device, optimizer.steps, world.rank)
        self._closing.callback(profiler.close)
        self._peak = device_peak(world.device, self.dtype)
        self._logger.show_progress(optimizer.steps, done)
        model.train()
        self._interval = Interval(done)
        batches = self.stream.steps(done + 1, optimizer.steps)
        for step in range(done + 1, optimizer.steps + 1):
            self._watchdog.tick(f"step {step}")
            asked = time.perf_counter()
            micro_batches = next(batches)
            self._interval.data += time.perf_counter() - asked
            self._interrupt.begin_vote()
            with profiler.step(step), stats.step(step):
                yield step, [rows.to(world.device) for rows in micro_batches]
            self._logger.step(step)
            if self._interrupt.agreed is not None:
                self._finish_saving()
                name = self._interrupt.agreed.name
                log.info("stopped by %s after step %d; the same command goes on from there", name, step)
                if args.distributed.requeue and name == "SIGUSR2" and world.is_first:
                    requeue()
                raise SystemExit(128 + self._interrupt.agreed)
        self._finish_saving()
        log.info("done: %d steps in %s", optimizer.steps, self.folder)

    def _saved(self, folder: Path) -> None:
        """A checkpoint is whole."""
        launch_evaluation(self.folder, folder)

    def _finish_saving(self) -> None:
        self._watchdog.tick("waiting for the last checkpoint")
        self._checkpointer.wait()
        self._checkpointer.close()

    def _restore(self) -> int:
        """Load what there is to start from; returns the number of steps done."""
        if self._own is None:
            if self._init is not None:
                optimizer = self.optimizer.parts if self.args.init.optimizer else None
                fresh = self.args.init.fresh
                checkpoint.load(self._init, self.model, optimizer, self.world.saving, fresh)
                log.info("starting from the weights of %s%s", self._init, f", but for {fresh}" if fresh else "")
            return 0
        state = checkpoint.load(self._own, self.model, self.optimizer.parts, self.world.saving)
        for name, counter in self.optimizer.counters().items():
            counter.fill_(state["optimizer"][name])
        log.info("resumed %s at step %d", self._own, state["step"])
        return state["step"]

    def precision(self) -> Any:
        """Context for the forward pass in the run's compute precision."""
        return precision(self.dtype, self.world.device)

    def log(self, step: int, loss: Sums, grad_norm: Tensor) -> None:
        """Record the step's figures at the logging cadence; otherwise do nothing and wait for nothing."""
        if step % self.args.logging.every and step != self.optimizer.steps:
            return
        self._checkpointer.check()
        interval = self._interval
        interval.saving = self._checkpointer.take_seconds()
        tokens = (step - interval.first_step) * self.args.batch_tokens
        rows = tokens // (self.views * self.stream.phase(step).seq_len)
        record = {
            "step": step,
            "tokens": step * self.args.batch_tokens,
            "data_tokens": step * self.args.batch_tokens // self.views,
            "flops": self.flops(step),
            "loss": float(loss.loss / loss.targets),
            **loss.figures(),
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.learning_rate(step),
            "skipped_steps": int(self.optimizer.skipped),
            **self.stream.progress(step),
            "tokens_per_second": tokens / interval.training,
            "data_tokens_per_second": tokens / self.views / interval.training,
            **interval.shares(),
            **utilization(
                self.row_flops(self.stream.phase(step).seq_len) * rows,
                self.flops(step) - self.flops(interval.first_step),
                interval.training,
                self.world.size,
                self._peak,
                self.args.distributed.activation_checkpointing,
            ),
            "memory_gb": peak_memory(self.world.device) / 1e9,
        }
        self._logger.say(record)
        self.optimizer.check(step)
        self._interval = Interval(step)

    def validate(self, step: int, loss: Callable[[Rows, View], Sums], masked: bool = True) -> None:
        """Losses on every validation set at every ratio, at the validation cadence and at the end.

        Args:
            loss, masked: see :func:`lingua.validate.validate`.
        """
        if step % self.args.validation.every and step != self.optimizer.steps:
            return
        self._watchdog.tick(f"validation after step {step}")
        start = time.perf_counter()
        with self.precision():
            self.model.eval()
            record = validate(self.validation_sets, self.args.validation, self.world, loss, masked)
            self.model.train()
        self._interval.elsewhere += time.perf_counter() - start
        if record:
            self._logger.write({"step": step, **record})
            log.info("step %d  %s", step, "  ".join(f"{key} {value:.4f}" for key, value in record.items()))

    def save(self, step: int, objective: str | None = None) -> None:
        """Write a checkpoint at the cadence, at the end, and when a signal has asked to stop.

        Args:
            objective: what the model was trained for in this step, for who uses the checkpoint.
        """
        self._interrupt.end_vote()
        every = self.args.checkpoint.dump.every
        if step % every and step != self.optimizer.steps and self._interrupt.agreed is None:
            return
        self._watchdog.tick(f"saving after step {step}")
        self.optimizer.check(step)
        state = {
            "step": step,
            "objective": objective,
            "optimizer": {k: int(v) for k, v in self.optimizer.counters().items()},
            "stream_start": asdict(self.stream.position(0)),
            "stream_end": asdict(self.stream.position(step)),
            "tokenizer": self.tokenizer.identity(),
            "data": self.stream.fingerprints(),
            "code": resume.code_version(),
        }
        self._checkpointer.save(step, self.model, self.optimizer.parts, state, to_yaml(self.args))
