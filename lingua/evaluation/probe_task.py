"""One task on one encoder: features of both splits, and every probe of every layer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from lingua.distributed import World
from lingua.errors import UserError
from lingua.evaluation.attentive import TokenStates
from lingua.evaluation.feature_files import FeatureFiles
from lingua.evaluation.probe import SCORES, ProbeArgs, majority, probe
from lingua.evaluation.samples import sample_rows
from lingua.evaluation.tasks import Split, Task
from lingua.frozen import FrozenEncoder, Sequences


def probe_task(
    task: Task,
    encoder: FrozenEncoder,
    files: FeatureFiles,
    layers: list[int],
    how: tuple[str, int, bool],
    args: ProbeArgs,
    world: World,
) -> dict[str, Any]:
    """Features of both splits and the probes of every layer, which the ranks share.

    Args:
        how: pooling, tokens in a batch, and whether the final norm is applied.

    Returns:
        what results.json holds of a task, on every rank.
    """
    began = time.perf_counter()

    def features_of(sequences: Sequences, part: str) -> list[np.ndarray]:
        return files.get(encoder, sequences, layers, *how, f"{task.name}, {part}")

    train, test = (_sequences(split, encoder) for split in (task.train, task.test))
    (train_y, groups), (test_y, _) = (_targets(split, seq) for split, seq in ((task.train, train), (task.test, test)))
    kinds = [kind for kind in args.kinds if kind != "attentive"]
    data: list[tuple[ProbeArgs, Any, Any, np.ndarray, np.ndarray]] = []
    if kinds:
        x = [features_of(train, "train"), features_of(test, "test")]
        data.append((replace(args, kinds=kinds), *x, train_y, groups))
    if "attentive" in args.kinds:  # slow, and all tokens take room: on the rows of paper and honest alone
        rows = sample_rows(groups, args.max_samples, args.sample_seeds[0])
        tokens = []
        for sequences in (train.take(rows).every_token(), test.every_token()):
            states = features_of(sequences, "tokens")
            tokens.append([TokenStates(layer, sequences.first_rows()) for layer in states])
        short = replace(args, kinds=["attentive"], full=False, samples=1)
        data.append((short, *tokens, train_y[rows], groups[rows]))
    encoded = time.perf_counter()
    mine: dict[int, dict[str, Any]] = {}
    for i in range(world.rank, len(layers), world.size):
        mine[layers[i]] = {}
        for probe_args, train_x, test_x, y, group in data:
            mine[layers[i]] |= probe(
                train_x[i], y, test_x[i], test_y, probe_args, task.metrics[0], group, encoder.device
            )
    by_layer = {layer: found for part in world.gather(mine) for layer, found in part.items()}
    if world.is_first:
        print(
            f"{task.name}: {len(train_y):,} rows to train, {len(test_y):,} to test; {train.truncated + test.truncated} "
            f"sequences cut at {encoder.max_length} tokens; features {encoded - began:.1f} s, probes "
            f"{time.perf_counter() - encoded:.1f} s"
        )
    return {
        "kind": task.kind,
        "metric": task.metrics[0],
        "metrics": list(task.metrics),
        "classes": task.classes,
        "classes_only_in_test": sorted(set(task.test.labels) - set(task.train.labels)) if task.classes else [],
        "train": _describe(task.train, len(train_y), train.truncated),
        "test": _describe(task.test, len(test_y), test.truncated),
        "lines_left_out": task.left_out,
        "majority": majority(train_y, test_y),
        "layers": {str(layer): by_layer[layer] for layer in layers},
    }


def _sequences(split: Split, encoder: FrozenEncoder) -> Sequences:
    try:
        if split.sentences:
            return encoder.word_sequences(split.sentences)
        return encoder.text_sequences(split.texts, split.pairs)
    except UserError as error:
        raise UserError(f"{', '.join(split.files)}, of the rows used: {error}") from None


def _targets(split: Split, sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """(targets [N], groups [N]) of the rows that have features."""
    kept = slice(None) if sequences.kept is None else sequences.kept
    return split.y[kept], split.groups[kept]


def _describe(split: Split, rows: int, truncated: int) -> dict[str, Any]:
    return {
        "files": split.files,
        "rows_in_file": split.rows_in_file,
        "rows": rows,
        "rows_beyond_max_length": len(split.labels) - rows,
        "truncated_sequences": truncated,
    }


def glue_average(results: dict[str, Any], tasks: list[Task]) -> dict[str, Any] | None:
    """The plain mean of the primary metrics of GLUE's eight tasks, by layer, probe and score; None if not all are
    there."""
    counted = [task.name for task in tasks if task.average]
    if len(counted) < 8:
        return None

    def mean(layer: int, kind: str, score: str) -> float | None:
        entries = [results["tasks"][name]["layers"][str(layer)][kind][score] for name in counted]
        if None in entries:
            return None
        pairs = zip(counted, entries, strict=True)
        return sum(entry[results["tasks"][name]["metric"]] for name, entry in pairs) / len(counted)

    kinds = results["config"]["probe"]["kinds"]
    return {
        str(layer): {kind: {score: mean(layer, kind, score) for score in SCORES} for kind in kinds}
        for layer in results["layers"]
    }
