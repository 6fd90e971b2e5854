"""Tables of runs as people hand them back: from spreadsheets, cut, edited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.run_table import number, read_table, why_not

TEXT = "run,state,note,family,budget\na,done,,bert,1e12\n7,done,é,bert,\nc,,,bert,much\n"


def test_what_a_spreadsheet_saves(tmp_path: Path) -> None:
    """A byte order mark, CRLF: the same rows; names stay text."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    rows = read_table(str(path))
    assert [row["run"] for row in rows] == ["a", "7", "c"]
    assert [number(row, "budget") for row in rows] == [1e12, None, None]
    assert [why_not(row, "budget") for row in rows] == [
        None,
        "expected numbers above 0, found budget=None",
        "no state in its row",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows in it"),
        (TEXT.splitlines()[0].encode(), "no rows in it"),
        (TEXT.replace(",", ";").encode(), "no column run, state; found run;state"),
        (TEXT.encode("latin-1"), "not a CSV file in UTF-8"),
        (b"run,state\na,done,x,y\n", "line 2: 2 cells more than the header has"),
        (TEXT.replace("7,done", "a,done").encode(), "a run comes twice: a"),
    ],
)
def test_what_is_no_table(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        read_table(str(path))
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"t.parquet: not a parquet file"):
        read_table(str(path))
