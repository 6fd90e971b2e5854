"""The GLUE tasks of the paper (Wang et al. 2019), from the official folders, the parquet files of the hub, or the hub.

    GLUE/CoLA/{train,dev}.tsv ...                       as the official download unpacks
    GLUE/cola/{train,validation}-00000-of-00001.parquet ...   as https://huggingface.co/datasets/nyu-mll/glue
    hf:nyu-mll/glue                                     the same files, fetched once

The official files are tab-separated without quoting: a quote is a character, often an unbalanced one, in QQP, MRPC,
STS-B and others. Evaluation uses the labelled development sets; the labels of the test sets were never published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingua.download import fetch, list_repository
from lingua.errors import UserError
from lingua.evaluation.samples import whole_groups
from lingua.evaluation.scores import METRICS
from lingua.evaluation.tables import file_digest, read_rows, tsv_lines
from lingua.evaluation.tasks import Split, Task, check_limits, number_labels


@dataclass(frozen=True)
class GlueTask:
    """Where a task's texts and labels stand in each layout."""

    folder: str  # official folder
    texts: tuple[str, ...]  # official columns; numbers where the file has no line of column names
    label: str
    config: str  # folder of the parquet files
    columns: tuple[str, ...]  # their texts
    classes: tuple[str, ...]  # in the order of the hub's numbers; empty for regression
    metrics: tuple[str, ...]  # the usual ones; the first is the primary one
    dev: str = "dev"
    validation: str = "validation"
    header: bool = True
    average: bool = True  # whether it counts in the mean of the eight

    @property
    def kind(self) -> str:
        """Which of ``lingua.evaluation.scores.METRICS`` it has."""
        return {0: "regression", 2: "binary"}.get(len(self.classes), "classification")


_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")
_MNLI = ("entailment", "neutral", "contradiction")
_PAIR = ("premise", "hypothesis")
ZERO_ONE = ("0", "1")
GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", ("3",), "1", "cola", ("sentence",), ZERO_ONE, ("matthews", "accuracy"), header=False),
    "sst2": GlueTask("SST-2", ("sentence",), "label", "sst2", ("sentence",), ZERO_ONE, ("accuracy",)),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", "mrpc", _SENTENCES, ZERO_ONE, ("accuracy", "f1")
    ),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), "is_duplicate", "qqp", ("question1", "question2"), ZERO_ONE,
        ("accuracy", "f1"),
    ),
    "stsb": GlueTask("STS-B", _SENTENCES, "score", "stsb", _SENTENCES, (), ("spearman", "pearson")),
    "mnli": GlueTask(
        "MNLI", _SENTENCES, "gold_label", "mnli", _PAIR, _MNLI, ("accuracy",), "dev_matched", "validation_matched"
    ),
    "mnli_mm": GlueTask(
        "MNLI", _SENTENCES, "gold_label", "mnli", _PAIR, _MNLI, ("accuracy",), "dev_mismatched",
        "validation_mismatched", average=False,
    ),
    "qnli": GlueTask(
        "QNLI", ("question", "sentence"), "label", "qnli", ("question", "sentence"), _ENTAILMENT, ("accuracy",)
    ),
    "rte": GlueTask("RTE", _SENTENCES, "label", "rte", _SENTENCES, _ENTAILMENT, ("accuracy",)),
}  # fmt: skip
HUB = "hf:"


@dataclass
class GlueArgs:
    """Where GLUE lies and how much of it is used."""

    path: str = "data/glue"  # folder of the official files or of the hub's parquet files, or hf:nyu-mll/glue
    max_train_rows: int = -1  # most training rows of each task, a seeded subset; -1: all
    max_test_rows: int = -1  # most rows of each development set; -1: all
    seed: int = 0  # of the subsets
    metrics: dict[str, str] = field(default_factory=dict)  # primary scores other than the usual: {mrpc: f1}

    def __post_init__(self) -> None:
        check_limits("glue", self)
        for name, metric in self.metrics.items():
            if name not in GLUE:
                raise UserError(f"glue.metrics.{name}: expected one of {', '.join(GLUE)}")
            known = METRICS[GLUE[name].kind]
            if metric not in known:
                raise UserError(f"glue.metrics.{name}={metric}: expected one of {', '.join(known)}")


def load_glue(name: str, args: GlueArgs) -> Task:
    """One task of GLUE, evaluated on its development set. Raises UserError as :func:`read_glue` does."""
    task, left_out, splits = GLUE[name], {}, []
    for train, most in ((True, args.max_train_rows), (False, args.max_test_rows)):
        rows = read_glue(name, args.path, train)
        used = whole_groups([1] * len(rows.labels), most, args.seed)
        split = Split({path: file_digest(path) for path in rows.paths}, len(rows.labels))
        split.texts, split.labels = [rows.texts[i] for i in used], [rows.labels[i] for i in used]
        split.pairs = None if rows.pairs is None else [rows.pairs[i] for i in used]
        splits.append(split)
        if rows.left_out:
            left_out[rows.paths[0]] = rows.left_out
    kind = "classification" if task.classes else "regression"
    first = args.metrics.get(name, task.metrics[0])
    metrics = (first, *(metric for metric in task.metrics if metric != first))
    return number_labels(
        Task(name, kind, metrics, *splits, list(task.classes), average=task.average, left_out=left_out)
    )


@dataclass
class GlueRows:
    """Rows of one split."""

    paths: list[str]
    texts: list[str]
    pairs: list[str] | None
    labels: list[str] | list[float]
    left_out: list[int]  # lines without the right number of fields, which QQP's official file has


def read_glue(name: str, root: str, train: bool) -> GlueRows:
    """The training or the development rows of one task, in the order of the files.

    Args:
        root: folder of either layout, or ``hf:ID`` (kept under ``data/glue``).

    Raises:
        UserError: no such folder or file, a row that cannot be used (with file and line), or a test file, whose rows
            have no labels.
    """
    task = GLUE[name]
    if root.startswith(HUB):
        root = _fetch(task, root.removeprefix(HUB), Path("data/glue"))
    official = Path(root) / task.folder / f"{'train' if train else task.dev}.tsv"
    split = "train" if train else task.validation
    parquet = sorted(map(str, (Path(root) / task.config).glob(f"{split}-*.parquet")))
    found = GlueRows(
        [str(official)] if official.is_file() else parquet, [], [] if len(task.texts) > 1 else None, [], []
    )
    if not found.paths:
        raise UserError(
            f"{name}: neither {official} nor {Path(root) / task.config / split}-*.parquet; give the folder of GLUE "
            "with glue.path=FOLDER, or glue.path=hf:nyu-mll/glue to fetch it"
        )
    for path in found.paths:
        rows = _official_rows(task, path, found.left_out) if official.is_file() else _hub_rows(task, path)
        for line, texts, label in rows:
            where = f"{path}, line {line}"
            for text in texts:
                if not isinstance(text, str):
                    raise UserError(f"{where}: found {text!r}: expected a text")
            found.texts.append(texts[0])
            if found.pairs is not None:
                found.pairs.append(texts[1])
            found.labels.append(_label(task, label, where))
    if not found.labels:
        raise UserError(f"{', '.join(found.paths)}: no rows")
    return found


def _official_rows(task: GlueTask, path: str, left_out: list[int]) -> Iterator[tuple[int, list[Any], Any]]:
    """(line, texts, label) of an official file."""
    lines = tsv_lines(path)
    if not task.header:  # CoLA: source, label, the author's mark, sentence
        names, width = {str(i): i for i in range(4)}, 4
    else:
        _, columns = next(lines, (1, []))
        if not columns:
            raise UserError(f"{path}: is empty")
        names, width = {column: i for i, column in enumerate(columns)}, len(columns)
        if task.label not in names:
            raise UserError(
                f"{path}: no column {task.label!r}, found {', '.join(columns)}: is it the test split? Its labels were "
                "never published: use dev"
            )
    wanted = [names.get(column) for column in (*task.texts, task.label)]
    if None in wanted:
        raise UserError(f"{path}: found the columns {', '.join(names)}; expected {', '.join(task.texts)}")
    for number, fields in lines:
        if len(fields) != width:
            if task.folder != "QQP":
                hint = "; the test split (two columns) has no labels" if len(fields) == 2 else ""
                raise UserError(f"{path}, line {number}: {len(fields)} columns, expected {width}{hint}")
            left_out.append(number)
            continue
        yield number, [fields[i] for i in wanted[:-1]], fields[wanted[-1]]


def _hub_rows(task: GlueTask, path: str) -> Iterator[tuple[int, list[Any], Any]]:
    for number, row in read_rows(path):
        missing = [column for column in (*task.columns, "label") if column not in row]
        if missing:
            raise UserError(f"{path}: no column {missing[0]!r}, found {', '.join(row)}")
        label = row["label"]
        if task.classes and isinstance(label, int) and 0 <= label < len(task.classes):
            label = task.classes[label]
        yield number, [row[column] for column in task.columns], label


def _label(task: GlueTask, label: Any, where: str) -> str | float:
    if label == -1 or label is None:
        raise UserError(f"{where}: no label: is it the test split? Its labels were never published: use dev")
    if task.classes:
        if label not in task.classes:
            raise UserError(f"{where}: label {label!r}, expected one of {', '.join(task.classes)}")
        return label
    try:
        score = float(label)
    except ValueError:
        score = -1.0
    if not 0 <= score <= 5:
        raise UserError(f"{where}: score {label!r}, expected a number from 0 to 5")
    return score


def _fetch(task: GlueTask, repo: str, folder: Path) -> str:
    """Download the task's files of the hub's layout; what is there already stays."""
    commit, files = list_repository(repo, "dataset", "main", folder)
    wanted = [
        file
        for file in files
        if file.startswith(f"{task.config}/") and file.endswith(".parquet") and "/test" not in file
    ]
    for file in wanted:
        fetch(repo, "dataset", commit, file, folder)
    return str(folder)
