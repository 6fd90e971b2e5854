"""Where the figures of a run go, and how fast it is."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lingua.distributed import World
from lingua.errors import UserError
from lingua.metrics import Console, Metrics
from lingua.wandb_run import WandbArgs, WandbRun


@dataclass
class LoggingArgs:
    """How often and where metrics go."""

    every: int = 10  # steps between records
    tensorboard: bool = True  # write tb/ beside metrics.jsonl
    wandb: WandbArgs = field(default_factory=WandbArgs)  # Weights & Biases, off unless a project is named

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"logging.every={self.every}: expected at least 1")


class Logger:
    """Writes records to ``metrics.jsonl``, TensorBoard, W&B and the console. Ranks other than the first write nothing.

    Args:
        done: step the run resumes from; records of later ones are removed.
        config: the resolved config, for W&B.
    """

    def __init__(self, world: World, folder: Path, args: LoggingArgs, done: int, config: dict[str, Any]) -> None:
        self._is_first, self._folder = world.is_first, folder
        self._console: Console | None = None
        self._sinks: list[Any] = []
        if world.is_first:
            self._sinks.append(Metrics(folder, done, args.tensorboard))
            if args.wandb.project is not None:
                self._sinks.append(WandbRun(args.wandb, folder, config))

    def show_progress(self, steps: int, done: int) -> None:
        """Begin to show a bar, or lines."""
        if self._is_first:
            self._console = Console(self._folder.name, steps, done)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; ``step`` is required."""
        for sink in self._sinks:
            sink.write(record)

    def say(self, record: dict[str, Any]) -> None:
        """Write a record of training and show its main figures."""
        self.write(record)
        if self._console:
            self._console.say(record)

    def step(self, step: int) -> None:
        """Move the bar."""
        if self._console:
            self._console.step(step)

    def close(self) -> None:
        """Close all."""
        for part in (*self._sinks, *([self._console] if self._console else [])):
            part.close()


class Interval:
    """Seconds since the last record, and what they went into.

    Args:
        step: the last one before the interval.
    """

    def __init__(self, step: int) -> None:
        self.first_step, self._start = step, time.perf_counter()
        self.data = self.elsewhere = self.saving = 0.0  # waiting for rows; validation; waiting for checkpoints

    @property
    def seconds(self) -> float:
        """All of it."""
        return time.perf_counter() - self._start

    @property
    def training(self) -> float:
        """Without validation and checkpoints."""
        return self.seconds - self.elsewhere - self.saving

    def shares(self) -> dict[str, float]:
        """What was waited for, as shares."""
        return {
            "data_wait_share": self.data / self.training,
            "checkpoint_wait_share": self.saving / self.seconds,
            "validation_share": self.elsewhere / self.seconds,
        }


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has held at most: on its GPU, or in all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
