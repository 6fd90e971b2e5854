"""What several tests need: made-up text with structure, prepared shards, and training commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lingua.hashing import counter_hash
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shuffle import ShuffleArgs, shuffle

ROOT = Path(__file__).parent.parent
SUBJECTS = [
    "the cat",
    "a small dog",
    "my neighbour",
    "the old captain",
    "our teacher",
    "every bird",
    "the quiet child",
    "one sailor",
]
VERBS = ["sees", "likes", "follows", "remembers", "paints", "carries", "hears", "forgets"]
OBJECTS = [
    "the sea",
    "a red house",
    "two letters",
    "the long road",
    "an open window",
    "some bread",
    "the first snow",
    "her song",
]
ENDINGS = ["in the morning", "without a word", "again and again", "near the harbour", "at night", "when it rains"]


def made_up_documents(n: int, seed: int = 0) -> list[str]:
    """``n`` texts of 1 to 12 sentences, a function of ``seed``."""

    def pick(options: list[str], *keys: int) -> str:
        return options[counter_hash(seed, *keys) % len(options)]

    documents = []
    for i in range(n):
        sentences = []
        for j in range(1 + counter_hash(seed, i, 99) % 12):
            words = [pick(part, i, j, k) for k, part in enumerate((SUBJECTS, VERBS, OBJECTS, ENDINGS))]
            sentences.append(" ".join(words).capitalize() + ".")
        documents.append(" ".join(sentences))
    return documents


def prepare(folder: Path, documents: list[str], name: str = "made_up", **settings: object) -> Path:
    """Shards of ``documents`` under ``folder/data``; returns that folder."""
    raw = folder / f"{name}.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    shuffle(name, ReaderArgs(path=str(raw)), ShuffleArgs(**{"valid_fraction": 0.1, **settings}), folder / "data")
    return folder / "data"


TINY = {
    "steps": 30,
    "batch_tokens": 256,
    "micro_rows": 4,
    "dtype": "fp32",
    "data.seq_len": 32,
    "optim.lr": 3e-3,
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "logging.every": 1,
    "logging.tensorboard": "false",
    "validation.every": 15,
    "validation.rows": 8,
}


def tiny_words(app: str, data: Path, dump_dir: Path, **changes: object) -> list[str]:
    """Command-line words of a tiny run of ``app`` (keys of ``changes`` write dots as two underscores)."""
    values = {**TINY, "data.root_dir": data, "dump_dir": dump_dir, "data.validation.made_up": data / "made_up/valid"}
    if app == "crossbert":
        values |= {"model.predictor.n_layers": 1, "batch_tokens": 512}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def run_app(app: str, words: list[str]) -> None:
    """Train in this process."""
    import importlib

    from lingua.args import parse

    module = importlib.import_module(f"apps.{app}.train")
    args_class = next(c for name, c in vars(module).items() if name.endswith("TrainArgs"))
    module.train(parse(args_class, words))


def command(app: str, words: list[str]) -> list[str]:
    """The same as a command line."""
    return [sys.executable, "-m", f"apps.{app}.train", *words]


def environment() -> dict[str, str]:
    """For subprocesses: one thread, the repository importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run_command(words: list[str], **options: object) -> subprocess.CompletedProcess:
    """Run to the end and capture what it prints."""
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, **options)


def run_offline(code: str, home: Path) -> subprocess.CompletedProcess:
    """Run Python code with the hub's libraries in their offline mode and an empty cache."""
    variables = environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)


def deterministic(records: list[dict]) -> list[dict]:
    """Metric records without what depends on the clock."""
    clock = {"tokens_per_second", "data_tokens_per_second", "memory_gb", "tflops", "paper_tflops"}
    clock |= {"data_wait_share", "checkpoint_wait_share", "validation_share"}
    return [{key: value for key, value in record.items() if key not in clock} for record in records]
