"""GLUE from every layout: the same rows, the labels' order, quotes that mean nothing, test splits refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.evaluation.glue import GLUE, GlueArgs, load_glue, read_glue
from tests.glue_files import MNLI, TEXTS, a, b, write_hub, write_official
from tests.hub_server import HubServer
from tests.support import environment

ROWS = 12
LABELS = {
    **{name: [str(i % 2) for i in range(ROWS)] for name in ("cola", "sst2", "mrpc", "qqp")},
    **{name: [MNLI[i % 3] for i in range(ROWS)] for name in ("mnli", "mnli_mm")},
    **{name: [("not_entailment", "entailment")[i % 2] for i in range(ROWS)] for name in ("qnli", "rte")},
    "stsb": [i % 6 * 0.8 for i in range(ROWS)],
}


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("glue") / "official", ROWS)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("glue") / "hub", ROWS)


def test_the_tasks_are_the_papers() -> None:
    assert [name for name, task in GLUE.items() if task.average] == [
        "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte",
    ]  # fmt: skip
    assert {name: task.metrics for name, task in GLUE.items() if len(task.metrics) > 1} == {
        "cola": ("matthews", "accuracy"),
        "mrpc": ("accuracy", "f1"),
        "qqp": ("accuracy", "f1"),
        "stsb": ("spearman", "pearson"),
    }


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("layout", ["official", "hub"])
def test_rows_and_labels_of_both_layouts(name: str, layout: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(layout)
    pairs = name not in ("cola", "sst2")
    for train, count in ((True, ROWS), (False, ROWS // 2)):
        rows = read_glue(name, str(root), train)
        assert rows.texts == [a(i) for i in range(count)]
        assert rows.pairs == ([b(i) for i in range(count)] if pairs else None)
        labels = LABELS[name][:count]
        assert rows.labels == (pytest.approx(labels) if name == "stsb" else labels)
        assert rows.left_out == ([5, 6] if (name, layout, train) == ("qqp", "official", True) else [])
    assert any(text.count('"') % 2 for text in TEXTS)


def test_class_numbers_are_the_hubs(official: Path, hub: Path) -> None:
    orders = {
        "mnli": ["entailment", "neutral", "contradiction"],
        "qnli": ["entailment", "not_entailment"],
        "rte": ["entailment", "not_entailment"],
        "cola": ["0", "1"],
    }
    for name, order in orders.items():
        for root in (official, hub):
            task = load_glue(name, GlueArgs(path=str(root)))
            assert task.classes == order
            assert task.train.y.tolist() == [order.index(label) for label in LABELS[name]]
            assert task.metrics == GLUE[name].metrics
    task = load_glue("stsb", GlueArgs(path=str(official)))
    assert (task.kind, task.classes) == ("regression", [])
    assert task.train.y.tolist() == pytest.approx([i % 6 * 0.8 for i in range(ROWS)])


def test_the_primary_metric_is_a_field(official: Path) -> None:
    args = GlueArgs(path=str(official), metrics={"mrpc": "f1", "stsb": "pearson", "rte": "f1", "mnli": "macro_f1"})
    assert load_glue("mrpc", args).metrics == ("f1", "accuracy")
    assert load_glue("stsb", args).metrics == ("pearson", "spearman")
    assert load_glue("rte", args).metrics == ("f1", "accuracy")
    assert load_glue("qqp", args).metrics == ("accuracy", "f1")
    with pytest.raises(UserError, match=r"glue.metrics.mnli=f1: expected one of accuracy, macro_f1, matthews"):
        GlueArgs(metrics={"mnli": "f1"})
    with pytest.raises(UserError, match=r"glue.metrics.boolq: expected one of cola"):
        GlueArgs(metrics={"boolq": "f1"})


def test_mismatched_is_evaluated_on_its_own_rows(official: Path) -> None:
    path = official / "MNLI/dev_mismatched.tsv"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])  # without its last line
    try:
        assert len(load_glue("mnli_mm", GlueArgs(path=str(official))).test.labels) == ROWS // 2 - 1
        assert len(load_glue("mnli", GlueArgs(path=str(official))).test.labels) == ROWS // 2
    finally:
        path.write_bytes(whole)


def test_files_are_named_with_checksums_and_left_out_lines(official: Path, hub: Path) -> None:
    task = load_glue("qqp", GlueArgs(path=str(official)))
    path = str(official / "QQP/train.tsv")
    assert task.train.files == {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    assert task.left_out == {path: [5, 6]}
    names = [Path(path).name for path in load_glue("qqp", GlueArgs(path=str(hub))).train.files]
    assert names == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]


def test_a_subset_is_seeded(official: Path) -> None:
    args = GlueArgs(path=str(official), max_train_rows=5, max_test_rows=4)
    task = load_glue("rte", args)
    assert (len(task.train.texts), len(task.train.pairs), len(task.train.y), len(task.test.y)) == (5, 5, 5, 4)
    assert task.train.rows_in_file == ROWS
    assert task.train.pairs == load_glue("rte", args).train.pairs
    assert task.train.pairs != load_glue("rte", GlueArgs(**{**vars(args), "seed": 1})).train.pairs
    with pytest.raises(UserError, match="glue: max_train_rows=1: expected -1"):
        GlueArgs(max_train_rows=1)


@pytest.mark.parametrize(
    ("folder", "header", "message"),
    [
        ("SST-2", "index\tsentence", "no column 'label', found index, sentence: is it the test split"),
        ("RTE", "index\tsentence1\tsentence2", "no column 'label', found .*: is it the test split"),
        ("MNLI", "index\tsentence1\tsentence2", "no column 'gold_label'"),
        ("CoLA", "index\tsentence", "line 1: 2 columns, expected 4; the test split .* has no labels"),
    ],
)
def test_official_test_splits_are_refused(tmp_path: Path, folder: str, header: str, message: str) -> None:
    write_official(tmp_path / "glue")
    dev = "dev_matched" if folder == "MNLI" else "dev"
    (tmp_path / f"glue/{folder}/{dev}.tsv").write_text(header + "\n0\ta\tb\n")
    name = next(name for name, task in GLUE.items() if task.folder == folder)
    with pytest.raises(UserError, match=f"{dev}.tsv.*{message}"):
        load_glue(name, GlueArgs(path=str(tmp_path / "glue")))


def test_the_hubs_test_split_is_refused(tmp_path: Path) -> None:
    root = write_hub(tmp_path / "hub")
    (root / "rte/validation-00000-of-00001.parquet").write_bytes(
        (root / "rte/test-00000-of-00001.parquet").read_bytes()
    )
    with pytest.raises(UserError, match=r"validation.*parquet, line 1: no label: is it the test split"):
        load_glue("rte", GlueArgs(path=str(root)))


@pytest.mark.parametrize(
    ("folder", "line", "message"),
    [
        ("RTE", "9\tx\ty\tmaybe", "train.tsv, line 14: label 'maybe', expected one of entailment, not_entailment"),
        ("RTE", "9\tx\tentailment", "train.tsv, line 14: 3 columns, expected 4"),
        ("SST-2", "a\tb\t1", "train.tsv, line 14: 3 columns, expected 2"),
        ("STS-B", "9\tg\tf\ty\t9\tn\tn\tx\ty\t5.1", "line 14: score '5.1', expected a number from 0 to 5"),
        ("STS-B", "9\tg\tf\ty\t9\tn\tn\tx\ty\thigh", "line 14: score 'high'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, folder: str, line: str, message: str) -> None:
    write_official(tmp_path)
    with (tmp_path / folder / "train.tsv").open("a") as file:
        file.write(line + "\n")
    name = next(name for name, task in GLUE.items() if task.folder == folder)
    with pytest.raises(UserError, match=message):
        load_glue(name, GlueArgs(path=str(tmp_path)))


def test_missing_files_say_where_they_should_be(tmp_path: Path, official: Path) -> None:
    with pytest.raises(UserError, match=r"rte: neither .*RTE/train.tsv nor .*rte/train-\*.parquet; give .*hf:nyu-mll"):
        load_glue("rte", GlueArgs(path=str(tmp_path)))
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE/train.tsv").touch()
    with pytest.raises(UserError, match=r"RTE/train.tsv: is empty"):
        load_glue("rte", GlueArgs(path=str(tmp_path)))
    (tmp_path / "RTE/train.tsv").write_text("index\tfirst\tlabel\n")
    with pytest.raises(UserError, match="found the columns index, first, label; expected sentence1, sentence2"):
        load_glue("rte", GlueArgs(path=str(tmp_path)))


def test_the_hub_is_asked_once_for_each_file(tmp_path: Path) -> None:
    """Through huggingface_hub itself, against a server on this machine; the connection drops in the first file."""
    write_hub(tmp_path / "served/nyu-mll/glue")
    code = (
        "from lingua.evaluation.glue import GlueArgs, load_glue\n"
        "task = load_glue('rte', GlueArgs(path='hf:nyu-mll/glue'))\n"
        "print(len(task.train.texts), len(task.test.texts), *task.train.files)"
    )
    with HubServer(tmp_path / "served", drops=1) as server:
        variables = {**environment(), "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        variables.pop("HF_HUB_OFFLINE", None)
        for _ in range(2):
            words = [sys.executable, "-c", code]
            done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("12 6 data/glue/rte/train-00000-of-00002.parquet")
        asked = [file for file, _ in server.asked]
    names = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")
    assert set(asked) == {f"rte/{name}.parquet" for name in names}
    assert len(asked) == 4  # one of them again after the break, and none in the second run
