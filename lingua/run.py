"""What every training run has around its loop: folder, logs, signals, resuming, saving."""

from __future__ import annotations

import abc
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lingua import checkpoint, resume
from lingua.args import to_dict, to_yaml
from lingua.distributed import pick_dtype, precision, start
from lingua.errors import UserError
from lingua.interrupt import Interrupt, requeue
from lingua.logger import Interval, Logger, peak_memory
from lingua.loss import Sums
from lingua.metrics import log_file_only, start_logging
from lingua.optim import Optimizer
from lingua.profiling import Profiler
from lingua.run_args import RunArgs
from lingua.saving import Checkpointer
from lingua.secrets import check_no_secrets
from lingua.stats import Stats
from lingua.stool.evaluation import launch_evaluation
from lingua.storage import as_path, check_shared
from lingua.watchdog import Watchdog

log = logging.getLogger(__name__)


class Run(abc.ABC):
    """One training run of any kind. What it trains on is a subclass's to say, by its abstract methods.

    :class:`lingua.pretraining.Pretraining` is the one of ``apps/crossbert/train.py``, which shows how a loop uses it.

    Args:
        args: the app's config, with a section ``validation`` that has ``every``.
    """

    def __init__(self, args: RunArgs) -> None:
        check_no_secrets(to_dict(args))
        self.args, self.folder = args, Path(args.dump_dir)
        # Collectives may take longer than the watchdog waits: it knows better whom to name.
        self.world = start(2 * args.distributed.timeout + 30, args.distributed.timeout)
        self._watchdog = Watchdog(self.world, args.distributed.timeout)
        self._interrupt = Interrupt(self.world)
        self._closing = ExitStack()

    @abc.abstractmethod
    def open_data(self, own: Path | None, state: dict[str, Any]) -> None:
        """Open what the run trains on, where it stands.

        Args:
            own: the checkpoint that the run goes on from; None: it is new.
            state: what was saved with it.
        """

    @abc.abstractmethod
    def batches(self, first: int, last: int) -> Iterator[Any]:
        """Yield what the loop gets in the steps ``first`` to ``last``, on the device."""

    @abc.abstractmethod
    def figures(self, step: int, interval: Interval) -> dict[str, float]:
        """What is recorded of the data and of the speed; with ``tokens_per_second``, for the console."""

    @abc.abstractmethod
    def data_state(self, step: int) -> dict[str, Any]:
        """What a checkpoint has to know of the data."""

    @abc.abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Hash of what each part of the data holds."""

    def begin(self) -> None:  # noqa: B027 - nothing, unless a subclass says otherwise
        """Give the model of a new run other weights than its initial ones."""

    def write_more(self) -> None:  # noqa: B027
        """Write further files into the folder of the run, on rank 0."""

    def __enter__(self) -> Any:
        try:
            self.dtype = pick_dtype(self.args.dtype, self.world.device)
            self._open_folder()
            self._open_run()
            self.world.check_same(
                {
                    "the config": resume.flat(to_dict(self.args)),
                    "the code": resume.code_version(),
                    "the data": self.fingerprints(),
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

    def _open_run(self) -> None:
        """Find where the run stands, check that it is the same run, and open its data there."""
        self._own = self.world.from_first(checkpoint.newest(self._root) if self.world.is_first else None)
        state = {} if self._own is None else checkpoint.read_state(self._own)
        if self._own is not None:
            resume.check_config(self._own, self.args)
            resume.check_code(self._own, state)
        self.open_data(self._own, state)
        if self._own is not None:
            resume.check_data(self._own, state, self.fingerprints(), self.args.resume.allow)

    def _write_config(self) -> None:
        if self.world.is_first:
            partial = self.folder / "config.yaml.partial"
            partial.write_text(to_yaml(self.args))
            partial.replace(self.folder / "config.yaml")
            self.write_more()

    def steps(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, batch)`` from where the run stopped to its end, or to a signal.

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
        self._logger.show_progress(optimizer.steps, done)
        model.train()
        self._interval = Interval(done)
        batches = self.batches(done + 1, optimizer.steps)
        for step in range(done + 1, optimizer.steps + 1):
            self._watchdog.tick(f"step {step}")
            asked = time.perf_counter()
            batch = next(batches)
            self._interval.data += time.perf_counter() - asked
            self._interrupt.begin_vote()
            with profiler.step(step), stats.step(step):
                yield step, batch
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
            self.begin()
            return 0
        state = checkpoint.load(self._own, self.model, self.optimizer.parts, self.world.saving)
        for name, counter in self.optimizer.counters().items():
            counter.fill_(state["optimizer"][name])
        log.info("resumed %s at step %d", self._own, state["step"])
        return state["step"]

    def precision(self) -> Any:
        """Context for the forward pass in the run's compute precision."""
        return precision(self.dtype, self.world.device)

    def lead(self, work: Callable[[], Iterator[None]], place: str) -> None:
        """Long work on rank 0, such as reading the data; each ``yield`` in it shows the other ranks that it goes on."""
        parts = work() if self.world.is_first else iter(())
        done = object()
        while not self.world.from_first(next(parts, done) is done):
            self._watchdog.tick(place)

    def log(self, step: int, loss: Sums, grad_norm: Tensor) -> None:
        """Record the step's figures at the logging cadence; otherwise do nothing and wait for nothing."""
        if step % self.args.logging.every and step != self.optimizer.steps:
            return
        self._checkpointer.check()
        interval = self._interval
        interval.saving = self._checkpointer.take_seconds()
        record = {
            "step": step,
            "loss": float(loss.loss / loss.targets),
            **loss.figures(),
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.learning_rate(step),
            "skipped_steps": int(self.optimizer.skipped),
            **self.figures(step, interval),
            **interval.shares(),
            "memory_gb": peak_memory(self.world.device) / 1e9,
        }
        self._logger.say(record)
        self.optimizer.check(step)
        self._interval = Interval(step)

    def validate_by(self, step: int, figures: Callable[[], dict[str, float]]) -> None:
        """Record ``figures()`` of the model in eval mode, at the validation cadence and at the end."""
        if step % self.args.validation.every and step != self.optimizer.steps:
            return
        self._watchdog.tick(f"validation after step {step}")
        start = time.perf_counter()
        with self.precision():
            self.model.eval()
            record = figures()
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
            "data": self.fingerprints(),
            "code": resume.code_version(),
            **self.data_state(step),
        }
        self._checkpointer.save(step, self.model, self.optimizer.parts, state, to_yaml(self.args))
