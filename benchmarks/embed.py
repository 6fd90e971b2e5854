"""Embedding models beside sentence-transformers with the same weights, tokens and texts, on this machine's CPU.

    python -m benchmarks.embed out=FILE.json

Encoding: sentences a second of texts of mixed lengths, tokenizing included. Training: pairs a second of steps of
in-batch InfoNCE on the whole encoder (their ``MultipleNegativesRankingLoss``), with clipping and fused AdamW. Ours has
the tokens ready that ``apps.embed.train`` keeps, theirs are tokenized in the step: so do the two libraries. Both take
turns, and a figure is the median over rounds of the ratio of the two. Vectors and losses are checked to be the same
first.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from apps.embed.batches import Batch, Batches, parts_of, share, texts_of
from apps.embed.data import PairArgs
from apps.embed.model import Backbone, EmbedModel
from apps.embed.store import Store, build
from benchmarks.common import command, environment, write_result
from benchmarks.made_up import WORDS
from lingua.contrastive import ContrastiveArgs, ContrastiveSum, backward_in_parts, info_nce
from lingua.distributed import precision
from lingua.embedder import Embedder, TextEmbedder
from lingua.errors import UserError
from lingua.features import TextEncoder
from lingua.hub.export import STOCK, pooling_config, write_encoder, write_pipeline
from lingua.hub.vocabulary import to_library
from lingua.optim import OptimArgs, Optimizer
from lingua.pooler import Pooler, PoolerArgs
from lingua.tokenizer import RobertaTokenizer
from lingua.transformer import Encoder, TransformerArgs, init_weights

ENCODING_BAR, TRAINING_BAR = 1.2, 1.0  # at least, of sentence-transformers' speed; fixed before any run
MAX_LENGTH = 512
TEMPERATURE, LR = 0.05, 5e-5


@dataclass
class EmbedSpeedArgs:
    """Speed of encoding and of training."""

    out: str = "???"  # JSON file to write
    dim: int = 256  # width of the encoder
    n_layers: int = 6
    n_heads: int = 4
    texts: int = 1000  # to encode in a round
    batch: int = 64  # pairs of a training step
    steps: int = 4  # of a round
    rounds: int = 5  # one of each warms up beside these

    def __post_init__(self) -> None:
        for name in ("texts", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.batch < 2:
            raise UserError(f"batch={self.batch}: expected at least 2")


def made_up_texts(n: int, middle: int, seed: int) -> list[str]:
    """``n`` different texts, half of them with at most ``middle`` words, a few with hundreds."""
    random = np.random.default_rng(seed)
    counts = np.clip(random.lognormal(np.log(middle), 0.9, n), 2, 400).astype(int)
    return [f"{i} " + " ".join(random.choice(WORDS, count)) for i, count in enumerate(counts)]


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round of the two, taken in turns after one round each that does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for run, kept in zip((ours, theirs), seconds, strict=True):
            begun = time.perf_counter()
            run()
            if number:
                kept.append(time.perf_counter() - begun)
    return seconds


def figures(seconds: tuple[list[float], list[float]], count: int, unit: str, bar: float) -> dict[str, Any]:
    """Speeds, their ratio round by round, and whether the bar is met."""
    ratios = [theirs / ours for ours, theirs in zip(*seconds, strict=True)]
    return {
        f"{unit}_per_second": count / median(seconds[0]),
        f"sentence_transformers_{unit}_per_second": count / median(seconds[1]),
        "ratio": median(ratios),
        "ratios": ratios,
        "bar": bar,
        "met": median(ratios) >= bar,
    }


def make_encoder(args: EmbedSpeedArgs, folder: Path) -> TextEncoder:
    """An encoder with random weights, which ``folder`` holds too, as a model of sentence-transformers."""
    tokenizer = RobertaTokenizer()
    shape = TransformerArgs(args.dim, args.n_layers, args.n_heads, vocab_size=tokenizer.vocab_size)
    encoder = Encoder(shape)
    init_weights(encoder, shape, seed=0)
    folder.mkdir()
    write_encoder(folder, "eurobert", encoder, tokenizer, to_library(tokenizer), MAX_LENGTH, masked_lm=False)
    modules = [
        ("1_Pooling", STOCK + "Pooling", pooling_config(args.dim, "mean")),
        ("2_Normalize", STOCK + "Normalize", None),
    ]
    write_pipeline(folder, modules, MAX_LENGTH, {})
    return TextEncoder(encoder, tokenizer, MAX_LENGTH)


def encoding(args: EmbedSpeedArgs, encoder: TextEncoder, library: Any) -> dict[str, Any]:
    """Sentences a second."""
    texts = made_up_texts(args.texts, 30, seed=1)
    ours = TextEmbedder(encoder, Embedder(encoder.model, Pooler(PoolerArgs("mean"))))
    apart = float(np.abs(ours.encode(texts[:50]) - library.encode(texts[:50])).max())
    if not apart < 1e-5:
        raise RuntimeError(f"the vectors differ by {apart}: the two do not compute the same")
    seconds = in_turns(lambda: ours.encode(texts), lambda: library.encode(texts), args.rounds)
    return {"vectors_differ_by": apart, **figures(seconds, len(texts), "sentences", ENCODING_BAR)}


class OurTraining:
    """Steps of ``apps.embed.train`` on a store of made-up pairs."""

    def __init__(self, args: EmbedSpeedArgs, encoder: TextEncoder, pairs: Path, micro_rows: int) -> None:
        backbone = Backbone(encoder, {}, encoder.encoder.args)
        self.model = EmbedModel(backbone, PoolerArgs("mean"), False, None, 0)
        self.model.init_weights()
        given = PairArgs(path=str(pairs))
        given.max_length.query = given.max_length.passage = MAX_LENGTH
        for _ in build(pairs.parent / "store", str(pairs), given, encoder):
            pass
        self.store, self.pad_id, self.micro_rows = Store(pairs.parent / "store"), encoder.pad_id, micro_rows
        rows = np.arange(len(self.store.rows))
        self.batches = Batches(self.store, rows, args.batch, 0, False, 0)
        self.optimizer = Optimizer(self.model, OptimArgs(lr=LR, min_lr=LR / 100), 10**6)
        self.done = 0

    def batch(self, step: int) -> Batch:
        """As the training makes it."""
        numbers, n_queries, candidates = share(self.batches.numbers(step), 0, 1, False)
        places = parts_of(self.store.lengths[numbers], self.micro_rows, True)
        parts = [[texts_of(self.store, numbers[place], self.pad_id, False) for place in part] for part in places]
        order_T = np.concatenate([place for part in places for place in part])
        return Batch(parts, torch.from_numpy(np.argsort(order_T)), n_queries, candidates)

    def loss(self, batch: Batch, vectors_TD: torch.Tensor, temperature: torch.Tensor) -> ContrastiveSum:
        """In-batch InfoNCE."""
        x_TD = vectors_TD[batch.place_T]
        queries_ND, passages_MD = x_TD[: batch.n_queries], x_TD[batch.n_queries :]
        wanted = ContrastiveArgs(own_negatives=False, cross_rank=False)
        return info_nce(queries_ND, passages_MD, batch.candidates, wanted, TEMPERATURE)

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        self.done += 1
        batch = self.batch(self.done)
        context = partial(precision, torch.float32, torch.device("cpu"))
        total = backward_in_parts(self.model, batch.parts, partial(self.loss, batch), context)
        self.optimizer.step(self.done, total)
        return float(total.loss.detach() / total.targets)


class TheirTraining:
    """The same with sentence-transformers' model and loss."""

    def __init__(self, args: EmbedSpeedArgs, library: Any, rows: list[dict[str, str]]) -> None:
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        self.model, self.rows, self.batch = library.train(), rows, args.batch
        self.loss = MultipleNegativesRankingLoss(library, scale=1 / TEMPERATURE)
        self.optimizer = torch.optim.AdamW(library.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
        self.done = 0

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        chosen = [self.rows[(self.done * self.batch + i) % len(self.rows)] for i in range(self.batch)]
        self.done += 1
        sides = [self.model.preprocess([row[side] for row in chosen]) for side in ("query", "positive")]
        loss = self.loss(sides, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def training(args: EmbedSpeedArgs, encoder: TextEncoder, library: Any, folder: Path, micro_rows: int) -> dict[str, Any]:
    """Pairs a second."""
    n = args.batch * args.steps
    sides = (made_up_texts(n, 8, seed=2), made_up_texts(n, 60, seed=3))
    rows = [{"query": query, "positive": positive} for query, positive in zip(*sides, strict=True)]
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = OurTraining(args, encoder, folder / "pairs.jsonl", micro_rows)
    # The order in which ours takes the rows, so that both begin with the same batch and have the same loss.
    order = ours.batches.order(0)
    theirs = TheirTraining(args, library, [rows[i] for i in order])
    losses = [ours.step(), theirs.step()]
    if not abs(losses[0] - losses[1]) < 1e-3:
        raise RuntimeError(f"the losses are {losses}: the two do not compute the same")

    def steps(training: OurTraining | TheirTraining) -> None:
        for _ in range(args.steps):
            training.step()

    seconds = in_turns(partial(steps, ours), partial(steps, theirs), args.rounds)
    return {"first_losses": losses, "micro_rows": micro_rows, **figures(seconds, n, "pairs", TRAINING_BAR)}


def main(args: EmbedSpeedArgs) -> None:
    """Measure and write the result."""
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = make_encoder(args, folder / "model")
        result: dict[str, Any] = {
            **environment("torch", "transformers", "sentence-transformers"),
            "threads": torch.get_num_threads(),
            "dim": args.dim,
            "n_layers": args.n_layers,
            "encoding": encoding(args, encoder, SentenceTransformer(str(folder / "model"), device="cpu")),
        }
        # All in one pass, where memory allows, and in parts by GradCache.
        for key, micro_rows in (("training", 2 * args.batch), ("training_gradcache", args.batch // 2)):
            library = SentenceTransformer(str(folder / "model"), device="cpu")
            encoder = make_encoder(args, folder / f"model_{key}")
            result[key] = training(args, encoder, library, folder / key, micro_rows)
    write_result(args.out, result)


if __name__ == "__main__":
    command(EmbedSpeedArgs, main, "python -m benchmarks.embed")
