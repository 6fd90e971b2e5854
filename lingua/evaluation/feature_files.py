"""Features in memory-mapped files, keyed by what decides them: a second probe costs no forward pass.

``FOLDER/KEY/layer_05.npy`` is [N, D] float32; KEY is a hash of the model's weights, the token ids of all texts, and
how they are pooled. Delete the folder when you are done: nothing refers to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from lingua.distributed import World
from lingua.errors import UserError
from lingua.evaluation.probe import check_finite
from lingua.frozen import FrozenEncoder, Sequences
from lingua.progress import Progress


class FeatureFiles:
    """Makes and finds feature files. Every rank of ``world`` calls :meth:`get` alike and encodes its share.

    Args:
        folder: on a disk that all ranks share.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self._weights: dict[int, bytes] = {}  # by id of the encoder
        self._made: list[Path] = []

    def get(
        self,
        encoder: FrozenEncoder,
        sequences: Sequences,
        layers: Sequence[int],
        pooling: str = "mean",
        batch_tokens: int = 16_384,
        final_norm: bool = True,
        title: str = "features",
    ) -> list[np.ndarray]:
        """Features [N, D] of each layer (counted from 0), read-only, from their files or computed now.

        Raises:
            UserError: NaN or infinite features, or no room for them.
        """
        pooled = pooling if sequences.places is None else "none"
        key = hashlib.sha256(f"{pooled} {final_norm}".encode())
        key.update(self._weights_digest(encoder) + sequences.digest())
        folder = self.folder / self.world.from_first(key.hexdigest()[:32])
        shape = (int(sequences.first_rows()[-1]), encoder.dim)
        paths = {layer: folder / f"layer_{layer:02d}.npy" for layer in layers}
        how = (pooling, batch_tokens, final_norm, title)
        missing = self._missing(paths, shape)
        if missing:
            with _alone(folder) if self.world.is_first else nullcontext():
                missing = self._missing(paths, shape)  # another evaluation may have made them meanwhile
                if missing:
                    self._make({layer: paths[layer] for layer in missing}, shape, encoder, sequences, how)
        if not missing:
            encoder.truncated += sequences.truncated
        # copy-on-write, because PyTorch warns of arrays that it cannot write to
        return [npy.open_memmap(paths[layer], mode="c") for layer in layers]

    def _missing(self, paths: dict[int, Path], shape: tuple[int, int]) -> list[int]:
        return self.world.from_first([layer for layer in paths if not _is_whole(paths[layer], shape)])

    def _make(
        self,
        paths: dict[int, Path],
        shape: tuple[int, int],
        encoder: FrozenEncoder,
        sequences: Sequences,
        how: tuple[str, int, bool, str],
    ) -> None:
        """Write the file of each layer; what fails leaves none."""
        *options, title = how
        partial = {layer: path.with_suffix(".partial") for layer, path in paths.items()}
        try:
            if self.world.is_first:
                for path in partial.values():
                    _allocate(path, shape)
            self.world.gather(None)  # the files are there
            out = [npy.open_memmap(path, mode="r+") for path in partial.values()]
            part, texts = (self.world.rank, self.world.size), len(sequences.ids) // self.world.size
            with Progress(title, texts, "tokens") if self.world.is_first else nullcontext() as progress:
                encoder.run(sequences, list(paths), *options, out, part, progress)
            for array in out:
                array.flush()
            del out
            self.world.gather(None)  # every rank has written
            if self.world.is_first:
                for layer, path in partial.items():
                    check_finite(npy.open_memmap(path, mode="r"), f"features of layer {layer}")
                    path.replace(paths[layer])
                    self._made.append(paths[layer])
            self.world.gather(None)  # the files have their names
        finally:
            if self.world.is_first:
                for path in partial.values():
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the files that were made here, on rank 0; those found stay, and the folder if there are any."""
        for path in self._made:
            path.unlink(missing_ok=True)
        for folder in [*{path.parent for path in self._made}, self.folder]:
            with suppress(OSError):  # not empty
                folder.rmdir()
        self._made.clear()

    def _weights_digest(self, encoder: FrozenEncoder) -> bytes:
        if id(encoder) not in self._weights:
            self._weights = {id(encoder): encoder.weights_digest() if self.world.is_first else b""}
        return self._weights[id(encoder)]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it against other evaluations that would write the same files at the same time."""
    lock = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            with suppress(OSError):  # on a file system without locks, none
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed or the process ends
            if not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                continue  # removed by the one that held it
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_whole(path: Path, shape: tuple[int, int]) -> bool:
    try:
        return npy.open_memmap(path, mode="r").shape == shape
    except (OSError, ValueError):  # not there, or cut
        return False


def _allocate(path: Path, shape: tuple[int, int]) -> None:
    """Make the file with all its blocks: a mapped write to a full disk would kill the process."""
    try:
        with path.open("wb") as file:
            npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            if shape[0]:
                os.posix_fallocate(file.fileno(), file.tell(), shape[0] * shape[1] * 4)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"{path}: no room for {shape[0] * shape[1] * 4 / 1e9:.2f} GB of features: {error.strerror}; free some, "
            "name another folder with features=FOLDER, or ask for fewer layers or rows"
        ) from None
