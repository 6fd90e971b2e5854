"""Many runs from one config: a grid or a list of points, the names of their runs, and the index of how they fare."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lingua.args import read_yaml
from lingua.errors import UserError
from lingua.hashing import counter_hash, text_hash
from lingua.stool import records

INDEX = "sweep.jsonl"
MOST_SHOWN = 100  # characters of a value, in a message
DRAWS = ("choice", "int", "uniform", "log_uniform")


def points(grid: dict[str, list[str]], file: str | None) -> list[dict[str, str]]:
    """Every combination of the grid's values with each point of the file, as ``key: value`` words.

    Raises:
        UserError: an unreadable file, or the same point twice.
    """
    listed = read_points(file) if file is not None else [{}]
    found = []
    for point in listed:
        for values in itertools.product(*grid.values()):
            new = point | dict(zip(grid, values, strict=True))
            if new in found:
                raise UserError(f"sweep: {_words(new)} comes twice")
            found.append(new)
    return found


def read_points(path: str) -> list[dict[str, str]]:
    """The points of a YAML file: ``points: [...]``, ``grid:`` with a list of values for each key (every combination,
    the last key fastest), or ``n:``, ``seed:`` and ``draw:`` of each key.

    ``draw: {optim.lr: {log_uniform: [1e-4, 1e-2]}, model.n_layers: {choice: [6, 12]}, seed: {int: [0, 9]}}`` gives
    ``n`` points. Draw i of a key is a function of (seed, key, i): more points later leave the first ones as they are.
    """
    values = read_yaml(path)
    if set(values) == {"points"}:
        points = values["points"]
        if not isinstance(points, list) or not points or not all(isinstance(point, dict) and point for point in points):
            raise UserError(f"{path}: points: expected a list of mappings from keys to values")
        return [{str(key): _text(value) for key, value in point.items()} for point in points]
    if set(values) == {"grid"}:
        grid = values["grid"]
        if not isinstance(grid, dict) or not grid or not all(isinstance(v, list) and v for v in grid.values()):
            raise UserError(f"{path}: grid: expected keys, each with a list of values")
        combinations = itertools.product(*grid.values())
        return [dict(zip(map(str, grid), map(_text, values), strict=True)) for values in combinations]
    if not {"n", "draw"} <= set(values) <= {"n", "draw", "seed"} or not (
        isinstance(values["draw"], dict) and values["draw"]
    ):
        raise UserError(
            f"{path}: expected points:, grid:, or n:, draw: with keys, and perhaps seed:; found "
            f"{_cut(', '.join(map(str, values)))}"
        )
    n, seed = values["n"], values.get("seed", 0)
    if not isinstance(n, int) or n < 1 or not isinstance(seed, int):
        raise UserError(f"{path}: n={_cut(n)}, seed={_cut(seed)}: expected whole numbers, n at least 1")
    draws = {str(key): spec for key, spec in values["draw"].items()}
    return [{key: _draw(path, key, spec, seed, i) for key, spec in draws.items()} for i in range(n)]


def _cut(value: Any) -> str:
    """As much of it as a message shows."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _draw(path: str, key: str, spec: Any, seed: int, i: int) -> str:
    kind, args = next(iter(spec.items())) if isinstance(spec, dict) and len(spec) == 1 else (None, None)
    if kind not in DRAWS or not isinstance(args, list) or not args:
        raise UserError(f"{path}: draw.{key}={_cut(spec)}: expected one of {', '.join(DRAWS)} with a list")
    share = (counter_hash(seed, text_hash(key), i) % 2**53) / 2**53  # in [0, 1)
    if kind == "choice":
        return _text(args[int(share * len(args))])
    try:
        low, high = map(float, args)
        if not low <= high or (kind == "log_uniform" and low <= 0):
            raise ValueError
    except (TypeError, ValueError):
        wanted = "[low, high], 0 < low <= high" if kind == "log_uniform" else "[low, high]"
        raise UserError(f"{path}: draw.{key}={_cut(spec)}: expected {kind}: {wanted}") from None
    if kind == "int":
        return str(int(low) + int(share * (int(high) - int(low) + 1)))
    if kind == "uniform":
        return f"{low + share * (high - low):.4g}"
    return f"{math.exp(math.log(low) + share * (math.log(high) - math.log(low))):.4g}"


def _text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _words(point: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


def names(found: list[dict[str, str]]) -> list[str]:
    """A folder name for each point from its keys: ``lr=1e-3_n_layers=12``; whole keys where their ends are the same.

    Raises:
        UserError: two points whose names are the same.
    """
    keys = list(dict.fromkeys(key for point in found for key in point))
    ends = [key.split(".")[-1] for key in keys]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    made = [re.sub(r"[^\w.+=-]+", "-", "_".join(f"{short[k]}={v}" for k, v in point.items()))[:200] for point in found]
    twice = [name for name in made if made.count(name) > 1]
    if twice:
        raise UserError(f"sweep: several points would be called {twice[0]}")
    return made


def runs(sweep: Path) -> list[dict[str, Any]]:
    """The lines of the index. Raises UserError if the folder is no sweep."""
    path = sweep / INDEX
    if not path.is_file():
        raise UserError(f"{sweep}: no sweep (no {INDEX})")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_index(sweep: Path, lines: list[dict[str, Any]], known: Mapping[Path, dict[str, Any]]) -> None:
    """Write the index whole, with the state, the last figures and the end of each run."""
    text = ""
    for line in lines:
        run = sweep / line["name"]
        found = known.get(run) or records.summary(run)
        about = {key: found.get(key) for key in ("state", "job", "restarts", "exit", "reason")}
        kept = {key: line[key] for key in ("name", "values")}
        text += json.dumps(kept | about | {"metrics": records.progress(run)}) + "\n"
    partial = sweep / f"{INDEX}.partial"
    partial.write_text(text)
    partial.replace(sweep / INDEX)


def refresh(
    sweep: Path, new: Iterable[dict[str, Any]] = (), known: Mapping[Path, dict[str, Any]] | None = None
) -> None:
    """Bring the index up to date; several jobs may do so at the same time.

    Args:
        new: lines of further runs, or of some that are launched again.
        known: summaries of runs of which more is known than their own records say.
    """
    names = {line["name"] for line in new}
    with (records.home(sweep) / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        before = runs(sweep) if (sweep / INDEX).is_file() else []
        _write_index(sweep, [line for line in before if line["name"] not in names] + [*new], known or {})


def expand(folders: list[Path]) -> list[Path]:
    """Run folders, with each sweep replaced by its runs."""
    found = []
    for folder in folders:
        if (folder / INDEX).is_file():
            found += [folder / line["name"] for line in runs(folder)]
        else:
            records.read_launch(folder)  # a clear message for a folder of another kind
            found.append(folder)
    return found
