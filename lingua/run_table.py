"""A table of runs, a row a run, as apps.scaling.collect writes it and laws, figures and tables read it."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.evaluation.results import writable_folder, write_whole


def write_table(rows: list[dict[str, Any]], columns: list[str], out: str) -> None:
    """CSV, or parquet where pyarrow is installed. Raises UserError."""
    writable_folder(Path(out).parent)
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
    rows = _read_parquet(path) if path.endswith(".parquet") else _read_csv(path)
    if not rows:
        raise UserError(f"{path}: no rows in it; python -m apps.scaling.collect makes it")
    missing = {"run", "state"} - set(rows[0])
    if missing:
        known = ", ".join(map(str, rows[0]))
        raise UserError(f"{path}: not a table of runs: no column {', '.join(sorted(missing))}; found {known:.200}")
    twice = [run for run, times in Counter(row["run"] for row in rows).items() if times > 1]
    if twice:
        raise UserError(f"{path}: a run comes twice: {', '.join(map(str, twice[:5]))}; leave one row of each")
    return rows


def number(row: dict[str, Any], column: str) -> float | None:
    """A finite number of a row, or None."""
    value = row.get(column)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def why_not(row: dict[str, Any], *columns: str) -> str | None:
    """Why a run cannot be used: it is not done, or one of ``columns`` is no number above 0. None: it can."""
    if row["state"] != "done":
        return row["state"] or "no state in its row"
    if row.get("family") is None:
        return row.get("note") or "no config"
    bad = [f"{column}={row.get(column)}" for column in columns if not (number(row, column) or 0) > 0]
    return f"expected numbers above 0, found {', '.join(bad)}" if bad else None


TEXTS = ("run", "state", "note", "family")  # columns that stay text, whatever stands in them


def _read_csv(path: str) -> list[dict[str, Any]]:
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark at the beginning
            reader = csv.DictReader(file)
            for row in reader:
                if None in row:
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(row[None])} cells more than the header has: quote cells "
                        "that hold a comma"
                    )
                rows.append({key: (text or None) if key in TEXTS else _value(text) for key, text in row.items()})
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file in UTF-8: {error}") from None
    return rows


def _read_parquet(path: str) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow: pip install -r requirements-data.txt") from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a parquet file: {error}") from None


def _value(text: str | None) -> Any:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if math.isfinite(value) and text.strip().lstrip("-").isdecimal() else value
