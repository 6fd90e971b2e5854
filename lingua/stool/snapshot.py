"""The exact code of a run: a copy of tracked and changed files, which is what the job runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import lingua
from lingua.errors import UserError

INFO = "snapshot.json"


def root() -> Path:
    """The folder that holds the packages ``lingua`` and ``apps``."""
    return Path(lingua.__file__).resolve().parent.parent


def take(folder: Path, max_mb: float) -> dict[str, Any]:
    """Copy the code into ``folder`` and describe it: commit, whether files differ from it, number of files.

    With git: every tracked file as it is now, and every new one that is neither ignored nor in a run folder;
    ``git.diff`` beside them is the difference to the commit. Without git: the packages ``lingua`` and ``apps``.

    Raises:
        UserError: more than ``max_mb`` megabytes, with the largest files named.
    """
    source = root()
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None:
        packages = [source / name for name in ("lingua", "apps") if (source / name).is_dir()]
        files = [path.relative_to(source) for package in packages for path in sorted(package.rglob("*"))]
        files = [path for path in files if "__pycache__" not in path.parts]
    else:
        listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        files = [Path(name) for name in sorted(set(listed.split("\0"))) if name]
        runs = _run_folders(files)
        files = [path for path in files if runs.isdisjoint(path.parents)]
    files = [path for path in files if (source / path).is_file()]  # a tracked file may have been deleted
    _check_size(source, files, max_mb)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for path in files:
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, partial / path)
    diff = "" if commit is None else _git(source, "diff", "--binary", "--no-color", "--no-ext-diff", "HEAD") or ""
    changed = "" if commit is None else _git(source, "status", "--porcelain") or ""
    info = {
        "commit": commit.strip() if commit else None,
        "changed": [line[3:] for line in changed.splitlines()],
        "files": len(files),
        "source": str(source),
    }
    (partial / "git.diff").write_bytes(diff.encode("utf-8", "surrogateescape"))
    (partial / INFO).write_text(json.dumps(info, indent=1) + "\n")
    partial.rename(folder)
    return info


def _run_folders(files: list[Path]) -> set[Path]:
    """Folders of runs and sweeps: inside the repository and not ignored, each would be copied into the next."""
    found = set()
    for path in files:
        for folder in path.parents:
            if folder.name == "stool" and path.relative_to(folder).parts[0] in ("code", "launch.json"):
                found.add(folder.parent)
    return found - {Path()}


def check_module(code: Path, module: ModuleType) -> None:
    """Raise UserError if a script of the user's would not be found by the job."""
    path = Path(module.__file__ or "").resolve()
    if "site-packages" in path.parts:
        return
    if not path.is_relative_to(root()) or not (code / path.relative_to(root())).is_file():
        raise UserError(
            f"{path} is not in the copy of the code that the job runs: put it below {root()}, where .gitignore does "
            "not name it"
        )


def next_folder(stool: Path) -> Path:
    """``code/0001``, ``code/0002``, ...: a snapshot is never overwritten."""
    taken = sorted(int(path.name) for path in (stool / "code").glob("[0-9]*") if path.name.isdigit())
    return stool / "code" / f"{(taken[-1] if taken else 0) + 1:04d}"


def _check_size(source: Path, files: list[Path], max_mb: float) -> None:
    sizes = {path: (source / path).stat().st_size for path in files}
    total = sum(sizes.values()) / 1e6
    if total > max_mb:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{path} ({sizes[path] / 1e6:.1f} MB)" for path in largest)
        raise UserError(
            f"the code in {source} has {total:.0f} MB, more than snapshot_mb={max_mb:g}; the largest: {named}. "
            "List what is no code in .gitignore, or raise snapshot_mb"
        )


def _git(folder: Path, *words: str) -> str | None:
    """What git prints, or None where there is no git, no repository or no commit."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Names and lines of files may be in any encoding.
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None
