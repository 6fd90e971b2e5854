"""What all benchmarks and experiments share: their command, and what they record beside their figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from lingua.args import cli
from lingua.errors import UserError

Args = TypeVar("Args")


def command(args_class: type[Args], main: Callable[[Args], None], name: str, argv: list[str] | None = None) -> None:
    """:func:`lingua.args.cli` for a program that runs for long and then writes its field ``out``, and ``plot`` if it
    has one: whether they can be written is found out first."""

    def checked(args: Args) -> None:
        plot = getattr(args, "plot", None)
        for file in (args.out, *([f"{plot}.png", f"{plot}.svg"] if plot else [])):  # type: ignore[attr-defined]
            check_writable(Path(file))
        main(args)

    cli(args_class, checked, name, argv)


def check_writable(file: Path) -> None:
    """Make the folder of a file. Raises UserError if the file cannot be written; one that is there stays as it is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror}): give another file") from None


def environment(*packages: str) -> dict[str, Any]:
    """Commit (with ``+`` if files differ from it), processor, number of CPUs, how many processes wanted one over the
    last minutes (the benchmark's own among them), Python and versions of the packages that are there."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load_averages": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def write_result(out: str, result: dict[str, Any]) -> None:
    """Print ``result`` as JSON and write it to the file ``out``."""
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(text + "\n")


def run_parts(
    parts: dict[str, Callable[[], dict[str, Any]]], minutes: float, keep: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """What each part returns, by name, with its ``seconds``.

    A part that fails has the traceback under ``failed``; one that would begin after ``minutes`` has ``not run``.

    Args:
        keep: called with all results so far after each part.
    """
    begun = time.monotonic()
    results: dict[str, Any] = {}
    for part, run in parts.items():
        started = time.monotonic()
        if started - begun > 60 * minutes:
            results[part] = {"not run": f"{minutes:g} minutes were over"}
            continue
        print(f"{part} ...", flush=True)
        try:
            results[part] = run()
        except Exception:
            results[part] = {"failed": traceback.format_exc()[-4000:]}
        results[part]["seconds"] = round(time.monotonic() - started, 1)
        if keep is not None:
            keep(results)
    return results


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # not a checkout


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
