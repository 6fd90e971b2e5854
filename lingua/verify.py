"""Read prepared data again, byte by byte: ``python -m lingua.verify folder=DIR``.

DIR is what setup/prepare_data.py wrote (``out``), one source of it, or one split of a source.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lingua.args import cli
from lingua.errors import UserError
from lingua.files import is_remote
from lingua.manifest import NAME, verify
from lingua.preparation.languages import described


@dataclass
class VerifyArgs:
    """Read prepared data again and check every byte."""

    folder: str = "???"  # prepared data: all of it, a source, or a split


def verify_all(args: VerifyArgs) -> None:
    """Check every split below ``args.folder`` and print what it holds. Raises UserError, after all are checked, if
    there is none or one is damaged."""
    if is_remote(args.folder):
        raise UserError(f"folder={args.folder}: only what is on a disk can be verified: copy it here first")
    folder = Path(args.folder)
    unfinished = sorted(path for path in folder.glob("*.partial") if path.is_dir())
    splits = sorted(path.parent for path in folder.rglob(NAME) if not set(unfinished) & set(path.parents))
    for path in unfinished:
        print(f"{path}: unfinished, not checked; the command that made it goes on with it")
    if not splits:
        raise UserError(f"{folder}: no prepared data here (no {NAME} below it)")
    damaged = 0
    for split in splits:
        try:
            manifest = verify(split)
        except UserError as error:
            damaged += 1
            print(f"error: {error}", file=sys.stderr)
            continue
        lengths = manifest.lengths
        said = f", {lengths['mean']:,.0f} tokens a document, at most {lengths['longest']:,}" if lengths else ""
        print(
            f"{split}: good: {manifest.tokens:,} tokens, {manifest.documents:,} documents{said}, "
            f"{len(manifest.shards)} shards"
        )
        if manifest.languages:
            print(f"{split}: {described(manifest.languages)}")
    if damaged:
        raise UserError(f"{folder}: {damaged} of {len(splits)} splits are damaged (see above)")


if __name__ == "__main__":
    cli(VerifyArgs, verify_all, "python -m lingua.verify")
