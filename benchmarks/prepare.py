"""How fast text becomes token shards on one core, beside tiktoken's own batch encoding of the same text.

python -m benchmarks.prepare out=FILE.json text=data/quickstart/raw/text/*.jsonl
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tiktoken

from benchmarks.common import command, environment, write_result
from lingua.errors import UserError
from lingua.preparation.readers import Document, ReaderArgs, documents
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import RobertaTokenizer


@dataclass
class PrepareRateArgs:
    """Preparation's tokens per second of one core beside tiktoken's own, on the same text."""

    out: str = "???"  # JSON file to write
    text: str = "data/quickstart/raw/text/*.jsonl"  # the text: JSONL or plain
    megabytes: int = 60  # of text, repeated as needed
    rounds: int = 5  # of each, alternating

    def __post_init__(self) -> None:
        if self.megabytes < 1 or self.rounds < 1:
            raise UserError(f"megabytes={self.megabytes} rounds={self.rounds}: expected at least 1 of each")


def prepare_rate(text: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Time the whole preparation (JSONL to finished shards, one worker) and tiktoken's ``encode_ordinary_batch``
    (one thread, texts in memory, same vocabulary) in turns.

    Returns:
        ``prepare`` and ``tiktoken``: tokens per second of each round, counting the tokens that tiktoken gives;
        ``ratio``: median of the rounds' ratios, ``prepare`` over ``tiktoken``.
    """
    texts = [d.text for d in documents(ReaderArgs(path=text)) if isinstance(d, Document) and d.text.strip()]
    size = sum(len(t.encode("utf-8", "surrogatepass")) for t in texts)
    if not size:
        raise UserError(f"{text}: no text to measure with")
    texts *= max(1, round(megabytes * 1e6 / size))
    tokenizer = RobertaTokenizer()
    encoding = tiktoken.Encoding("plain", pat_str=tokenizer.PATTERN, mergeable_ranks=tokenizer.ranks, special_tokens={})
    rates: dict[str, list[float]] = {"prepare": [], "tiktoken": []}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.jsonl"
        source.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        for i in range(rounds):
            begun = time.perf_counter()
            tokens = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=1)))
            rates["tiktoken"].append(tokens / (time.perf_counter() - begun))
            begun = time.perf_counter()
            # no valid split: few texts, repeated, may all fall on one side
            shuffle("text", ReaderArgs(path=str(source)), ShuffleArgs(valid_fraction=0), Path(folder) / str(i))
            rates["prepare"].append(tokens / (time.perf_counter() - begun))
    ratio = median(a / b for a, b in zip(rates["prepare"], rates["tiktoken"], strict=True))
    return {"unit": "tokens/s on one core", "tokens": tokens, "documents": len(texts), **rates, "ratio": ratio}


def main(args: PrepareRateArgs) -> None:
    """Measure and write the result."""
    result = prepare_rate(args.text, args.megabytes, args.rounds)
    write_result(args.out, {**environment("tiktoken", "numpy"), **result})


if __name__ == "__main__":
    command(PrepareRateArgs, main, "python -m benchmarks.prepare")
