"""Does a run survive anything? One run is killed some hundred times, resumed on other numbers of ranks, and compared.

    python -m experiments.kills out=docs/results/kills.json

A tiny model trains in float64, once on two ranks without interruption, and once while its ranks are killed at moments
drawn from ``seed``. Each kill is one of ``KINDS``; each start draws its number of ranks and whether they share the
parameters. The ranks run an app's ``train.py`` as ``python -m`` does, each in a process of its own, forked from one
that has imported PyTorch, so that a start takes a second and not ten.

Fixed before the run: every start begins at the newest checkpoint that the kill left whole, and fails by nothing but
the kill; all ranks end after it; after SIGTERM nothing is lost and every rank ends with 143; at the end each step
stands in the metrics once, and its loss is that of the uninterrupted run within ``BOUND`` (other numbers of ranks sum
in another order).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, write_result
from benchmarks.made_up import prepare_text
from lingua.checkpoint import list_checkpoints
from lingua.errors import UserError
from lingua.metrics import read_metrics
from lingua.storage import COMPLETE

BOUND = 1e-9  # largest relative difference of the loss of any step
KINDS = {  # name: signal, whether all ranks get it, when
    "SIGKILL at a step, all ranks": (signal.SIGKILL, True, "step"),
    "SIGKILL at a step, one rank": (signal.SIGKILL, False, "step"),
    "SIGKILL in a save, all ranks": (signal.SIGKILL, True, "save"),
    "SIGKILL in a save, one rank": (signal.SIGKILL, False, "save"),
    "SIGKILL at the start, all ranks": (signal.SIGKILL, True, "start"),
    "SIGTERM at a step, all ranks": (signal.SIGTERM, True, "step"),
    "SIGTERM at a step, one rank": (signal.SIGTERM, False, "step"),
}
PATIENCE = 180.0  # seconds for anything that is waited for
ROWS, SEQ_LEN = 6, 32  # of a step; six rows divide by 1, 2 and 3 ranks


@dataclass
class KillsArgs:
    """Kill a run many times, resume it on other numbers of ranks, and compare it with one left in peace."""

    out: str = "???"  # JSON file to write
    folder: str = "runs/kills"  # run folders, made anew
    app: str = "crossbert"  # bert or crossbert
    kills: int = 200  # before the run may come to its end
    steps: int = 2000  # of the run
    save_every: int = 5  # steps between checkpoints
    ranks: list[int] = field(default_factory=lambda: [1, 2, 3])  # numbers of ranks to draw from; the first start has 2
    seed: int = 0  # of the kills

    def __post_init__(self) -> None:
        if self.app not in ("bert", "crossbert"):
            raise UserError(f"app={self.app}: expected bert or crossbert")
        if min(self.kills, self.save_every) < 1 or self.steps < 2 * max(self.kills, self.save_every):
            raise UserError(
                f"kills={self.kills}, save_every={self.save_every}, steps={self.steps}: expected at least one kill, "
                "and two steps for each kill and between saves"
            )
        if not self.ranks or min(self.ranks) < 1:
            raise UserError(f"ranks={self.ranks}: expected numbers of at least 1")


class Ranks:
    """All processes of one start of a run."""

    def __init__(self, app: str, words: list[str], size: int, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"apps.{app}.model", "lingua.run"])
        variables = {"OMP_NUM_THREADS": "1"}
        if size > 1:
            variables |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            process = context.Process(target=_train, args=(app, words, variables | own, str(log)), daemon=True)
            process.start()
            self.processes.append(process)

    def kill(self, signum: int, ranks: list[int]) -> None:
        """Send a signal; a rank that has ended already gets none."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signum)  # type: ignore[arg-type]

    def alive(self) -> bool:
        """Whether all of them run."""
        return all(process.is_alive() for process in self.processes)

    def wait(self, seconds: float) -> list[int | None]:
        """Exit statuses, negative for signals, once all have ended; None for one that has not in time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in self.processes]
        self.kill(signal.SIGKILL, list(range(len(statuses))))
        return statuses


def _train(app: str, words: list[str], variables: dict[str, str], log: str) -> None:
    """In a process of its own: what ``python -m apps.APP.train WORDS`` does, all it prints into ``log``."""
    import runpy

    import torch

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = ["", *words]
    runpy.run_module(f"apps.{app}.train", run_name="__main__", alter_sys=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def words_of(args: KillsArgs, data: Path, run: Path) -> list[str]:
    """The command line of the tiny run."""
    views = {"bert": 1, "crossbert": 2}[args.app]
    values = {
        "dump_dir": run,
        "data.root_dir": data,
        "data.tokenizer.name": "bytes",
        "data.seq_len": SEQ_LEN,
        "batch_tokens": ROWS * SEQ_LEN * views,
        "micro_rows": 2,
        "steps": args.steps,
        "dtype": "fp64",
        "model.dim": 16,
        "model.n_layers": 2,
        "model.n_heads": 2,
        "optim.lr": 1e-3,
        "logging.every": 1,
        "logging.tensorboard": "false",
        "checkpoint.dump.every": args.save_every,
        "checkpoint.dump.keep": 3,
        "validation.every": args.steps,
        "distributed.timeout": 10,
    }
    if args.app == "crossbert":
        values["model.predictor.n_layers"] = 1
    return [f"{key}={value}" for key, value in values.items()]


def newest_whole(run: Path) -> int:
    """Step of the newest checkpoint with ``COMPLETE``, 0 if there is none."""
    return max((int(f.name) for f in list_checkpoints(run / "checkpoints") if (f / COMPLETE).is_file()), default=0)


def broken(run: Path) -> tuple[int, int] | None:
    """The newest checkpoint without ``COMPLETE``, if it is newer than those with it: its step, and when it changed.

    One that an earlier kill left stays as it is until the run comes to save this step again.
    """
    with contextlib.suppress(FileNotFoundError):  # retention removed one meanwhile
        folders = [f for f in list_checkpoints(run / "checkpoints") if not (f / COMPLETE).is_file()]
        if folders and int(folders[-1].name) > newest_whole(run):
            return int(folders[-1].name), folders[-1].stat().st_mtime_ns
    return None


def last_step(run: Path) -> int:
    """Last step in the metrics, 0 if there is none."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            found = re.findall(rb'"step": ?(\d+),', file.read())
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0


def last_printed(log: Path) -> int:
    """Last step that a start says it has done, 0 before the first."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        found = re.findall(rb"^step (\d+)/", file.read(), re.MULTILINE)
    return int(found[-1]) if found else 0


def one_life(args: KillsArgs, words: list[str], run: Path, draw: random.Random, number: int) -> dict[str, Any]:
    """Start the run, kill it at a random moment, and say what became of it."""
    kind = draw.choice(list(KINDS))
    signum, everybody, when = KINDS[kind]
    size = 2 if number == 0 else draw.choice(args.ranks)
    shard = draw.choice([1, -1])
    victims = list(range(size)) if everybody else [draw.randrange(size)]
    whole, left = newest_whole(run), broken(run)
    # What is left is shared out evenly among the kills to come; a life lasts from one step to twice its share.
    share = (args.steps - whole) / (args.kills - number + 1)
    goal = min(whole + draw.randint(1, max(1, round(2 * share))), args.steps - args.save_every - 2)
    log = run.parent / f"life_{number:03d}.txt"
    log.touch()
    started = time.monotonic()
    ranks = Ranks(args.app, [*words, f"distributed.dp_shard={shard}"], size, log)

    def await_moment() -> bool:
        if when == "start":
            time.sleep(draw.uniform(0.0, 2.0))
            return True
        if not _until(ranks, lambda: last_printed(log) >= goal):
            return False
        if when == "save" and not _until(ranks, lambda: broken(run) not in (None, left)):
            return False
        time.sleep(draw.uniform(0.0, 0.03))  # anywhere in a step, or in a save
        return True

    came = await_moment()
    ranks.kill(signum, victims)
    killed = time.monotonic()
    statuses = ranks.wait(PATIENCE)
    text = log.read_text()
    resumed = re.findall(r"resumed \S+ at step (\d+)", text)
    last = last_step(run) if last_printed(log) else whole  # the metrics may still be those of the start before
    return {
        "kind": kind,
        "ranks": size,
        "shared_parameters": shard == -1 and size > 1,
        "killed_ranks": victims,
        "newest_whole_checkpoint": whole,
        "resumed_at": int(resumed[-1]) if resumed else None,
        "last_step": last,
        "steps_lost": last - newest_whole(run),
        "left_a_broken_checkpoint": broken(run) not in (None, left),
        "statuses": statuses,
        "seconds_to_kill": round(killed - started, 1),
        "seconds_to_end": round(time.monotonic() - killed, 1),
        "failure_before_the_kill": None if came else text[-2000:],
    }


def _until(ranks: Ranks, holds: Callable[[], bool]) -> bool:
    """Wait until it holds. False if a rank ends before, or nothing happens for long."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if not ranks.alive() or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def losses(run: Path) -> dict[int, list[float]]:
    """Every training loss in the metrics, by step."""
    found: dict[int, list[float]] = {}
    for record in read_metrics(run / "metrics.jsonl"):
        if "loss" in record:
            found.setdefault(record["step"], []).append(record["loss"])
    return found


def verdict(args: KillsArgs, lives: list[dict[str, Any]], killed: Path, peaceful: Path) -> dict[str, Any]:
    """The bars, and what the kills cost."""
    expected, found = losses(peaceful), losses(killed)
    once = sorted(found) == sorted(expected) == list(range(1, args.steps + 1)) and all(
        len(values) == 1 for values in (*found.values(), *expected.values())
    )
    differences = [abs(found[step][0] / expected[step][0] - 1) for step in found if step in expected]
    elsewhere = [
        life
        for life in lives
        if life["resumed_at"] != (life["newest_whole_checkpoint"] or None)
        and not (life["resumed_at"] is None and life["kind"].startswith("SIGKILL at the start"))
    ]
    terms = [life for life in lives if life["kind"].startswith("SIGTERM")]
    bars = {
        "starts that failed before the kill": (sum(life["failure_before_the_kill"] is not None for life in lives), 0),
        "ranks that had to be ended": (sum(life["statuses"].count(None) for life in lives), 0),
        "starts elsewhere than at the newest whole checkpoint": (len(elsewhere), 0),
        "SIGTERMs after which a rank did not end with 143": (sum(set(x["statuses"]) != {143} for x in terms), 0),
        "steps lost after SIGTERM": (sum(life["steps_lost"] for life in terms), 0),
        "steps missing or twice in the metrics": (0 if once else 1, 0),
        "largest relative difference of a loss": (max(differences), BOUND),
        "relative difference of the last loss": (differences[-1], BOUND),
    }
    by_kind = {kind: [life for life in lives if life["kind"] == kind] for kind in KINDS}
    return {
        "bars": [{"name": name, "value": v, "bound": bound, "met": v <= bound} for name, (v, bound) in bars.items()],
        "kinds": {
            kind: {
                "kills": len(some),
                "steps_lost_median": statistics.median(life["steps_lost"] for life in some),
                "steps_lost_most": max(life["steps_lost"] for life in some),
                "left_a_broken_checkpoint": sum(life["left_a_broken_checkpoint"] for life in some),
                "seconds_until_all_ended_most": max(life["seconds_to_end"] for life in some),
            }
            for kind, some in by_kind.items()
            if some
        },
        "starts_on_ranks": {size: sum(life["ranks"] == size for life in lives) for size in args.ranks},
        "last_loss": {"killed": found[args.steps][0], "in peace": expected[args.steps][0]},
    }


def main(args: KillsArgs) -> None:
    """Train in peace, train under fire, compare, write the result."""
    folder = Path(args.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = prepare_text(folder, "bytes")
    begun = time.monotonic()
    peaceful, killed = folder / "in_peace", folder / "killed"
    _to_the_end(args, [*words_of(args, data, peaceful), f"checkpoint.dump.every={args.steps}"], folder / "in_peace.txt")
    words, draw, lives = words_of(args, data, killed), random.Random(args.seed), []
    for number in range(args.kills):
        lives.append(one_life(args, words, killed, draw, number))
        print(json.dumps(lives[-1]), flush=True)
        if newest_whole(killed) == args.steps:
            raise UserError(f"the run came to its end after {number + 1} starts; see {folder}/life_{number:03d}.txt")
    _to_the_end(args, words, folder / "last.txt")
    result = verdict(args, lives, killed, peaceful)
    settings = {"command": ["python", "-m", f"apps.{args.app}.train", *words[2:]], "seed": args.seed}
    minutes = round((time.monotonic() - begun) / 60, 1)
    write_result(args.out, {**environment("torch"), **settings, "minutes": minutes, **result, "lives": lives})


def _to_the_end(args: KillsArgs, words: list[str], log: Path) -> None:
    log.touch()
    if set(Ranks(args.app, words, 2, log).wait(PATIENCE + args.steps)) != {0}:
        raise UserError(f"a run that nobody killed failed:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    command(KillsArgs, main, "python -m experiments.kills")
