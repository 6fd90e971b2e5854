"""The run of a contrastive training: the backbone, rows as batches, and ranking of held-out queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.embed.batches import Batch, Batches, States, Texts, held_out, parts_of, share, texts_of
from apps.embed.data import PairArgs
from apps.embed.model import EmbedModel, load_backbone, save_hf_files
from apps.embed.store import Store, build, store_folder
from lingua.contrastive import ContrastiveArgs, ContrastiveSum, check_matryoshka, gather_rows, info_nce
from lingua.distributed import full
from lingua.embedder import BACKBONE
from lingua.errors import UserError
from lingua.evaluation.feature_files import FeatureFiles
from lingua.evaluation.retrieval import retrieval_scores
from lingua.features import TextEncoder
from lingua.frozen import Sequences
from lingua.logger import Interval
from lingua.pooler import PoolerArgs
from lingua.run import Run, log
from lingua.run_args import RunArgs
from lingua.tokenizer import save_copy


@dataclass
class RankingArgs:
    """Validation during training: each held-out query ranks all passages of the held-out rows."""

    every: int = 500  # steps between validations; the last step always has one

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"validation.every={self.every}: expected at least 1")


@dataclass
class EmbedTrainArgs(RunArgs):
    """Contrastive training of an embedding model."""

    epochs: int | None = None  # passes over the rows; or steps
    backbone: str = "???"  # run or checkpoint folder of a BERT or CrossBERT, or hf:NAME
    freeze: bool = True  # only the pooler learns; false: the encoder too
    # With freeze=true: run the encoder once over all texts and keep its states on disk: 4 bytes * width a token
    cache_states: bool = False
    batch_queries: int = 512  # queries in an optimizer step, over all ranks
    micro_rows: int = 256  # texts in one forward and backward pass; memory decides, the gradient stays the same
    pooler: PoolerArgs = field(default_factory=PoolerArgs)
    loss: ContrastiveArgs = field(default_factory=ContrastiveArgs)
    data: PairArgs = field(default_factory=PairArgs)
    validation: RankingArgs = field(default_factory=RankingArgs)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_queries < 1:
            raise UserError(f"batch_queries={self.batch_queries}: expected at least 1")
        if self.compile:
            raise UserError("compile=true: batches of texts differ in length, and blocks would be compiled for each")
        if self.stats.every and self.backbone.startswith("hf:"):
            raise UserError("stats.every: statistics of activations are of our own encoders; leave it out")
        longest = max(self.data.max_length.query, self.data.max_length.passage)
        if self.pooler.position >= longest:
            raise UserError(
                f"pooler.position={self.pooler.position}: expected a place in the texts, which have at most {longest} "
                "tokens (data.max_length)"
            )
        if self.cache_states and not self.freeze:
            raise UserError("cache_states=true needs freeze=true: an encoder that learns gives other states each step")

    def lengths(self) -> dict[str, float | None]:
        return {**super().lengths(), "epochs": self.epochs}


class Embedding(Run):
    """One contrastive training; see ``apps/embed/train.py`` for its loop."""

    args: EmbedTrainArgs

    def open_data(self, own: Path | None, state: dict[str, Any]) -> None:
        args = self.args
        longest = max(args.data.max_length.query, args.data.max_length.passage)
        self.backbone = load_backbone(args.backbone, longest, self.folder, own)
        check_matryoshka(args.loss, self.backbone.encoder.dim)
        cache = Path(args.data.cache_dir) if args.data.cache_dir is not None else self.folder / "data"
        self.stores = {name: self._open_store(cache, path) for name, path in self._paths().items()}
        rows, store = self.stores["train"].rows, self.stores["train"]
        held = held_out(rows, args.data.hold_out) if args.data.hold_out else np.zeros(len(rows), dtype=bool)
        self.ranked = {name: self.stores[name].rows for name in args.data.validation}
        if args.data.hold_out:
            self.stores["held_out"], self.ranked["held_out"] = store, rows[held]
        self._batches = Batches(
            store, np.flatnonzero(~held), args.batch_queries, args.data.negatives, args.data.no_duplicates, args.seed
        )
        if not args.loss.in_batch and not self._batches.negatives:
            raise UserError(
                f"loss.in_batch=false with rows without negatives ({args.data.path}): a query would have nothing to "
                "be told apart from"
            )
        self._states: dict[int, States] = {}
        self._seen = 0  # tokens since the last record
        if args.cache_states:
            self._encode_once(cache)
        steps = self._batches.epoch_steps(0)
        log.info(
            "%d of %d rows in the %d steps of the first epoch; each query is compared with %d passages",
            steps * args.batch_queries, len(rows) - held.sum(), steps, self._passages_compared(),
        )  # fmt: skip

    def _paths(self) -> dict[str, str]:
        return {"train": self.args.data.path, **self.args.data.validation}

    def _open_store(self, cache: Path, path: str) -> Store:
        args, encoder = self.args.data, self.backbone.encoder
        folder = self.world.from_first(store_folder(cache, path, args, encoder) if self.world.is_first else None)
        self.lead(lambda: build(folder, path, args, encoder), f"reading {path}")
        return Store(folder)

    def _passages_compared(self) -> int:
        """At most, its own passage among them."""
        loss, negatives = self.args.loss, self._batches.negatives
        queries = self.args.batch_queries if loss.cross_rank else -(-self.args.batch_queries // self.world.size)
        others = (queries - 1) * (1 + negatives) if loss.in_batch else 0
        return 1 + others + (negatives if loss.own_negatives else 0)

    def _encode_once(self, cache: Path) -> None:
        """The states of every token of every text, by the frozen encoder, on disk."""
        encoder = self.backbone.encoder
        encoder.model.to(self.world.device)
        encoder.device, encoder.dtype = str(self.world.device), self.dtype
        files = FeatureFiles(cache / "states", self.world)
        for store in {id(store): store for store in self.stores.values()}.values():
            ids = [store.tokens(number) for number in range(len(store))]
            types = [np.zeros_like(row) for row in ids] if self._types else None
            sequences = Sequences(ids, types).every_token()
            (states,) = files.get(encoder, sequences, [encoder.n_layers], title="states of the frozen encoder")
            self._states[id(store)] = States(states, [len(row) for row in ids])
        encoder.model.to("cpu")

    @property
    def _types(self) -> bool:
        return getattr(self.backbone.encoder, "_has_types", False)

    def build_model(self) -> EmbedModel:
        """The model to train, on the CPU."""
        args = self.args
        temperature = args.loss.temperature if args.loss.learn_temperature else None
        model = EmbedModel(self.backbone, args.pooler, args.freeze, temperature, args.seed, self._own is not None)
        if args.cache_states and model.pooler.mixes_layers:
            raise UserError("cache_states=true: this pooler reads all layers of the encoder, which are not kept")
        return model

    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.args.steps is not None:
            return self.args.steps
        return sum(self._batches.epoch_steps(epoch) for epoch in range(self.args.epochs or 0))

    def write_more(self) -> None:
        if isinstance(self.backbone.encoder, TextEncoder):
            save_copy(self.backbone.encoder.tokenizer, self.folder / "tokenizer")
        save_hf_files(self.backbone, self.folder / BACKBONE)

    def fingerprints(self) -> dict[str, str]:
        return {"train": self.stores["train"].manifest["sha256"]}

    def data_state(self, step: int) -> dict[str, Any]:
        return {"backbone": self.backbone.about, "tokenizer": self.backbone.tokenizer_identity()}

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """This rank's share of each step."""
        for step in range(first, last + 1):
            yield self.batch(step).to(self.world.device)

    def batch(self, step: int) -> Batch:
        """This rank's share of a step, on the CPU."""
        world, store = self.world, self.stores["train"]
        cross = self.args.loss.cross_rank
        numbers, n_queries, candidates = share(self._batches.numbers(step), world.rank, world.size, cross)
        lengths = store.lengths[numbers]
        places = parts_of(lengths, self.args.micro_rows, world.size == 1)
        parts = [[self._texts(store, numbers[place]) for place in part] for part in places]
        self._seen += int(lengths.sum())
        order_T = np.concatenate([place for part in places for place in part])
        return Batch(parts, torch.from_numpy(np.argsort(order_T)), n_queries, candidates)

    def _texts(self, store: Store, numbers: np.ndarray) -> Texts:
        return texts_of(store, numbers, self.backbone.encoder.pad_id, self._types, self._states.get(id(store)))

    def loss(self, batch: Batch, vectors_TD: Tensor, temperature: Tensor) -> ContrastiveSum:
        """The loss of this rank's queries, from the vectors of its texts, part after part."""
        x_TD = vectors_TD[batch.place_T]
        queries_ND, passages_MD = x_TD[: batch.n_queries], x_TD[batch.n_queries :]
        if self.args.loss.cross_rank:
            passages_MD = gather_rows(passages_MD)
        if not self.args.loss.learn_temperature:
            temperature = torch.as_tensor(self.args.loss.temperature)
        return info_nce(queries_ND, passages_MD, batch.candidates, self.args.loss, temperature)

    def figures(self, step: int, interval: Interval) -> dict[str, float]:
        steps, (epoch, place) = step - interval.first_step, self._batches.position(step)
        tokens, self._seen = self._seen, 0
        found = {
            "queries": step * self.args.batch_queries,
            "epoch": epoch + (place + 1) / self._batches.epoch_steps(epoch),
            "queries_per_second": steps * self.args.batch_queries / interval.training,
            "tokens_per_second": sum(self.world.gather(tokens)) / interval.training,
        }
        if self.model.log_temperature is not None:
            found["temperature"] = float(full(self.model.log_temperature.detach()).exp())
        return found

    @property
    def objective(self) -> str | None:
        """What a checkpoint says that tells how its encoder attends."""
        return "clm" if self.backbone.causal else None

    def validate(self, step: int) -> None:
        """Ranking of held-out queries, at the validation cadence and at the end."""
        self.validate_by(step, self._rank_all)

    @torch.no_grad()
    def _rank_all(self) -> dict[str, float]:
        results = {}
        for name, rows in self.ranked.items():
            queries, query_of = np.unique(rows[:, 0], return_inverse=True)
            passages = np.unique(rows[:, 1:][rows[:, 1:] >= 0])
            right = np.searchsorted(passages, rows[:, 1])
            relevant = [np.unique(right[query_of == number]) for number in range(len(queries))]
            vectors = [self._vectors(self.stores[name], numbers) for numbers in (queries, passages)]
            results |= {f"valid/{name}/{key}": value for key, value in retrieval_scores(*vectors, relevant).items()}
        return results

    def _vectors(self, store: Store, numbers: np.ndarray) -> Tensor:
        """Vectors of length 1 of texts, which the ranks share out, on every rank."""
        world = self.world
        parts = parts_of(store.lengths[numbers], self.args.micro_rows, world.size == 1)
        places = [place for part in parts for place in part]
        # A sharded model is gathered by all ranks together, so all take the same number of parts.
        most = -(-len(places) // world.size)
        own = places[world.rank :: world.size]
        found = []
        for place in [*own, *places[: most - len(own)]]:
            x_BD, _ = self.model(*self._texts(store, numbers[place]).to(world.device).arguments())
            found.append(F.normalize(x_BD.float(), dim=1).cpu().numpy())
        vectors_ND = np.empty((len(numbers), found[0].shape[1]), dtype=np.float32)
        for rank, parts in enumerate(world.gather(found)):
            for place, part in zip(places[rank :: world.size], parts, strict=False):
                vectors_ND[place] = part
        return torch.from_numpy(vectors_ND).to(world.device)
