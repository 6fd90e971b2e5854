"""A finished folder of shards to an object store, so that what is there is either whole or not data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from lingua.errors import UserError
from lingua.files import TRIES, tried
from lingua.manifest import NAME
from lingua.progress import Progress

MARK = "upload.partial"  # beside an unfinished upload: which preparation it is of


def upload(folder: Path, url: str) -> None:
    """Copy ``folder`` to ``url``, manifests last: readers take a folder without one for unfinished. What an
    interrupted upload of the same folder has sent is not sent again.

    Raises:
        UserError: several tries failed, or another preparation is there.
    """
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == NAME, path))
    manifests = [path for path in paths if path.name == NAME]
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"out={url}: {error}") from None
    targets = {path: f"{root.rstrip('/')}/{path.relative_to(folder).as_posix()}" for path in paths}
    mark = f"{root.rstrip('/')}/{MARK}"
    identity = hashlib.sha256(b"".join(path.read_bytes() for path in manifests)).hexdigest().encode()

    there = _try(url, lambda: {path: info["size"] for path, info in system.find(root, detail=True).items()})
    found = [path for path in manifests if targets[path] in there]
    same = [_try(url, lambda t=targets[path]: system.cat(t)) == path.read_bytes() for path in found]
    if not all(same):
        raise UserError(f"{url}: holds another preparation; choose another out, or delete what is there")
    if mark in there:
        if _try(url, lambda: system.cat(mark)) != identity:
            there = {}  # an unfinished upload of something else
    elif len(same) < len(manifests):
        there = {}
    _try(url, lambda: system.pipe(mark, identity))
    with Progress(f"{url}: uploading", sum(path.stat().st_size for path in paths), "bytes") as progress:
        for path, target in targets.items():
            size = path.stat().st_size
            if there.get(target) != size:
                _try(url, lambda p=path, t=target: system.put_file(str(p), t))
            progress.advance(size, size)
    _try(url, lambda: system.rm(mark))


def _try(url: str, action: Callable[[], Any]) -> Any:
    def failed(reason: str) -> str:
        return f"{url}: cannot be written after {TRIES} tries ({reason}); the same command goes on with the rest"

    try:
        return tried(action, failed)
    except FileNotFoundError as error:
        raise UserError(f"{url}: cannot be written: {error}: make the bucket first, or correct its name") from None
