"""Raw text to shuffled token shards, for one or more named sources.

    python setup/prepare_data.py sources.NAME.path=GLOB out=DIR [tokenizer.name=...] [workers=2] ...

writes ``DIR/NAME/train`` and ``DIR/NAME/valid``, each with its ``manifest.json``. The same seed and input give
the same bytes, whatever ``workers`` and ``memory_gb``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script from a checkout

from lingua.args import cli
from lingua.errors import UserError
from lingua.files import is_remote
from lingua.preparation.languages import described
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.upload import upload


@dataclass
class PrepareArgs(ShuffleArgs):
    """Prepare token shards from raw text, for one or more named sources."""

    sources: dict[str, ReaderArgs] = field(default_factory=dict)  # name: {path, format, text, document, on_error}
    out: str = "???"  # folder to write, or a URL (s3://...), which needs a work folder
    work: str = ""  # folder on a disk to prepare in where out is a URL; may be deleted afterwards


def prepare(args: PrepareArgs) -> None:
    """Prepare every source and print what came out. Raises UserError (:func:`lingua.preparation.shuffle.shuffle`)."""
    if not args.sources:
        raise UserError("no source: give sources.NAME.path=GLOB, or sources in the YAML file")
    if is_remote(args.out) != bool(args.work):
        raise UserError(f"out={args.out} work={args.work}: work is for an out that is a URL, and such an out needs it")
    for name, reader in args.sources.items():
        if "/" in name or name.startswith("."):
            raise UserError(f"source {name!r}: a name is that of a folder, so no / and no leading dot")
        manifests = shuffle(name, reader, args, args.work or args.out)
        if manifests and is_remote(args.out):
            upload(Path(args.work) / name, f"{args.out.rstrip('/')}/{name}")
        for split, manifest in manifests.items():
            print(
                f"{manifest.folder}: {manifest.tokens:,} tokens, {manifest.documents:,} documents, "
                f"{manifest.bytes_of_text / 1e6:.1f} MB of text, {len(manifest.shards)} shards"
            )
            if manifest.languages:
                print(f"{manifest.folder}: {described(manifest.languages)}")
            if split == "train":
                for count, what in (
                    (manifest.skipped_count, "unreadable lines left out, listed in skipped.jsonl"),
                    (manifest.empty_documents, "empty documents left out"),
                    (manifest.counts.get("duplicates", 0), "duplicates left out"),
                    (manifest.counts.get("cut", 0), "documents cut"),
                    (manifest.counts.get("pieces", 0), "documents more than there were, because long ones were split"),
                ):
                    if count:
                        print(f"{name}: {count:,} {what}")


if __name__ == "__main__":
    cli(PrepareArgs, prepare, "python setup/prepare_data.py")
