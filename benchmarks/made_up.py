"""Made-up token shards and made-up text, for benchmarks and experiments that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lingua.data import TokenStream
from lingua.hashing import counter_hash
from lingua.manifest import FORMAT_VERSION, Manifest
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shards import write_shard
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.source import PERIOD
from lingua.tokenizer import Tokenizer, TokenizerArgs

SOURCES = {"large": 0.75, "small": 0.25}  # share of the tokens; a source is drawn as often as its size says
SHARDS = 4  # of each source
DOCUMENT_TOKENS = 700  # on average
TOKENS_BYTES = 2  # ids of RoBERTa's vocabulary fit in uint16
WORDS = ["river", "stone", "light", "winter", "garden", "letter", "ship", "song", "under", "over", "slowly", "and"]


def write_shards(root: Path, n_tokens: int, tokenizer: Tokenizer) -> None:
    """Sources of random ids in documents of random lengths, as preparation writes them: ``root/SOURCE/train``."""
    random = np.random.default_rng(0)
    for name, share in SOURCES.items():
        lengths = random.integers(2, 2 * DOCUMENT_TOKENS, max(1, round(n_tokens * share / DOCUMENT_TOKENS)))
        folder = root / name / "train"
        folder.mkdir(parents=True)
        shards = []
        for i, part in enumerate(np.array_split(lengths, SHARDS)):
            ids = random.integers(0, tokenizer.vocab_size, int(part.sum()), dtype=f"uint{8 * TOKENS_BYTES}")
            shards.append(write_shard(folder, i, ids, part))
        Manifest(
            version=FORMAT_VERSION,
            source=name,
            split="train",
            tokenizer=tokenizer.identity(),
            dtype=f"<u{TOKENS_BYTES}",
            seed=0,
            settings={},
            inputs=[],
            tokens=int(lengths.sum()),
            documents=len(lengths),
            bytes_of_text=0,
            empty_documents=0,
            skipped_count=0,
            skipped=[],
            shards=shards,
        ).save(folder)


def prepare_text(folder: Path, tokenizer: str, n_documents: int = 2000) -> Path:
    """Prepare documents of 5 to 64 random words as any text is prepared; returns the ``data.root_dir``."""
    texts = [" ".join(WORDS[counter_hash(i, j) % len(WORDS)] for j in range(5 + i % 60)) for i in range(n_documents)]
    raw = folder / "text.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shuffle("text", ReaderArgs(path=str(raw)), ShuffleArgs(tokenizer=TokenizerArgs(name=tokenizer)), folder / "data")
    return folder / "data"


def epoch_rows(stream: TokenStream, epoch: int) -> tuple[int, int]:
    """The first row at which every source is in epoch ``epoch``, and how many rows an epoch of all has."""
    n_rows = sum(source.tokens for source in stream.phases[0].mix.sources.values()) // stream.args.seq_len
    first = epoch * n_rows
    while any(stream.progress(first)[f"epoch/{name}"] < epoch for name in SOURCES):
        first += PERIOD  # weights are rounded, so one source is a little behind the other
    return first, n_rows
