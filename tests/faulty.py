"""One rank of a training run in which something happens on purpose: ``python -m tests.faulty APP FAULT key=value ...``.

FAULT is ``KIND:RANK:STEP``: what happens on that rank in that step, in the middle of its accumulation; with ``late``,
the seconds it takes to close its logs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lingua.data
import lingua.logger
import lingua.run
from lingua.args import cli

RANK = int(os.environ.get("RANK", 0))


def happen(kind: str) -> None:
    """Do it."""
    if kind == "raise":
        raise RuntimeError("something is broken here")
    if kind == "exit":
        os._exit(0)
    if kind == "hang":
        threading.Event().wait(1000)  # in Python's own code, which tells nobody anything
    for name in kind.split("+"):
        if name.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, name))


def install(app: Any, kind: str, rank: int, at: int) -> None:
    """Wrap what the app's loop calls, so that ``kind`` happens in step ``at``."""
    real_sync, real_steps = app.sync_gradients, lingua.run.Run.steps
    now = {"step": 0, "calls": 0}

    def steps(self: Any, *args: Any) -> Any:
        for step, rows in real_steps(self, *args):
            now.update(step=step, calls=0)
            yield step, rows

    def sync_gradients(model: Any, when: bool) -> None:
        now["calls"] += 1
        if rank == RANK and now["step"] == at and now["calls"] == 2:
            if kind == "nan":
                model.register_forward_hook(poison)
            else:
                happen(kind)
        real_sync(model, when)

    def poison(model: Any, inputs: Any, output: Any) -> Any:
        return output._replace(loss=output.loss * float("nan")) if now["step"] == at else output

    lingua.run.Run.steps, app.sync_gradients = steps, sync_gradients


def end_late(rank: int, seconds: int) -> None:
    """Make the end of the run long on one rank, as an upload of figures would."""
    real = lingua.logger.Logger.close

    def close(self: Any) -> None:
        time.sleep(seconds if rank == RANK else 0)
        real(self)

    lingua.logger.Logger.close = close


def record_rows(path: Path) -> None:
    """Write a line for each row this rank trains on: step, row number, hash of its tokens."""
    real = lingua.data.TokenStream.step_rows

    def step_rows(self: Any, step: int) -> Any:
        batches = real(self, step)
        with path.open("a") as file:
            for rows in batches:
                for tokens, index, weight in zip(rows.tokens_BS, rows.index_B, rows.weight_B, strict=True):
                    if weight:
                        digest = hashlib.sha256(np.ascontiguousarray(tokens.numpy())).hexdigest()[:16]
                        file.write(json.dumps([step, int(index), digest]) + "\n")
        return batches

    lingua.data.TokenStream.step_rows = step_rows


def record_views(app: Any, path: Path) -> None:
    """Write a line for each hidden set of a row: row number, hash of the positions."""
    for name in ("complementary_views", "split_positions"):
        if not hasattr(app, name):
            continue
        real = getattr(app, name)

        def views(index_B: Any, *args: Any, real: Any = real) -> Any:
            made = real(index_B, *args)
            with path.open("a") as file:
                for view in made if isinstance(made, list) else [made]:
                    copies = len(view.hidden_BM) // len(index_B)  # two views may be stacked into one batch
                    for index, hidden in zip(index_B.repeat(copies), view.hidden_BM, strict=True):
                        digest = hashlib.sha256(hidden.numpy().tobytes()).hexdigest()[:16]
                        file.write(json.dumps([int(index), digest]) + "\n")
            return made

        setattr(app, name, views)


def perturb() -> None:
    """Move every initial weight to the next larger number."""
    import apps.bert.model
    import apps.crossbert.model

    real = apps.bert.model.init_weights

    @torch.no_grad()
    def init_weights(model: Any, *args: Any) -> None:
        real(model, *args)
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, float("inf"))))

    apps.bert.model.init_weights = apps.crossbert.model.init_weights = init_weights


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, fault, *words = sys.argv[1:]
    module = importlib.import_module(f"apps.{name}.train")
    kind, rank, at = fault.split(":")
    if kind == "record":
        folder = Path(os.environ["RECORDS"])
        record_rows(folder / f"rows_{RANK}.jsonl")
        record_views(module, folder / f"views_{RANK}.jsonl")
    elif kind == "ulp":
        perturb()
    elif kind == "late":
        end_late(int(rank), int(at))
    else:
        install(module, kind, int(rank), int(at))
    args_class = next(c for key, c in vars(module).items() if key.endswith("TrainArgs"))
    cli(args_class, module.train, "python -m tests.faulty", words)
