"""Rows of labelled files: quotes, line ends, and the line numbers of errors. Damaged files: test_tasks.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.evaluation.tables import file_digest, read_rows, tsv_lines


def test_quotes_and_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufefftext,label\n"two\nlines, ""quoted""",a\n' + "x" * 200_000 + ",b\n")
    rows = list(read_rows(str(tmp_path / "a.csv")))
    assert rows[0] == (3, {"text": 'two\nlines, "quoted"', "label": "a"})  # the line at which the row ends
    assert len(rows[1][1]["text"]) == 200_000
    (tmp_path / "a.tsv").write_text('text\tlabel\nhe said "yes\ta\nno" ok\tb\n')
    assert [row["text"] for _, row in read_rows(str(tmp_path / "a.tsv"))] == ['he said "yes', 'no" ok']


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    contents = {
        "a.csv": "text,label\r\na,1\r\n\r\nb,2\r\n\r\n",
        "a.tsv": "text\tlabel\na\t1\n\nb\t2\n\n",
        "a.jsonl": '\n{"text": "a", "label": "1"}\n\n{"text": "b", "label": "2"}\n \n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
        rows = list(read_rows(str(tmp_path / name)))
        assert [row for _, row in rows] == [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}]
        assert [number for number, _ in rows] == [2, 4]  # those of the file


def test_tabs_separate_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes('\ufeffa "b\tc\r\n\u2028x\ry\t"\n\t'.encode())
    lines = list(tsv_lines(str(path)))
    assert lines == [(1, ['a "b', "c"]), (2, ["\u2028x\ry", '"']), (3, ["", ""])]
    assert file_digest(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": i} for i in range(1000)]), path)
    assert list(read_rows(str(path)))[999] == (1000, {"a": 999})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"a.parquet: cannot be read after row 0"):
        list(read_rows(str(path)))
