"""Checkpoints that are either whole or do not exist.

A checkpoint is a folder ``checkpoints/0000001000/``: model and optimizer written by PyTorch's distributed
checkpoint (DCP), ``state.json`` (step, counters), ``config.yaml``, and last of all ``COMPLETE`` with the size and
checksum of every file. A folder without ``COMPLETE``, or whose files differ in size, is never loaded. It may lie on
a disk or on an object store, and loads on any number of ranks, however it was sharded.
Distributed checkpoints contain pickles: load only folders you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from lingua.args import cli, read_yaml
from lingua.errors import UserError
from lingua.storage import COMPLETE, Reader, as_path, reaching, remove_folder
from lingua.transformer import Encoder, TransformerArgs

log = logging.getLogger(__name__)
STATE_VERSION = 1  # of what state.json holds
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP says so of one process alone
# Where a checkpoint has it (an ELECTRA with disentangled sharing), the encoder's embedding is a difference to it.
BASE = "generator.embedding.weight"
EMBEDDING = "encoder.embedding.weight"
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]  # several share out the parameters
LEASE_SECONDS = 900  # a reader that says nothing for this long is taken for dead


def checkpoints_folder(run: Path) -> Path:
    """Where the checkpoints of a run folder lie: ``checkpoint.path`` of its config, or inside it."""
    config = run / "config.yaml"
    path = (read_yaml(config).get("checkpoint") or {}).get("path") if config.is_file() else None
    return run / "checkpoints" if path is None else as_path(path)


def complete_checkpoints(root: Path) -> list[Path]:
    """Usable checkpoints in a folder of checkpoints, oldest first; damaged ones are named in the log and left out."""
    usable = []
    for folder in list_checkpoints(root):
        damage = find_damage(folder)
        if damage:
            log.warning("checkpoint %s is not used: %s", folder, damage)
        else:
            usable.append(folder)
    return usable


def list_checkpoints(root: Path) -> list[Path]:
    """Everything that is named like a checkpoint, oldest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


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
    if checksums:
        with ThreadPoolExecutor(8) as pool:  # hashing lets go of Python's lock
            found = pool.map(_sha256, [folder / name for name in files])
            for (name, expected), sha256 in zip(files.items(), found, strict=True):
                if sha256 != expected["sha256"]:
                    return f"{name} has changed since it was written (checksum differs)"
    return None


def newest(root: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints whose every byte is as it was written, or None.

    Damaged ones are named in the log; the one before is taken.
    """
    for folder in reversed(complete_checkpoints(root)):
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


def load(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizers | None,
    group: dist.ProcessGroup | None = None,
    fresh: Sequence[str] = (),
) -> dict[str, Any]:
    """Restore model and optimizer in place and return the saved ``state``; without optimizer, the model alone.

    Every rank of ``group`` calls it, and gets its share of the tensors.

    Args:
        fresh: parts of the model that stay as they are; only without optimizer.

    Raises:
        UserError: the checkpoint holds other tensors or shapes than the model, or is damaged.
    """
    if optimizer is None:
        # Modules, and weights of the model itself, such as the head of an ELECTRA.
        parts = list(dict.fromkeys(name.partition(".")[0] for name, _ in model.named_parameters()))
        unknown = [name for name in fresh if name not in parts]
        if unknown:
            raise UserError(f"init.fresh: the model has no part {unknown[0]}; it has {', '.join(parts)}")
        model_state = {k: v for k, v in get_model_state_dict(model).items() if k.partition(".")[0] not in fresh}
        _load_tensors(folder, {"model": model_state}, group)
        set_model_state_dict(model, model_state, options=StateDictOptions(strict=not fresh))
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        _load_tensors(folder, {"model": model_state, "optimizer": optimizer_state}, group)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return read_state(folder)


def _load_tensors(folder: Path, wanted: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """``dcp.load`` into ``wanted``, with every difference in names and shapes told first."""
    stored = Reader(folder).read_metadata().state_dict_metadata
    keys = {key for key, _ in _flatten(wanted)}
    if f"model.{BASE}" in stored.keys() - keys and f"model.{EMBEDDING}" in keys:
        raise UserError(
            f"checkpoint {folder}: its encoder's embedding is a difference to its generator's (rtd.disentangled=true), "
            "so only such a model can go on from it"
        )
    for key, tensor in _flatten(wanted):
        if not isinstance(tensor, torch.Tensor):
            continue
        if key not in stored:
            raise UserError(f"checkpoint {folder} has no {key}: it was made by another model config")
        if tuple(stored[key].size) != tuple(tensor.shape):
            raise UserError(
                f"checkpoint {folder}: {key} has shape {tuple(stored[key].size)}, the model's is {tuple(tensor.shape)}"
            )
    try:
        dcp.load(wanted, storage_reader=Reader(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # by rank
        failures = sorted({f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values()})
        raise UserError(
            f"checkpoint {folder} cannot be read: {'; '.join(failures)}. Remove it, and the one before is used"
        ) from error


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [
            item for key, value in tree.items() for item in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, tree)]


def remove_old(root: Path, keep: int, keep_every: int = 0, step: float = math.inf) -> None:
    """Delete all but the newest ``keep`` complete checkpoints (-1: none is deleted).

    Those at multiples of ``keep_every`` steps stay, and those that somebody reads (:func:`in_use`). Those after
    ``step``, where the run stands, do not count: it did not resume from them, so their bytes have changed.
    """
    if keep > 0:
        until_now = [folder for folder in list_checkpoints(root) if int(folder.name) <= step]
        for folder in [folder for folder in until_now if find_damage(folder) is None][:-keep]:
            if not (keep_every and int(folder.name) % keep_every == 0) and not _is_in_use(folder):
                remove_folder(folder)


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep a checkpoint from being removed while it is read, also by a process on another machine."""
    lease = folder / f"IN_USE.{uuid.uuid4().hex}"
    done = threading.Event()

    def renew() -> None:
        while True:
            with contextlib.suppress(Exception):  # a folder that cannot be written to is not being trained in
                lease.write_text(json.dumps({"until": time.time() + LEASE_SECONDS, "host": os.uname().nodename}))
            if done.wait(LEASE_SECONDS / 3):
                return

    thread = threading.Thread(target=renew, daemon=True, name="lease")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(Exception):
            lease.unlink(missing_ok=True)


def _is_in_use(folder: Path) -> bool:
    for lease in folder.glob("IN_USE.*"):
        try:
            if json.loads(lease.read_text())["until"] > time.time():
                return True
        except FileNotFoundError:  # given back just now
            continue
        except (ValueError, KeyError):  # being written just now
            return True
    return False


def resolve(path: str | Path) -> Path:
    """The checkpoint folder meant by a run folder, a folder of checkpoints (their newest) or a checkpoint (itself).

    Raises:
        UserError: no such folder, or nothing complete in it.
    """
    path = as_path(path)
    with reaching(path):
        return _resolve(path)


def _resolve(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path}: no such run or checkpoint folder")
    if (path / "state.json").is_file() or (path / COMPLETE).is_file():
        damage = find_damage(path)
        if damage:
            raise UserError(f"checkpoint {path} is damaged: {damage}")
        return path
    root = path if list_checkpoints(path) else checkpoints_folder(path)
    found = complete_checkpoints(root)
    if not found:
        told = f"expected {root}/0000001000/{COMPLETE}"
        if (path / "config.json").is_file():
            told = (
                f"it looks like a model of transformers: python -m lingua.hub import source={path} makes a run of it; "
                f"evaluation and fine-tuning also take model=hf:{path}"
            )
        raise UserError(f"{path}: holds no complete checkpoint ({told})")
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
    # A run that trains on from another one's encoder keeps what is to be known of it in its state.
    config = read_yaml(folder / "config.yaml") | (read_state(folder).get("backbone") or {})
    if "hf" in config:
        raise UserError(f"{folder}: its encoder is {config['hf']} of Hugging Face, trained on: use load_embedder")
    encoder = Encoder(TransformerArgs.of(config["model"]))
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    if f"model.{BASE}" in Reader(folder).read_metadata().state_dict_metadata:
        state[BASE] = torch.empty_like(state[EMBEDDING])
        _load_tensors(folder, {"model": state})
        state[EMBEDDING] += state.pop(BASE)
    else:
        _load_tensors(folder, {"model": state})
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    return encoder.eval(), config


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Fill a model on the CPU with all that its names name in a checkpoint. Raises UserError if it is another's."""
    folder = verified(resolve(path))
    state = {name: torch.empty_like(value, device="cpu") for name, value in model.state_dict().items()}
    _load_tensors(folder, {"model": state})
    model.load_state_dict(state)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class CheckArgs:
    """List the checkpoints of a run, and read every byte of each."""

    path: str = "???"  # run folder, folder of checkpoints, or one checkpoint


def check(args: CheckArgs) -> None:
    """Print a line a checkpoint. Raises UserError if one of them is damaged."""
    path = as_path(args.path)
    with reaching(path):
        _check(path)


def _check(path: Path) -> None:
    folders = [path] if path.name.isdigit() else list_checkpoints(path) or list_checkpoints(checkpoints_folder(path))
    if not folders:
        raise UserError(f"{path}: holds no checkpoint")
    damaged = 0
    for folder in folders:
        damage = find_damage(folder, checksums=True)
        damaged += damage is not None
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}  {size / 1e6:.1f} MB  {damage or 'whole'}")
    if damaged:
        raise UserError(f"{damaged} of {len(folders)} checkpoints cannot be used")


if __name__ == "__main__":
    cli(CheckArgs, check, "python -m lingua.checkpoint")
