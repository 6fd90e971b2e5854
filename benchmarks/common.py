"""What every benchmark records beside its figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment(*packages: str) -> dict[str, Any]:
    """Commit (with ``+`` if files differ from it), processor, number of CPUs, how many processes wanted one over the
    last minutes (the benchmark's own among them), Python and package versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load_averages": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def write_result(out: str, result: dict[str, Any]) -> None:
    """Print ``result`` as JSON and write it to the file ``out``."""
    text = json.dumps(result, indent=1)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(text + "\n")
    print(text)


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
