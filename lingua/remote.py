"""Token shards on an object store, read in blocks through a bounded cache on the local disk."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from lingua.errors import UserError
from lingua.files import connection_lost, is_remote, tried, write_atomically
from lingua.manifest import AGAIN, DOCS_DTYPE, NAME, Manifest, parse_manifest

DEFAULT_GB = 10.0  # of the cache
BLOCK_BYTES = 4 << 20  # read at once: what the training stream reads on end


class BlockCache:
    """Blocks of remote files on the local disk; the least recently used go when they would exceed ``max_bytes``.

    Blocks are named by the checksum of their file, so a file that was written anew is never mistaken for the old
    one. Processes may share a folder.
    """

    def __init__(self, folder: str | None, max_gb: float) -> None:
        self.folder = Path(folder or Path(tempfile.gettempdir()) / f"token_blocks_{os.getuid()}")
        self.max_bytes = round(max_gb * 1e9)
        if self.max_bytes < 2 * BLOCK_BYTES:
            raise UserError(f"data.cache_gb={max_gb:g}: at least {2 * BLOCK_BYTES / 1e9:g}, two blocks")
        self.fetched = 0  # blocks that were not there

    def block(self, url: str, checksum: str, index: int, size: int) -> np.ndarray:
        """Bytes [index * BLOCK_BYTES, + size) of a remote file, as a memory map of the local copy."""
        path = self.folder / f"{checksum[:32]}_{index:06d}"
        if not path.is_file() or path.stat().st_size != size:
            self._fetch(url, path, index, size)
        now = time.time_ns()
        os.utime(path, ns=(now, now))  # the kernel's own clock for this ticks too slowly to order blocks by
        return np.memmap(path, dtype=np.uint8, mode="r")  # stays readable should the file be evicted

    def _fetch(self, url: str, path: Path, index: int, size: int) -> None:
        content = read_remote(url, index * BLOCK_BYTES, size)
        self.fetched += 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            write_atomically(path, content)
        except OSError as error:
            raise UserError(
                f"data.cache_dir={self.folder}: cannot be written: {error.strerror}; free space, lower data.cache_gb, "
                "or give another folder"
            ) from None

    def _make_room(self, size: int) -> None:
        blocks = []
        for entry in os.scandir(self.folder):
            try:
                blocks.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:  # another process was faster
                continue
        total = sum(n for _, n, _ in blocks)
        for _, n, path in sorted(blocks):
            if total + size <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= n


def read_remote(url: str, start: int, size: int) -> bytes:
    """``size`` bytes of a remote file, in one request for just these (an open file would read ahead).

    Raises:
        UserError: they cannot be had, after some tries.
    """
    system, path = fsspec.core.url_to_fs(url)
    try:
        content = tried(
            lambda: system.cat_file(path, start=start, end=start + size),
            lambda reason: connection_lost(url, start, reason),
        )
    except FileNotFoundError:
        raise UserError(f"{url}: cannot be read at byte {start}: it is gone; {AGAIN}") from None
    if len(content) > size:
        raise UserError(f"{url}: its server sends only whole files: copy the folder to a disk to read parts of it")
    if len(content) < size:
        raise UserError(f"{url}: {len(content)} bytes at {start}, expected {size}: the shard is truncated; {AGAIN}")
    return content


class RemoteTokens:
    """A shard of a remote folder that can be sliced like the memory map of a local one."""

    def __init__(self, url: str, checksum: str, dtype: str, tokens: int, cache: BlockCache) -> None:
        self.dtype, self._tokens = np.dtype(dtype), tokens
        self._url, self._checksum, self._cache = url, checksum, cache
        self._block = functools.lru_cache(maxsize=2)(self._load)

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._tokens)
        per_block = BLOCK_BYTES // self.dtype.itemsize
        pieces = [
            self._block(index)[max(0, start - index * per_block) : stop - index * per_block]
            for index in range(start // per_block, -(-stop // per_block))
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def _load(self, index: int) -> np.ndarray:
        size = min(BLOCK_BYTES, self._tokens * self.dtype.itemsize - index * BLOCK_BYTES)
        return self._cache.block(self._url, self._checksum, index, size).view(self.dtype)


@dataclass
class RemoteManifest(Manifest):
    """A manifest whose shards are elsewhere."""

    url: str = ""
    cache: BlockCache | None = None

    def open_tokens(self, shard: int) -> Any:
        """Token ids of a shard, to be sliced."""
        entry = self.shards[shard]
        return RemoteTokens(
            f"{self.url}/{entry.name}.tokens", entry.tokens_sha256, self.dtype, entry.tokens, self.cache
        )

    def open_docs(self, shard: int) -> np.ndarray:
        """End offset of each document of a shard, read whole."""
        entry = self.shards[shard]
        return np.frombuffer(read_remote(f"{self.url}/{entry.name}.docs", 0, entry.docs_bytes), dtype=DOCS_DTYPE)


def load_remote_manifest(url: str, cache: BlockCache) -> RemoteManifest:
    """The manifest of a remote folder; every shard must be there with its recorded size. Raises UserError."""
    url = url.rstrip("/")
    try:
        system, path = fsspec.core.url_to_fs(url)
        sizes = {info["name"].rpartition("/")[2]: info["size"] for info in system.ls(path, detail=True)}
    except Exception as error:  # what lies below fsspec raises types of its own
        raise UserError(f"{url}: cannot be listed: {error or type(error).__name__}") from None
    if NAME not in sizes:
        raise UserError(f"{url}: no {NAME} there, so this is not a finished folder of shards; {AGAIN}")
    local = parse_manifest(read_remote(f"{url}/{NAME}", 0, sizes[NAME]).decode(), f"{url}/{NAME}", Path())
    manifest = RemoteManifest(**{**vars(local), "url": url, "cache": cache})
    for shard in manifest.shards:
        for name, size in ((f"{shard.name}.tokens", shard.tokens_bytes), (f"{shard.name}.docs", shard.docs_bytes)):
            if sizes.get(name) != size:
                raise UserError(f"{url}/{name}: {sizes.get(name, 'no')} bytes there, expected {size}; {AGAIN}")
    return manifest


def list_sources(root: str) -> list[str]:
    """Names of the sources below a local or remote root: folders ``NAME/train``. Raises UserError."""
    if not is_remote(root):
        if not Path(root).is_dir():
            raise UserError(f"data.root_dir={root}: no such folder; setup/prepare_data.py makes one from raw text")
        return sorted(path.parent.name for path in Path(root).glob("*/train"))
    try:
        system, path = fsspec.core.url_to_fs(root)
        found = system.glob(f"{path.rstrip('/')}/*/train/{NAME}")
    except Exception as error:
        raise UserError(f"data.root_dir={root}: cannot be listed: {error or type(error).__name__}") from None
    return sorted(name.split("/")[-3] for name in found)
