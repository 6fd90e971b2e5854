"""Files of a repository on the Hugging Face hub, one by one, so that an interrupted download goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.files import FIRST_WAIT, TRIES, optional, write_atomically

STAMP = "source.json"


def list_repository(repo: str, repo_type: str, revision: str, folder: Path) -> tuple[str, list[str]]:
    """The commit that ``revision`` means and the files in it. What is said once is kept in ``folder/source.json``, so
    that a download that goes on weeks later gets the same files.

    Raises:
        UserError: no such repository, no network, or ``folder`` holds another repository or revision.
    """
    path = folder / STAMP
    wanted = {"repo": repo, "repo_type": repo_type, "revision": revision}
    if path.is_file():
        said = json.loads(path.read_text())
        found = {key: said[key] for key in wanted}
        if found != wanted:
            raise UserError(f"{folder}: holds files of {found}, wanted {wanted}: choose another folder")
        return said["commit"], said["files"]
    hub = optional("huggingface_hub", f"reading {repo} from the hub")
    try:
        info = hub.HfApi().repo_info(repo, repo_type=repo_type, revision=revision)
    except Exception as error:  # no network, no such repository, no permission: types of several libraries
        raise UserError(f"{repo}: the hub does not answer for it: {_said(error)}; {_hint(hub)}") from None
    files = sorted(sibling.rfilename for sibling in info.siblings or [])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**wanted, "commit": info.sha, "files": files}))
    return info.sha, files


def fetch(repo: str, repo_type: str, commit: str, file: str, folder: Path) -> Path:
    """``folder/FILE``, downloaded unless it is there; what arrived of it before a break is kept.

    Raises:
        UserError: several tries failed.
    """
    path = folder / file
    if path.is_file():  # the library gives a file its name when all of it is there
        return path
    hub = optional("huggingface_hub", f"reading {repo} from the hub")
    reason = ""
    for attempt in range(TRIES):
        try:
            return Path(hub.hf_hub_download(repo, file, repo_type=repo_type, revision=commit, local_dir=folder))
        except Exception as error:  # of several libraries
            reason = f"{type(error).__name__}: {_said(error)}"
        if hub.constants.HF_HUB_OFFLINE:
            break
        if attempt + 1 < TRIES:
            time.sleep(FIRST_WAIT * 2**attempt)
    raise UserError(
        f"{repo}: cannot fetch {file}: {reason}; {_hint(hub)}; the same command goes on with what is missing"
    )


def _hint(hub: Any) -> str:
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it, or copy the files here from a machine with a network"
    return "check the name, the network and (for gated repositories) HF_TOKEN"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
