"""What makes a resumed run the same run: its folder to itself, the same config, tokenizer and data."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import math
import os
from pathlib import Path
from typing import Any, TextIO

from lingua.args import defaults, read_yaml, to_dict
from lingua.errors import UserError
from lingua.tokenizer import Tokenizer, TokenizerArgs
from lingua.transformer import TransformerArgs

log = logging.getLogger(__name__)

# A resumed run may change these: they do not touch the mathematics. Everything else only by resume.allow.
FREE_TO_CHANGE = (
    "dump_dir", "micro_rows", "compile", "distributed", "logging", "stats", "profiling", "checkpoint", "validation",
    "resume", "model.attention",
    "data.path", "data.queries", "data.collection", "backbone", "cache_states",
    "data.root_dir", "data.validation", "data.prefetch", "data.cache_dir", "data.cache_gb", "optim.max_nonfinite",
)  # fmt: skip


def lock(folder: Path) -> TextIO:
    """Take a run folder for this process, until the returned file is closed.

    Raises:
        UserError: another process has it.
    """
    file = (folder / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise UserError(
            f"{folder}: another process ({holder}) is training in this folder; stop it, or give another dump_dir"
        ) from None
    except OSError as error:  # file systems without locks
        log.warning("%s: cannot be locked (%s): see to it that no other process trains there", folder, error.strerror)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def check_config(checkpoint: Path, args: Any) -> None:
    """Compare a run's config with that of its checkpoint.

    Raises:
        UserError: a key differs that is neither free to change nor in ``args.resume.allow``.
    """
    new = flat(to_dict(args))
    # What the config did not know yet when the checkpoint was written stood at what is now its default.
    old = flat(defaults(type(args))) | flat(read_yaml(checkpoint / "config.yaml"))
    allowed = args.resume.allow
    unknown = [key for key in allowed if key not in new and key != "data"]
    if unknown:
        raise UserError(f"resume.allow names {unknown[0]}, which is no key of this config")
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key) and not _is_free(key)]
    refused = [key for key in changed if key not in allowed]
    if refused:
        key, others = refused[0], f" (and {len(refused) - 1} more: {refused[1:]})" if refused[1:] else ""
        raise UserError(
            f"{checkpoint} is of a run with {key}={old.get(key)}, this command says {key}={new.get(key)}{others}. "
            f"Resume it with the same config, allow the change with 'resume.allow=[{','.join(refused)}]', or give a "
            "new dump_dir"
        )
    for key in changed:
        log.warning("resuming with %s=%s instead of %s, as resume.allow says", key, new.get(key), old.get(key))


def check_tokenizer(checkpoint: Path, state: dict[str, Any], tokenizer: Tokenizer, args: TokenizerArgs) -> None:
    """Raise UserError unless ``tokenizer``, built from ``args``, is the checkpoint's: ids would mean other text."""
    identity = tokenizer.identity()
    if state["tokenizer"] != identity:
        then, now = (
            f"{i['kind']}, {i['vocab_size']} ids, sha256 {i['sha256'][:8]}" for i in (state["tokenizer"], identity)
        )
        raise UserError(
            f"{checkpoint} was trained with another tokenizer ({then}) than {args.path or args.name} is now ({now}); "
            "put the old one back, or train in a new dump_dir"
        )


@functools.cache
def code_version() -> dict[str, str]:
    """A checksum of the source files of this repository that training runs on."""
    root = Path(__file__).parent.parent
    sources = hashlib.sha256()
    for path in sorted((*root.glob("lingua/**/*.py"), *root.glob("apps/**/*.py"))):
        sources.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return {"sha256 of lingua/ and apps/": sources.hexdigest()[:16]}


def check_code(checkpoint: Path, state: dict[str, Any]) -> None:
    """Say it in the log if other code wrote the checkpoint."""
    if state.get("code") not in (None, code_version()):
        log.warning("%s was written by other code than this; the run may not go on bit by bit", checkpoint)


def check_init(checkpoint: Path, model: TransformerArgs, fresh: list[str]) -> None:
    """Compare what an encoder computes with that of the checkpoint it starts from, where shapes of weights do not tell.

    Other positions or another epsilon are said in the log: a model may be meant to learn longer rows.

    Raises:
        UserError: other heads.
    """
    if "encoder" in fresh:
        return
    theirs = TransformerArgs.of(read_yaml(checkpoint / "config.yaml")["model"])
    for name in ("n_heads", "head_size"):
        if getattr(theirs, name) != getattr(model, name):
            raise UserError(
                f"init.path: the encoder of {checkpoint} has {theirs.n_heads} heads of {theirs.head_size}, this config "
                f"means {model.n_heads} of {model.head_size}: use the `model` section of its config.yaml"
            )
    old, new = flat(to_dict(theirs)), flat(to_dict(model))
    for name in (name for name in old if name.startswith(("rope_", "norm_eps"))):
        was, now = old[name], new[name]
        if not math.isclose(was, now, rel_tol=1e-6):  # files of models may have rounded it
            log.warning("starting from %s with model.%s=%s instead of %s", checkpoint, name, now, was)


def check_data(checkpoint: Path, state: dict[str, Any], fingerprints: dict[str, str], allowed: list[str]) -> None:
    """Raise UserError if a source holds other tokens than when the checkpoint was written."""
    for name, found in fingerprints.items():
        if state["data"].get(name, found) == found:
            continue
        if "data" not in allowed:
            raise UserError(
                f"data, {name}: the files hold other text than when {checkpoint} was written; name the old ones "
                "(data.root_dir, data.path), allow it with 'resume.allow=[data]', or give a new dump_dir"
            )
        log.warning("resuming on other text in source %s, as resume.allow says", name)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return items


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)
