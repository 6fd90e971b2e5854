"""Words in columns: sentences with the line they begin at, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.evaluation.tables import read_rows
from lingua.evaluation.tasks import TaskArgs, load_task

CONLL = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n# # B-NP O\n\n\n \nPeter NNP B-NP B-PER\n"


def test_sentences_and_columns(tmp_path: Path) -> None:
    for name, content in (
        ("a.conll", CONLL.encode()),
        ("a.iob2.gz", gzip.compress(CONLL.replace("\n", "\r\n").encode())),
    ):
        (tmp_path / name).write_bytes(content)
        assert list(read_rows(str(tmp_path / name))) == [
            (3, {"words": ["EU", "rejects", "#"], "tags": ["B-ORG", "O", "O"], "column_1": ["NNP", "VBZ", "#"],
                 "column_2": ["B-NP", "B-VP", "B-NP"], "column_3": ["B-ORG", "O", "O"]}),
            (9, {"words": ["Peter"], "tags": ["B-PER"], "column_1": ["NNP"], "column_2": ["B-NP"],
                 "column_3": ["B-PER"]}),
        ]  # fmt: skip


def test_tabs_keep_spaces_within_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("New York\tB-LOC\n\u00a0x\tO\n")
    ((line, row),) = read_rows(str(tmp_path / "a.txt"))
    assert (line, row["words"], row["tags"]) == (1, ["New York", "\u00a0x"], ["B-LOC", "O"])


def test_a_task_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(CONLL)
    task = load_task("ner", TaskArgs(train=str(path), test=str(path), kind="tokens", tags="column_1"))
    assert task.train.sentences == [["EU", "rejects", "#"], ["Peter"]]
    assert task.classes == ["#", "NNP", "VBZ"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("EU O\nrejects\n", "line 2: 'rejects': expected 2 columns, as on the lines before"),
        ("EU O\n\nrejects V O\n", "line 3: 'rejects V O': expected 2 columns"),
        ("EU\n", "line 1: 'EU': expected a word and its tags in columns"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.conll").write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_rows(str(tmp_path / "a.conll")))
