"""A tokenizer from the Hugging Face hub into a folder.

    python setup/download_tokenizer.py repo=OWNER/NAME out=data/tokenizer

fetches ``tokenizer.json`` and the small files that name its special tokens, tries it, and says how to use it.
With ``file=original/tokenizer.model`` it fetches that file instead, for ``tokenizer.name=tiktoken``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script from a checkout

from lingua.args import cli
from lingua.download import fetch, list_repository
from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from lingua.vocabularies import SMALL_FILES


@dataclass
class DownloadTokenizerArgs:
    """Fetch a tokenizer.json and the small files beside it from the hub."""

    repo: str = "???"  # OWNER/NAME on the hub
    out: str = "???"  # folder to write
    file: str = "tokenizer.json"  # or a tiktoken file
    revision: str = "main"  # branch, tag or commit


def download_tokenizer(args: DownloadTokenizerArgs) -> None:
    """Fetch and try the tokenizer. Raises UserError if it cannot be had or used."""
    folder = Path(args.out)
    commit, files = list_repository(args.repo, "model", args.revision, folder)
    if args.file not in files:
        near = [file for file in files if "token" in file.lower()]
        raise UserError(f"{args.repo}: has no {args.file}; it has {', '.join(near or files)}: name one with file=")
    path = fetch(args.repo, "model", commit, args.file, folder)
    name = "tiktoken"
    if args.file.endswith(".json"):
        name, path = "hf", folder
        for small in set(SMALL_FILES) & set(files):
            fetch(args.repo, "model", commit, small, folder)
    tokenizer = build_tokenizer(TokenizerArgs(name, str(path)))
    appended = f", {' '.join(tokenizer.appended)} appended" if tokenizer.appended else ""
    print(f"{args.repo} at {commit[:12]}: {tokenizer.vocab_size:,} ids{appended}")
    print(f"use it with tokenizer.name={name} tokenizer.path={path}")


if __name__ == "__main__":
    cli(DownloadTokenizerArgs, download_tokenizer, "python setup/download_tokenizer.py")
