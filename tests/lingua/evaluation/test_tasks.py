"""Task files: what is read, what is refused, and which rows a subset takes."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.evaluation.tasks import TaskArgs, describe, load_task


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


REVIEWS = [{"text": f"review {i}", "label": i % 3, "score": i / 2} for i in range(30)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {"train": jsonl(tmp_path / "train.jsonl", REVIEWS), "test": jsonl(tmp_path / "test.jsonl", REVIEWS[:9])}


def test_classes_are_numbered_and_files_are_named(files: dict[str, str]) -> None:
    task = load_task("reviews", TaskArgs(**files))
    assert task.classes == ["0", "1", "2"]
    assert task.train.texts == [row["text"] for row in REVIEWS]
    assert task.train.y.tolist() == [row["label"] for row in REVIEWS]
    assert task.test.y.dtype == np.int64
    assert task.train.groups.tolist() == list(range(30))
    assert task.train.pairs is None
    assert task.train.rows_in_file == 30
    assert task.train.files == {files["train"]: hashlib.sha256(Path(files["train"]).read_bytes()).hexdigest()}
    assert task.metrics == ("accuracy",)


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "t.csv").write_text(
        "text,label,score\n" + "".join(f'"review {i}",{i % 3},{i / 2}\n' for i in range(30))
    )
    (tmp_path / "t.tsv").write_text(
        "text\tlabel\tscore\n" + "".join(f"review {i}\t{i % 3}\t{i / 2}\n" for i in range(30))
    )
    for name in ("train.jsonl", "t.csv", "t.tsv"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((tmp_path / name).read_bytes())
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            for kind, label, expected in (
                ("classification", "label", [i % 3 for i in range(30)]),
                ("regression", "score", [i / 2 for i in range(30)]),
            ):
                task = load_task("x", TaskArgs(str(path), files["test"], kind=kind, label=label))
                assert task.train.texts == [row["text"] for row in REVIEWS]
                assert task.train.y.tolist() == expected


def test_pairs_and_other_columns(tmp_path: Path) -> None:
    rows = [{"premise": f"p{i}", "hypothesis": f"h{i}", "gold": "yes" if i % 2 else "no"} for i in range(6)]
    path = jsonl(tmp_path / "pairs.jsonl", rows)
    task = load_task(
        "pairs", TaskArgs(path, path, text="premise", text_b="hypothesis", label="gold", metric="matthews")
    )
    assert task.train.pairs == [f"h{i}" for i in range(6)]
    assert task.classes == ["no", "yes"]
    assert task.train.y.tolist() == [0, 1, 0, 1, 0, 1]


def test_words_and_tags(tmp_path: Path) -> None:
    rows = [{"words": ["a", "dog", "barks"], "tags": ["DET", "NOUN", "VERB"]}, {"words": ["dogs"], "tags": ["NOUN"]}]
    path = jsonl(tmp_path / "tags.jsonl", rows)
    task = load_task("tags", TaskArgs(path, path, kind="tokens"))
    assert task.train.sentences == [["a", "dog", "barks"], ["dogs"]]
    assert task.train.y.tolist() == [0, 1, 2, 1]
    assert task.train.groups.tolist() == [0, 0, 0, 1]


def test_a_subset_is_seeded_nested_and_within_its_limit(files: dict[str, str], tmp_path: Path) -> None:
    def texts(rows: int, seed: int = 0) -> list[str]:
        return load_task("x", TaskArgs(**files, max_train_rows=rows, seed=seed)).train.texts

    assert len(texts(10)) == 10
    assert texts(10) == texts(10) == sorted(texts(10), key=lambda text: int(text.split()[1]))
    assert texts(10) != texts(10, seed=1)
    assert set(texts(10)) < set(texts(20))
    assert texts(1000) == texts(-1) == [row["text"] for row in REVIEWS]
    assert load_task("x", TaskArgs(**files, max_test_rows=5)).test.y.shape == (5,)

    sentences = [{"words": ["w"] * n, "tags": ["A", "B"] * n} for n in range(1, 20)]
    for row in sentences:
        row["tags"] = row["tags"][: len(row["words"])]
    path = jsonl(tmp_path / "tokens.jsonl", sentences)
    task = load_task("x", TaskArgs(path, path, kind="tokens", max_train_rows=50, max_test_rows=-1))
    assert 30 < len(task.train.labels) <= 50
    assert all(words in [row["words"] for row in sentences] for words in task.train.sentences)
    assert task.train.rows_in_file == 19


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"text": "a"}, {}, "line 2: no column 'label'; found text"),
        ({"text": "", "label": 1}, {}, "line 2: column 'text' holds ''"),
        ({"text": None, "label": 1}, {}, "line 2: column 'text' holds None"),
        ({"text": "a", "label": None}, {}, "line 2: column 'label' holds None"),
        ({"text": "a", "label": 0.5}, {}, "line 2: column 'label' holds 0.5: expected a class"),
        ({"text": "a", "label": "x"}, {"kind": "regression"}, "line 2: column 'label' holds 'x': expected a finite"),
        ({"text": "a", "label": float("nan")}, {"kind": "regression"}, "holds nan: expected a finite number"),
        ({"text": "a", "label": True}, {"kind": "regression"}, "holds True: expected a finite number"),
        ({"text": "a", "label": 10**400}, {"kind": "regression"}, "0: expected a finite number"),
        ({"text": "a", "label": 1}, {"text_b": "b"}, "line 2: no column 'b'"),
        ([1, 2], {}, r"line 2: expected a JSON object, found '\[1, 2\]'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, files: dict[str, str], row: Any, changes: dict, message: str) -> None:
    first = {"text": "good", "b": "good", "label": 1}
    path = jsonl(tmp_path / "bad.jsonl", [first, row])
    with pytest.raises(UserError, match="bad.jsonl.*" + message):
        load_task("x", TaskArgs(path, files["test"], **changes))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": ["a"]}, "no column 'tags'"),
        ({"words": ["a", "b"], "tags": ["X"]}, "2 words and 1 tags"),
        ({"words": [], "tags": []}, "column 'words' holds \\[\\]"),
        ({"words": "a b", "tags": ["X"]}, "column 'words' holds 'a b'"),
        ({"words": ["a", " "], "tags": ["X", "Y"]}, "has ' ': expected a word"),
        ({"words": ["a", 3], "tags": ["X", "Y"]}, "has 3: expected a word"),
        ({"words": ["a", "b"], "tags": ["X", None]}, "column 'tags' holds None"),
    ],
)
def test_a_bad_sentence_is_named(tmp_path: Path, row: dict, message: str) -> None:
    path = jsonl(tmp_path / "bad.jsonl", [{"words": ["a"], "tags": ["X"]}, row])
    with pytest.raises(UserError, match="bad.jsonl, line 2: .*" + message):
        load_task("x", TaskArgs(path, path, kind="tokens"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b", "la', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "\xff", "label": 1}\n', "line 2: not UTF-8"),
        ("a.jsonl", b"", "no rows"),
        ("a.csv", b"text,label\n", "no rows"),
        ("a.csv", b"text,label\na,1\nb,1,2\n", "line 3: 3 columns, the first line names 2"),
        ("a.csv", b'text,label\n"a,1\n', "line 2: unexpected end of data"),
        ("a.csv", b"text,label,text\na,1,b\n", "line 1: a column name stands twice"),
        ("a.tsv", b"text\tlabel\na\n", "line 2: 1 columns"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a", "label": 1}\n' * 2000)[:-20], "cannot be read after line"),
        ("a.parquet", b"", "cannot be read after row 0"),
        ("a.doc", b"", "expected a file that ends in .jsonl, .csv, .tsv"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, files: dict[str, str], name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{message}"):
        load_task("x", TaskArgs(str(tmp_path / name), files["test"]))


def test_a_missing_file_and_labels_that_say_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"nowhere.csv: no such file"):
        load_task("x", TaskArgs("nowhere.csv", files["test"]))
    same = jsonl(tmp_path / "same.jsonl", [{"text": "a", "label": 1}] * 3)
    with pytest.raises(UserError, match="all 3 training rows have the label '1'"):
        load_task("x", TaskArgs(same, files["test"]))
    unlabelled = jsonl(tmp_path / "unlabelled.jsonl", [{"text": "a", "label": -1}] * 3)
    with pytest.raises(
        UserError, match=r"none of its labels \('-1'\) is among those of .*train.jsonl \('0', '1', '2'\)"
    ):
        load_task("x", TaskArgs(files["train"], unlabelled))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "tokns"}, "task: kind=tokns: expected one of classification, regression, tokens"),
        ({"metric": "pearson"}, "metric=pearson: a classification task has accuracy, macro_f1, matthews, f1"),
        ({"kind": "tokens", "text_b": "b"}, "text_b=b: a tokens task has no pairs"),
        ({"max_train_rows": 1}, "max_train_rows=1: expected -1"),
        ({"max_test_rows": 0}, "max_test_rows=0: expected -1"),
    ],
)
def test_a_bad_setting_is_named(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TaskArgs("x", "y", **fields)


def test_the_primary_metric_has_a_default() -> None:
    assert TaskArgs("x", "y", kind="regression").metric == "spearman"
    assert TaskArgs("x", "y", kind="tokens").metric == "accuracy"
    assert TaskArgs("x", "y", kind="tokens", metric="macro_f1").metric == "macro_f1"


def test_f1_needs_two_classes(files: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"tasks.x.metric=f1: expected two classes, found 3; macro_f1 takes any number"):
        load_task("x", TaskArgs(**files, metric="f1"))


def test_parquet_files_are_read(tmp_path: Path, files: dict[str, str]) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(REVIEWS), path)
    task = load_task("x", TaskArgs(str(path), files["test"]))
    assert task.train.texts == [row["text"] for row in REVIEWS]
    assert task.train.y.tolist() == [row["label"] for row in REVIEWS]


def test_the_command_describes_a_task(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    describe(TaskArgs(**files, max_train_rows=12))
    printed = capsys.readouterr().out
    assert "classification, primary metric accuracy" in printed
    assert f"train: 12 rows used, 30 in {files['train']}" in printed
    assert "  0: 3, 1: 3, 2: 3\n  first: 'review 0' -> '0'" in printed
    describe(TaskArgs(**files, kind="regression", label="score"))
    assert "  0 to 14.5, mean 7.25" in capsys.readouterr().out
