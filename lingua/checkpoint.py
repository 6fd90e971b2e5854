"""Checkpoints that are either whole or do not exist.

A checkpoint is a folder ``checkpoints/0000001000/``: model and optimizer written by PyTorch's distributed
checkpoint, ``state.json`` (step, counters), ``config.yaml``, and last of all ``COMPLETE`` with the size and
checksum of every file. A folder without ``COMPLETE``, or whose files differ in size, is never loaded.
Distributed checkpoints contain pickles: load only folders you trust.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from lingua.args import read_yaml
from lingua.errors import UserError
from lingua.transformer import Encoder, TransformerArgs

log = logging.getLogger(__name__)
COMPLETE = "COMPLETE"
STATE_VERSION = 1  # of what state.json holds


@dataclass
class DumpArgs:
    """When checkpoints are written and how many stay."""

    every: int = 1000  # steps between checkpoints; the last step always has one
    keep: int = -1  # newest checkpoints to keep; -1 keeps all

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"checkpoint.dump.every={self.every}: expected at least 1")
        if self.keep == 0 or self.keep < -1:
            raise UserError(f"checkpoint.dump.keep={self.keep}: expected -1 (all) or at least 1")


@dataclass
class CheckpointArgs:
    """Checkpointing."""

    dump: DumpArgs = field(default_factory=DumpArgs)


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], config_yaml: str
) -> None:
    """Write one checkpoint; it counts only once ``COMPLETE`` is there.

    Raises:
        UserError: the disk is full or the folder cannot be written. What was written is removed; earlier
            checkpoints are untouched.
    """
    try:
        if folder.exists():  # left by a run that died while saving
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        with _quiet():
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)
        (folder / "state.json").write_text(json.dumps({"version": STATE_VERSION, **state}, indent=1))
        (folder / "config.yaml").write_text(config_yaml)
        files = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        partial = folder / f"{COMPLETE}.partial"
        partial.write_text(json.dumps(files, indent=1))
        partial.rename(folder / COMPLETE)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        cause = _write_failure(error)
        if cause is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"cannot write checkpoint {folder}: {cause}. Free space or give another dump_dir; "
            "earlier checkpoints are intact and the same command goes on from the newest"
        ) from error


def _write_failure(error: BaseException) -> str | None:
    """What the disk had against it, if that is what ``error`` is about; DCP wraps the errors of each rank."""
    if isinstance(error, CheckpointException):
        return next(filter(None, (_write_failure(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # PyTorch's zip writer notices a short write only by its position in the file.
    if isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)):
        return "a file could not be written to its end (No space left on device?)"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def complete_checkpoints(run: Path) -> list[Path]:
    """Usable checkpoints of a run folder, oldest first; damaged ones are named in the log and left out."""
    usable = []
    for folder in sorted((run / "checkpoints").glob("[0-9]*")):
        damage = find_damage(folder)
        if damage:
            log.warning("checkpoint %s is not used: %s", folder, damage)
        else:
            usable.append(folder)
    return usable


def find_damage(folder: Path, checksums: bool = False) -> str | None:
    """What is wrong with a checkpoint folder, or None. ``checksums`` also re-reads every byte."""
    listing = folder / COMPLETE
    if not listing.is_file():
        return f"no {COMPLETE} file: it was still being written when the run stopped"
    try:
        files = json.loads(listing.read_text())
        if "state.json" not in files or not all(file.keys() >= {"bytes", "sha256"} for file in files.values()):
            raise TypeError
    except (ValueError, TypeError, AttributeError):
        return f"{COMPLETE} is not the list of files it should be"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
        if checksums and _sha256(path) != expected["sha256"]:
            return f"{name} has changed since it was written (checksum differs)"
    return None


def newest(run: Path) -> Path | None:
    """The newest checkpoint of a run folder whose every byte is as it was written, or None.

    Damaged ones are named in the log; the one before is taken.
    """
    for folder in reversed(complete_checkpoints(run)):
        damage = find_damage(folder, checksums=True)
        if damage is None:
            return folder
        log.warning("checkpoint %s is not used: %s", folder, damage)
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The ``state`` that was saved with a checkpoint. Raises UserError if another version of the code wrote it."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"{folder}/state.json: format {state.get('version')}, this code reads {STATE_VERSION}: "
            "use the version of the code that wrote it"
        )
    return state


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Restore model and optimizer in place and return the saved ``state``; without optimizer, the model alone.

    Raises:
        UserError: the checkpoint holds other tensors or shapes than the model, or is damaged.
    """
    if optimizer is None:
        model_state = get_model_state_dict(model)
        _load_tensors(folder, {"model": model_state})
        set_model_state_dict(model, model_state)
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        _load_tensors(folder, {"model": model_state, "optimizer": optimizer_state})
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return read_state(folder)


def _load_tensors(folder: Path, wanted: dict[str, Any]) -> None:
    """``dcp.load`` into ``wanted``, with every difference in names and shapes told first."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for key, tensor in _flatten(wanted):
        if not isinstance(tensor, torch.Tensor):
            continue
        if key not in stored:
            raise UserError(f"checkpoint {folder} has no {key}: it was made by another model config")
        if tuple(stored[key].size) != tuple(tensor.shape):
            raise UserError(
                f"checkpoint {folder}: {key} has shape {tuple(stored[key].size)}, the model's is {tuple(tensor.shape)}"
            )
    with _quiet():
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [
            item for key, value in tree.items() for item in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, tree)]


def remove_old(run: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints (-1: none is deleted)."""
    if keep > 0:
        for folder in complete_checkpoints(run)[:-keep]:
            (folder / COMPLETE).unlink()  # first, so that a half-removed folder is not mistaken for whole
            shutil.rmtree(folder)


def resolve(path: str | Path) -> Path:
    """The checkpoint folder meant by a run folder (its newest) or a checkpoint folder (itself).

    Raises:
        UserError: no such folder, or nothing complete in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such run or checkpoint folder")
    if (path / "state.json").is_file() or (path / COMPLETE).is_file():
        damage = find_damage(path)
        if damage:
            raise UserError(f"checkpoint {path} is damaged: {damage}")
        return path
    found = complete_checkpoints(path)
    if not found:
        raise UserError(f"{path}: holds no complete checkpoint (expected {path}/checkpoints/0000001000/{COMPLETE})")
    return found[-1]


def verified(folder: Path) -> Path:
    """``folder``, once every byte has been checked: an evaluation must not quietly read another checkpoint.

    Raises:
        UserError: it is damaged.
    """
    damage = find_damage(folder, checksums=True)
    if damage:
        raise UserError(f"checkpoint {folder} is damaged: {damage}. Name another checkpoint, or remove this one")
    return folder


def load_encoder_weights(path: str | Path) -> tuple[Encoder, dict[str, Any]]:
    """The encoder of a run, on the CPU and in eval mode, with the run's config.

    Args:
        path: run folder (newest complete checkpoint) or checkpoint folder, of any app.
    """
    folder = verified(resolve(path))
    config = read_yaml(folder / "config.yaml")
    fields = TransformerArgs.__dataclass_fields__
    encoder = Encoder(TransformerArgs(**{k: v for k, v in config["model"].items() if k in fields}))
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    _load_tensors(folder, {"model": state})
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    return encoder.eval(), config


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
