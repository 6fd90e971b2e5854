"""Several ranks of one run as processes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lingua.metrics import read_metrics
from tests.support import ROOT, deterministic, environment


@dataclass
class Ended:
    """How one rank ended."""

    status: int
    text: str  # its standard output and error


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_ranks(n: int, words: list[str], folder: Path, **variables: str) -> list[subprocess.Popen]:
    """Start ``python WORDS`` as ``n`` ranks; each one's output goes to ``folder/rank_R.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(n):
        with (folder / f"rank_{rank}.txt").open("w") as output:
            env = {**environment(), **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables}
            options = {"stdout": output, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, **options))
    return ranks


def finish(ranks: list[subprocess.Popen], folder: Path, seconds: float = 180) -> list[Ended]:
    """Wait for all of them. Fails, and kills them, if one still runs after ``seconds``."""
    deadline = time.monotonic() + seconds
    try:
        for rank in ranks:
            rank.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [Ended(rank.returncode, (folder / f"rank_{i}.txt").read_text()) for i, rank in enumerate(ranks)]


def run_ranks(n: int, words: list[str], folder: Path, seconds: float = 180, **variables: str) -> list[Ended]:
    """Start, and wait for the end."""
    return finish(start_ranks(n, words, folder, **variables), folder, seconds)


def train_ranks(n: int, app: str, words: list[str], folder: Path, fault: str = "none:0:0", **variables: str) -> None:
    """Train to the end on ``n`` ranks; fails unless every rank exits with 0."""
    for rank, ended in enumerate(run_ranks(n, ["-m", "tests.faulty", app, fault, *words], folder, **variables)):
        assert ended.status == 0, f"rank {rank}:\n{ended.text}"


def losses(run: Path) -> list[float]:
    """Training losses of a run, step by step, then its validation losses."""
    records = deterministic(read_metrics(run / "metrics.jsonl"))
    training = [record["loss"] for record in records if "loss" in record]
    return training + [value for record in records for key, value in record.items() if key.startswith("valid/")]
