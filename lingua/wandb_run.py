"""Weights & Biases beside ``metrics.jsonl``: ``logging.wandb.project=NAME`` (pip install -r requirements-wandb.txt).

The id of its run is kept in ``RUN/wandb_id``, so that a run that is stopped and goes on is one run there too. W&B takes
each step once: what a killed run had sent beyond its last checkpoint stays as it was first sent. It gets the metrics
and the config, and neither the console, nor the source code, nor anything of the environment.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.files import optional, write_atomically

MODES = ("online", "offline", "disabled")


@dataclass
class WandbArgs:
    """Weights & Biases; off unless a project is named. Its key comes from ``wandb login`` or WANDB_API_KEY."""

    project: str | None = None  # turns it on
    entity: str | None = None  # team or user; none: the key's own
    name: str | None = None  # of the run; none: that of the run folder
    group: str | None = None  # of runs shown together
    tags: list[str] = field(default_factory=list)
    # online | offline (files under RUN/wandb for `wandb sync`) | disabled; none: WANDB_MODE if set, else online
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, *MODES):
            raise UserError(f"logging.wandb.mode={self.mode}: expected one of {', '.join(MODES)}")
        given = [name for name in ("entity", "name", "group", "tags", "mode") if getattr(self, name)]
        if self.project is None and given:
            raise UserError(f"logging.wandb.{given[0]} is given, but logging.wandb.project is not, which turns it on")


class WandbRun:
    """The run there. To be made by rank 0 only.

    Args:
        folder: run folder.
        config: the resolved config, free of secrets (:func:`lingua.secrets.check_no_secrets`).

    Raises:
        UserError: the package is missing, nobody is logged in, or the server does not answer.
    """

    def __init__(self, args: WandbArgs, folder: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports may hold anything
        wandb = optional("wandb", "logging.wandb.project", "requirements-wandb.txt")
        mode = args.mode or wandb.setup().settings.mode
        if mode == "online":
            _check_server(wandb.setup().settings.base_url)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_meta=True,  # command line, user, host
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=args.project,
                entity=args.entity,
                name=args.name or folder.resolve().name,
                group=args.group,
                tags=args.tags,
                id=_run_id(folder),
                resume="allow" if mode == "online" else None,
                mode=mode,
                dir=folder,
                config=config,
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logging.wandb: W&B refuses to start a run: {error} (project={args.project}, entity={args.entity}). "
                "logging.wandb.mode=offline keeps the metrics in files for `wandb sync`"
            ) from None

    def write(self, record: dict[str, Any]) -> None:
        """Send a record; ``step`` is required."""
        step = record["step"]
        if step >= self._run.step:  # else sent before, by a process that got further than its last checkpoint
            self._run.log({key: value for key, value in record.items() if key != "step"}, step=step)

    def close(self, exit_code: int = 0) -> None:
        """Send what is left and end the run; an exit code other than 0 shows it as failed."""
        self._run.finish(exit_code=exit_code)


def _run_id(folder: Path) -> str:
    path = folder / "wandb_id"
    if not path.is_file():
        write_atomically(path, uuid.uuid4().hex[:12] + "\n")
    found = path.read_text().strip()
    if not found.isalnum():
        raise UserError(f"{path}: expected the id of a W&B run, found {found!r}: remove the file to start another one")
    return found


def _check_server(url: str) -> None:
    """Raise UserError if no server answers: wandb itself would wait for minutes without a word."""
    import requests  # comes with wandb; knows proxies

    try:
        requests.head(url, timeout=20)
    except requests.RequestException as error:
        raise UserError(
            f"logging.wandb: {url} does not answer ({type(error).__name__}). On machines without a network use "
            "logging.wandb.mode=offline, and `wandb sync` later"
        ) from None
