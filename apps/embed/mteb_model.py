"""An embedder as MTEB's tasks call it, and MTEB's tasks as an evaluation orders and finds them."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.similarity_functions import cos_sim, pairwise_cos_sim
from mteb.types import PromptType

from apps.embed.models import Model
from lingua.embedder import TextEmbedder
from lingua.errors import UserError

# A task's texts are queries, passages, or (where it tells no sides apart) neither: those get no prompt.
PROMPTS = {PromptType.query: "query", PromptType.document: "passage", None: None}


class MtebModel:
    """``mteb``'s encoder protocol on an embedding model. Similarity is the cosine.

    Vectors have length 1, but for those of a model of sentence-transformers, which are as that model gives them: its
    published scores are of these, and a classifier or a clustering tells the difference.

    A text without any token (MTEB's collections have some) gets the zero vector, whose cosine with everything is 0.
    Results are kept under ``mteb_model_meta``: the name and, as the revision, the digest of everything that decides a
    vector, so that no other checkpoint ever takes them for its own.

    Attributes:
        empty: number of texts without a token so far.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.empty = model, 0
        about = {
            "name": model.name,
            "revision": model.identity(),
            "embed_dim": model.dim,
            "max_tokens": model.embedder.max_length,
            "similarity_fn_name": ScoringFunction.COSINE,
            "framework": ["PyTorch"],
        }
        self.mteb_model_meta = ModelMeta.create_empty(about)

    def encode(self, inputs: Any, *, prompt_type: PromptType | None = None, **unused: Any) -> np.ndarray:
        """Vectors [n, D], float32, of a loader of batches whose ``text`` is a list of strings."""
        texts = [text for batch in inputs for text in batch["text"]]
        normalize = isinstance(self.model.embedder, TextEmbedder)
        vectors_ND, empty = self.model.encode_or_zeros(texts, PROMPTS[prompt_type], normalize)
        self.empty += len(empty)
        return vectors_ND

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines of every one with every other, [N, M]."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines of each with its counterpart, [N]."""
        return pairwise_cos_sim(embeddings1, embeddings2)


def benchmark_tasks(benchmark: str) -> list[Any]:
    """The tasks of a benchmark by name. Raises UserError if there is none, or one wants more than text."""
    try:
        tasks = copy.deepcopy(list(mteb.get_benchmark(benchmark).tasks))  # mteb hands out the same ones each time
    except KeyError as error:
        reason = " ".join(str(error.args[0]).split())[:300]
        raise UserError(f"benchmark={benchmark}: mteb {mteb.__version__} has no such benchmark: {reason}") from None
    for task in tasks:
        if set(task.metadata.modalities) != {"text"}:
            raise UserError(
                f"benchmark={benchmark}: {task.metadata.name} is about {task.metadata.modalities}, not text"
            )
    return tasks


def chosen_tasks(tasks: list[Any], names: list[str] | None, types: list[str] | None) -> list[Any]:
    """Those asked for, the largest last. Raises UserError at a name or type that the benchmark lacks."""
    known = {"tasks": {task.metadata.name for task in tasks}, "task_types": {task.metadata.type for task in tasks}}
    for field, asked in (("tasks", names), ("task_types", types)):
        for name in asked or ():
            if name not in known[field]:
                raise UserError(f"{field}={name}: the benchmark has {', '.join(sorted(known[field]))}")
    chosen = [
        task
        for task in tasks
        if (not names or task.metadata.name in names) and (not types or task.metadata.type in types)
    ]
    if not chosen:
        raise UserError(f"tasks={names} task_types={types}: no task of the benchmark is both")
    return sorted(chosen, key=lambda task: (task_texts(task), task.metadata.name))


def task_texts(task: Any) -> int:
    """Texts that a task encodes, as mteb's statistics of its data have it; 0 if they do not."""
    if isinstance(task, AbsTaskAggregate):
        return sum(task_texts(part) for part in task.metadata.tasks)
    statistics = task.metadata.descriptive_stats or {}
    return sum(statistics.get(split, {}).get("num_samples") or 0 for split in task.eval_splits)


def use_local_data(task: Any, folder: Path) -> None:
    """Make a task read ``folder/OWNER/NAME``, a copy of its repository on the hub, instead of the hub.

    The copy's digest stands for the repository's commit, so results of other data are never taken for its own.

    Raises:
        UserError: no such folder.
    """
    if isinstance(task, AbsTaskAggregate):
        parts = copy.deepcopy(task.metadata.tasks)
        for part in parts:
            use_local_data(part, folder)
        revisions = " ".join(part.metadata.revision for part in parts)
        revision = f"local-{hashlib.sha256(revisions.encode()).hexdigest()[:16]}"
        source = {**task.metadata.dataset, "revision": revision}
        task.metadata = task.metadata.model_copy(update={"tasks": parts, "dataset": source})
        return
    data = folder / task.metadata.dataset["path"]
    if not data.is_dir():
        raise UserError(f"no data: {data} is not a folder; put a copy of the dataset of that name there")
    revision = f"local-{folder_digest(data)}"
    source = {**task.metadata.dataset, "path": str(data), "revision": revision}
    task.metadata = task.metadata.model_copy(update={"dataset": source})


def folder_digest(folder: Path) -> str:
    """Hash of the names and bytes of all files below a folder, those that git and hub clients hide excepted."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inner.parts):
            with path.open("rb") as file:
                digest.update(f"{inner} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
