"""The paper's printed figures, as data: Tables 1 to 9 value by value, and the model suites of Tables 10 and 11.

What its text and tables say between the lines, and where they contradict themselves, is in ``ERRATA``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "assets/paper"
FAMILIES = ("bert", "crossbert")
SEQ_LEN, VOCAB_SIZE = 512, 50265  # of every run of the paper

GLUE = ("MNLI", "QNLI", "QQP", "RTE", "SST2", "MRPC", "CoLA", "STSB")
MTEB = ("Classification", "Clustering", "PairClassification", "Reranking", "Retrieval", "STS", "Summarization")
# Tasks of each type, in the order of MTEB; MSMARCO's development set is among those of v1.
MTEB_TASKS = {
    "MTEB(eng, v1)": dict(zip(MTEB, (12, 11, 3, 4, 15, 10, 1), strict=True)),
    "MTEB(eng, v2)": dict(zip(MTEB, (8, 8, 3, 2, 10, 9, 1), strict=True)),
}

ERRATA = {
    "table 3, MTEB v1 unfrozen": "the Avg. of ModernBERT, NeoBERT and DeBERTaV3 is a mean over tasks, not over types, "
    "so it does not compare with the others (stored as MeanTask)",
    "table 3, MTEB v1 frozen, Electra": "prints 26.2 (types) and 22.4 (tasks) where its own columns give 25.9 and 21.9",
    "table 8, Electra": "its row of full fine-tuning repeats that of Table 3 (left out)",
    "table 11, id 8": "prints the full parameter count, of a model whose output matrix is its own; the other rows "
    "print half the count. Its FLOPs are printed as 5.0e21; its own columns give 5.10e21",
    "section on scaling": "the learning-rate law of CrossBERT is printed with two constants, 564.6 and 646: the first "
    "fits ids 0-6, the second id 7 (within 0.7%) and id 8 (within 5.2%)",
}


@dataclass(frozen=True)
class Result:
    """One printed value."""

    table: int
    benchmark: str
    setting: str
    model: str
    column: str
    value: float


@cache
def results() -> tuple[Result, ...]:
    """Every value of Tables 1 to 9, in the paper's order."""
    with (FOLDER / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(Result(**row | {"table": int(row["table"]), "value": float(row["value"])}) for row in rows)


def averages() -> list[tuple[Result, float]]:
    """Every printed mean of Tables 3 to 9, with the mean of the columns beside it.

    Both are of rounded values: they may differ by 0.1, half a unit of the last digit from each side.
    """
    rows: dict[tuple, dict[str, Result]] = {}
    for found in results():
        rows.setdefault((found.table, found.benchmark, found.setting, found.model), {})[found.column] = found
    means = []
    for (_, benchmark, _, _), row in rows.items():
        weights = {"Avg": dict.fromkeys(GLUE, 1)}
        if benchmark in MTEB_TASKS:
            weights = {"MeanTaskType": dict.fromkeys(MTEB, 1), "MeanTask": MTEB_TASKS[benchmark]}
        for name, weight in weights.items():
            if name in row:
                total = sum(row[column].value * n for column, n in weight.items())
                means.append((row[name], total / sum(weight.values())))
    return means


def suite(family: str) -> list[dict[str, float]]:
    """The models of Table 10 (``bert``) or 11 (``crossbert``): its columns as printed, whole numbers as int."""
    with (FOLDER / f"{family}_models.csv").open(newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
