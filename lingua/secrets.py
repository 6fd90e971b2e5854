"""Keeps secrets out of what a run writes: its config goes into ``config.yaml``, checkpoints, logs and W&B."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from lingua.errors import UserError

_SHAPES = {
    "a user name and password in an address": r"://[^/@\s:]*:[^/@\s]+@",
    "a key in an address": r"[?&](?:[\w-]*(?:token|signature|secret|password|credential)|sig|api_?key)=[^&\s]",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
}
# HF_TOKEN, AWS_SECRET_ACCESS_KEY; not HF_TOKEN_PATH or MY_TOKENIZER
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|SECRET_KEY)$", re.IGNORECASE)


def check_no_secrets(config: dict[str, Any]) -> None:
    """Raise UserError if a value of a config holds a secret; the message names the key, and not the value.

    What counts: passwords and signatures in addresses, tokens of known shapes, and the value of any environment
    variable that is named like a secret.
    """
    of_environment = {value: name for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) > 7}
    for key, value in _texts(config):
        found = next((what for what, shape in _SHAPES.items() if re.search(shape, value, re.IGNORECASE)), None)
        found = found or next(
            (f"the value of ${name}" for secret, name in of_environment.items() if secret in value), None
        )
        if found:
            raise UserError(
                f"{key} holds {found}. The config is written to config.yaml, checkpoints and logs: give secrets "
                "through the environment or the credential files of the service"
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a nested config, keys that the user chose among them, with the dotted key it stands at."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"a key of {key or 'the config'}", str(name)
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, f"{key}.{number}")
