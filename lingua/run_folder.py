"""What a run folder says of its run, whatever state it is in."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lingua.args import read_yaml
from lingua.errors import UserError
from lingua.evaluation.results import RESULTS
from lingua.metrics import read_metrics
from lingua.source import TokenSource
from lingua.tokenizer import TokenizerArgs, build_tokenizer


@dataclass
class Summary:
    """What is known about one run, or about the untrained encoder."""

    name: str
    state: str  # for the table: done, or how far it came
    records: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    results: dict[str, Any] | None = None  # of the newest evaluation
    notes: list[str] = field(default_factory=list)  # what a reader must know

    def last(self, key: str) -> float | None:
        """The newest value of a metric; NaN if it was not finite, which records write as null."""
        values = [record[key] for record in self.records if key in record]
        if not values:
            return None
        return math.nan if values[-1] is None else values[-1]

    def median(self, key: str) -> float | None:
        """The median of a metric over all records in which it is finite."""
        values = [value for record in self.records if (value := record.get(key)) is not None]
        return statistics.median(values) if values else None

    def flops_per_step(self) -> float | None:
        """Training FLOPs of a step, the same for every step of a run."""
        record = next((record for record in self.records if record.get("flops")), None)
        return record["flops"] / record["step"] if record else None


def summarize(folder: Path, name: str) -> Summary:
    """Read a run folder, whatever state it is in."""
    if not folder.is_dir():
        return Summary(name, "missing", notes=[f"{name}: no folder {folder}"])
    run = Summary(name, "", read_metrics(folder / "metrics.jsonl"))
    step, total = run.last("step"), total_steps(folder / "config.yaml", run.flops_per_step())
    if step is None:
        run.state = "no step logged"
        run.notes.append(f"{name}: no step logged; see {folder}/train.log")
    elif total is not None and step >= total:
        run.state = "done"
    else:
        run.state = f"unfinished: step {step:,} of {'?' if total is None else f'{total:,}'}"
        run.notes.append(f"{name}: {run.state}; its figures are those of that step. See {folder}/train.log")
    if run.last("skipped_steps"):
        run.notes.append(f"{name}: {run.last('skipped_steps'):,} steps were not finite and changed nothing")
    found = [read_results(path) for path in sorted((folder / "eval").glob(f"*/{RESULTS}"))]
    trained = [results for results in found if not results["random_init"]]
    if not trained:
        run.notes.append(f"{name}: not probed yet; python -m apps.APP.eval ckpt={folder} tasks...")
        return run
    run.results = max(trained, key=lambda results: results["step"])
    if run.results["step"] < (step or 0):
        run.notes.append(f"{name}: probed at step {run.results['step']:,}, its newest step is {step:,}")
    return run


def read_results(path: Path) -> dict[str, Any]:
    """An evaluation's ``results.json``. Raises UserError if it is none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        results["step"], results["random_init"], results["tasks"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of an evaluation ({error}): run it again") from None
    return results


def total_steps(config_path: Path, flops_per_step: float | None) -> int | None:
    """Steps of the whole run, if its config says so and, for a length in FLOPs, a step is logged."""
    if not config_path.is_file():
        return None
    config = read_yaml(config_path)
    for key in ("steps", "tokens", "flops", "batch_tokens"):
        value = config.get(key)
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise UserError(f"{config_path}: {key}={value}: expected a number above 0, or none")
    if config.get("steps") is not None:
        return config["steps"]
    if config.get("tokens") is not None and config.get("batch_tokens") is not None:
        return max(1, round(config["tokens"] / config["batch_tokens"]))
    if config.get("flops") is not None and flops_per_step:
        return max(1, round(config["flops"] / flops_per_step))
    return None


def unigram_losses(config: dict[str, Any], most_rows: int = 20_000) -> dict[str, float]:
    """For each validation set of a run's config: the least loss that a model without context can reach there.

    That is the entropy in nats of the ordinary tokens of the whole set (of its first ``most_rows`` rows): of the few
    rows that validation reads it would come out too low, since rare tokens are missing there.

    Raises:
        UserError: the shards or the tokenizer are not where the config says.
    """
    data = config["data"]
    tokenizer = build_tokenizer(TokenizerArgs(**data["tokenizer"]))
    found = {}
    for name, folder in (data.get("validation") or {}).items():
        source = TokenSource(folder, data["seq_len"], 0, tokenizer)
        tokens = source.rows(np.arange(min(most_rows, source.tokens // source.seq_len))).flatten()
        counts = np.bincount(tokens[~np.isin(tokens, tokenizer.special_ids)])
        shares = counts[counts > 0] / counts.sum()
        found[name] = float(-(shares * np.log(shares)).sum())
    return found
