"""Hard negatives for pairs: ``python -m apps.embed.mine ckpt=RUN path=pairs.jsonl out=triplets.jsonl``.

Every query is compared with every passage, by any embedding model; its negatives are passages of the highest ranks
that are none of its positives and are not as near to it as the positive is, which is how passages look that answer the
query too. The output is what ``apps.embed.train`` reads: the rows of the input, in order, with a list ``negatives``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.embed.encode import DONE, TIMEOUT, EncodeArgs, claim, encode, finished, part_file
from apps.embed.mine_texts import reader, write_texts
from apps.embed.models import Model, ModelArgs
from apps.embed.texts import input_stamps
from lingua.args import cli, to_dict
from lingua.distributed import World, start
from lingua.errors import UserError
from lingua.evaluation.results import writable_folder, write_whole
from lingua.hashing import permutation

# What decides which passages are taken and not what they are: the vectors are those of any choice.
CHOICE = ("negatives", "rank_from", "rank_to", "max_share", "margin", "pick", "seed", "short_rows")
TOO_NEAR = (
    "the passages of these ranks are as near to the query as the positive is, or nearer than max_share and margin "
    "allow. A model that was not trained to find passages seldom tells them apart: train it on the pairs first and "
    "mine with that, or with any embedding model; a larger rank_to and max_share=1 take more"
)
QUERY_BLOCK = 4096  # queries whose scores against a part of the passages are in memory at a time


@dataclass
class MineArgs(ModelArgs):
    """Find hard negatives for pairs. Several processes (torchrun, srun) share the work."""

    # JSONL, CSV, TSV or parquet with columns query (or anchor) and positive, on any fsspec path; negatives that are
    # there already are passages like any other
    path: str = "???"
    out: str = "???"  # .jsonl file to write
    corpus: str | None = None  # more passages: files as apps.embed.encode reads them; none: those of the pairs only
    column: str = "text"  # of the corpus
    negatives: int = 5  # of each row, at most
    # Ranks to take them from, counted from 0 without the query's positives: the first ones are often answers too
    rank_from: int = 0
    rank_to: int = 100
    # A passage is left out if its cosine is above this share of the positive's, or within this margin of it
    max_share: float = 0.95
    margin: float = 0.0
    pick: str = "top"  # of those that are left: top (the nearest) | lot (by lot, with seed)
    seed: int = 0
    on_error: str = "fail"  # a row without query or positive: fail, with its place | skip (counted)
    short_rows: str = "keep"  # rows with fewer negatives than asked for: keep | drop; both are counted
    part_rows: int = 50_000  # passages, or rows of the input, done at a time; a kill loses no more

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = {
            "negatives": (self.negatives >= 1, "at least 1"),
            "rank_from": (self.rank_from >= 0, "at least 0"),
            "rank_to": (self.rank_to >= self.rank_from + self.negatives, "at least rank_from + negatives"),
            "max_share": (0 < self.max_share <= 1, "above 0 and at most 1"),
            "margin": (self.margin >= 0, "at least 0"),
            "pick": (self.pick in ("top", "lot"), "top or lot"),
            "on_error": (self.on_error in ("fail", "skip"), "fail or skip"),
            "short_rows": (self.short_rows in ("keep", "drop"), "keep or drop"),
            "part_rows": (self.part_rows >= 1, "at least 1"),
            "out": (self.out == "???" or self.out.endswith(".jsonl"), "a file that ends in .jsonl"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)}: expected {expected}")


def mine(args: MineArgs) -> dict[str, Any]:
    """Write the file and return its account, which lies beside it.

    Raises:
        UserError: no such model or input, a bad row, or a file of something else in the way.
    """
    world, out = start(TIMEOUT), Path(args.out)
    work = out.with_name(out.name + ".work")
    inputs = input_stamps(args.path) + (input_stamps(args.corpus) if args.corpus else []) if world.is_first else None
    settings = {key: value for key, value in to_dict(args).items() if key not in ("out", "batch_tokens", "device")}
    model = Model(args, str(world.device))
    made = {"identity": model.identity(), "input": world.from_first(inputs), **settings}
    account = world.from_first(finished(out, made) if world.is_first and out.is_file() else None)
    if account is None:
        if world.is_first:
            claim(work, {name: value for name, value in made.items() if name not in CHOICE})
            if not (work / "texts.json").is_file():
                write_texts(args.path, args.corpus, args.column, args.on_error, work, model)
        world.gather(None)  # the texts are there
        device = model.device
        del model
        for side, prompt in (("queries", "query"), ("passages", "passage")):
            given = {name: getattr(args, name) for name in ModelArgs.__dataclass_fields__}
            where = {"input": str(work / f"{side}.jsonl"), "out": str(work / side), "part_rows": args.part_rows}
            encode(EncodeArgs(**given, **where, prompt=prompt))
        n_parts = _mine_parts(args, work, device, world)
        world.gather(None)  # every part is there
        account = world.from_first(_join(args, made, work, out, n_parts) if world.is_first else None)
    if world.is_first:
        print(
            f"{out}: {account['rows']:,} rows with {account['negatives_found']:,} negatives; {account['short']:,} have "
            f"fewer than {args.negatives}, {account['none']:,} of them none"
            + (f"; {account['dropped']:,} are left out" if args.short_rows == "drop" else "")
            + (f"; {account['bad']:,} rows could not be read" if account["bad"] else "")
        )
        if account["none"] > (account["rows"] + account["dropped"]) / 2:
            print(f"Most rows have none: {TOO_NEAR}")
    return account


def _mine_parts(args: MineArgs, work: Path, device: torch.device, world: World) -> int:
    """Make this process's share of the parts of the output that are missing; returns the number of parts there are."""
    rows_N2 = np.load(work / "rows.npy")
    # Passages that are no negatives of a query: its positives, and its own text.
    pairs_M2 = np.unique(np.concatenate([rows_N2, np.load(work / "same.npy")]), axis=0)
    bounds = np.searchsorted(pairs_M2[:, 0], np.arange(pairs_M2[-1, 0] + 2))
    most = int(np.diff(bounds).max())
    queries_ND = np.concatenate([np.load(path) for path in _vector_files(work / "queries")])
    starts = range(0, len(rows_N2), args.part_rows)
    for index, begin in enumerate(starts):
        path = _mined(work, index, args)
        if index % world.size != world.rank or path.is_file():
            continue
        part_N2 = rows_N2[begin : begin + args.part_rows]
        asked, row_query = np.unique(part_N2[:, 0], return_inverse=True)
        scores_QK, found_QK = nearest(queries_ND[asked], _vector_files(work / "passages"), args.rank_to + most, device)
        positive_N = _cosines(queries_ND, work, part_N2)
        with (work / "passages.jsonl").open("rb") as passages, (work / "queries.jsonl").open("rb") as queries:
            read_query, read_passage = reader(queries, work / "queries.npy"), reader(passages, work / "passages.npy")
            lines = []
            for i, (query, positive) in enumerate(part_N2):
                known = pairs_M2[bounds[query] : bounds[query + 1], 1]
                at = row_query[i]
                chosen = choose(scores_QK[at], found_QK[at], known, float(positive_N[i]), begin + i, args)
                line = {
                    "query": read_query(query),
                    "positive": read_passage(positive),
                    "negatives": [read_passage(number) for number, _ in chosen],
                    "scores": [round(float(score), 6) for score in (positive_N[i], *(score for _, score in chosen))],
                }
                lines.append(json.dumps(line, ensure_ascii=False))
        write_whole(path, ("\n".join(lines) + "\n").encode())
    return len(starts)


def nearest(
    queries_QD: np.ndarray, passage_files: list[Path], k: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and numbers of each query's ``k`` nearest passages (fewer if there are not as many), [Q, k].

    The products are computed on ``device``, a file of passages and a block of queries at a time; the best so far stay
    in main memory. Of equal scores the lower number comes first.
    """
    best: list[tuple[Tensor, Tensor]] = [
        (torch.empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.int64)) for block in _blocks(queries_QD)
    ]
    first = 0
    for path in passage_files:
        passages_PD = torch.from_numpy(np.load(path)).to(device)
        for index, block in enumerate(_blocks(queries_QD)):
            scores_QP = torch.from_numpy(block).to(device) @ passages_PD.T
            scores, places = scores_QP.topk(min(k, len(passages_PD)), dim=1)
            both = [
                torch.cat(pair, dim=1) for pair in zip(best[index], (scores.cpu(), places.cpu() + first), strict=True)
            ]
            order = both[1].argsort(dim=1)  # by number, so that a stable order by score breaks ties by it
            both = [part.gather(1, order) for part in both]
            order = both[0].argsort(dim=1, descending=True, stable=True)[:, :k]
            best[index] = (both[0].gather(1, order), both[1].gather(1, order))
        first += len(passages_PD)
    scores, numbers = (torch.cat(parts).numpy() for parts in zip(*best, strict=True))
    return scores, numbers


def choose(
    scores_K: np.ndarray, numbers_K: np.ndarray, known: np.ndarray, positive: float, row: int, args: MineArgs
) -> list[tuple[int, float]]:
    """Number and score of a row's negatives, nearest first.

    Args:
        scores_K, numbers_K: the nearest passages.
        known: those that are none of its negatives, whatever their rank.
        positive: the positive's score.
        row: number of the row, for the lot.
    """
    others = ~np.isin(numbers_K, known)
    scores, numbers = (array[others][args.rank_from : args.rank_to] for array in (scores_K, numbers_K))
    # A share of a negative cosine would lie above it.
    limit = min(positive - (1 - args.max_share) * abs(positive), positive - args.margin)
    left = np.flatnonzero(scores <= limit)
    if args.pick == "lot":
        left = np.sort(left[permutation(len(left), args.seed, row)[: args.negatives]])
    return [(int(numbers[i]), float(scores[i])) for i in left[: args.negatives]]


def _cosines(queries_ND: np.ndarray, work: Path, rows_N2: np.ndarray) -> np.ndarray:
    """Of each row's query and positive."""
    found, first = np.empty(len(rows_N2), dtype=np.float32), 0
    for path in _vector_files(work / "passages"):
        passages_PD = np.load(path, mmap_mode="r")
        here = np.flatnonzero((rows_N2[:, 1] >= first) & (rows_N2[:, 1] < first + len(passages_PD)))
        found[here] = (queries_ND[rows_N2[here, 0]] * passages_PD[rows_N2[here, 1] - first]).sum(1)
        first += len(passages_PD)
    return found


def _vector_files(folder: Path) -> list[Path]:
    n_parts = json.loads((folder / DONE).read_text())["parts"]
    return [part_file(folder, index, "npy") for index in range(n_parts)]


def _blocks(queries_QD: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(queries_QD), QUERY_BLOCK):
        yield queries_QD[begin : begin + QUERY_BLOCK]


def _mined(work: Path, index: int, args: MineArgs) -> Path:
    """A part of the output, for this choice."""
    choice = repr([getattr(args, name) for name in CHOICE])
    return work / f"mined_{hashlib.sha256(choice.encode()).hexdigest()[:8]}_{index:06d}.jsonl"


def _join(args: MineArgs, made: dict[str, Any], work: Path, out: Path, n_parts: int) -> dict[str, Any]:
    """All parts as one file, and the account beside it; the work folder goes.

    Raises:
        UserError: no row has a negative; the vectors stay, for another choice.
    """
    told = json.loads((work / "texts.json").read_text())
    counts = dict.fromkeys(("rows", "negatives_found", "short", "none", "dropped"), 0)
    partial = out.with_name(out.name + ".partial")
    writable_folder(out.parent)
    with partial.open("wb") as joined:
        for index in range(n_parts):
            for line in _mined(work, index, args).open("rb"):
                found = len(json.loads(line)["negatives"])
                counts["short"] += found < made["negatives"]
                counts["none"] += found == 0
                if found < made["negatives"] and made["short_rows"] == "drop":
                    counts["dropped"] += 1
                    continue
                joined.write(line)
                counts["rows"] += 1
                counts["negatives_found"] += found
    if counts["none"] == counts["rows"] + counts["dropped"]:
        partial.unlink()
        raise UserError(f"{args.path}: no row gets a negative: {TOO_NEAR} (the vectors stay in {work})")
    account = {**made, **told, **counts}
    write_whole(out.with_name(out.name + ".json"), (json.dumps(account, indent=1) + "\n").encode())
    partial.replace(out)
    shutil.rmtree(work)
    return account


if __name__ == "__main__":
    cli(MineArgs, mine, "python -m apps.embed.mine")
