"""A table of runs, a row a run, as apps.scaling.collect writes it and laws, figures and tables read it."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.evaluation.results import write_whole


def write_table(rows: list[dict[str, Any]], columns: list[str], out: str) -> None:
    """CSV, or parquet where pyarrow is installed. Raises UserError."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    if out.endswith(".csv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(Path(out), text.getvalue().encode())
        return
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"out={out}: parquet needs pyarrow: pip install -r requirements-data.txt, or out=FILE.csv"
        ) from None
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, None), buffer)
    write_whole(Path(out), buffer.getvalue())


def read_table(path: str) -> list[dict[str, Any]]:
    """What :func:`write_table` wrote; empty cells are None, numbers are numbers. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; python -m apps.scaling.collect makes it")
    if path.endswith(".parquet"):
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    else:
        with open(path, newline="") as file:
            rows = [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]
    missing = {"run", "state"} - set(rows[0] if rows else ())
    if missing:
        raise UserError(f"{path}: not a table of runs: no column {', '.join(sorted(missing))}")
    return rows


def _value(text: str | None) -> Any:
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if math.isfinite(number) and text.lstrip("-").isdecimal() else number
