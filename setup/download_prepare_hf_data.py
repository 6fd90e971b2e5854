"""A pretraining corpus from the Hugging Face hub to shuffled token shards.

    python setup/download_prepare_hf_data.py fineweb_edu_10bt out=data/shards [fraction=0.1] [workers=8] ...

fetches file by file into ``raw`` and prepares ``OUT/NAME/train`` and ``valid``; run again, it goes on where it
stopped. Known names: fineweb_edu, fineweb_edu_10bt, dclm_baseline_1.0; any other repository by repo= and files=.
"""

from __future__ import annotations

import fnmatch
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script from a checkout

from prepare_data import PrepareArgs, prepare

from lingua.args import cli
from lingua.download import fetch, list_repository
from lingua.errors import UserError
from lingua.hashing import text_hash
from lingua.preparation.readers import ReaderArgs
from lingua.progress import Progress

DATASETS = {  # name: repository, files in it
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "data/*.parquet"),
    "fineweb_edu_10bt": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "dclm_baseline_1.0": ("mlfoundations/dclm-baseline-1.0", "*.jsonl.zst"),
}


@dataclass
class DownloadArgs(PrepareArgs):
    """``sources`` is made from what was fetched; leave it alone."""

    name: str = "???"  # fineweb_edu | fineweb_edu_10bt | dclm_baseline_1.0, or a name for another repository
    repo: str = ""  # OWNER/NAME on the hub, or a local folder with the same files; none: that of the name
    files: str = ""  # glob of the files in it (* matches / too); none: that of the name
    revision: str = "main"  # branch, tag or commit
    fraction: float = 1.0  # of the files, chosen by a hash of their names: a larger one holds the smaller ones
    raw: str = ""  # folder for what is fetched; none: raw/NAME beside out (or work)
    reader: ReaderArgs = field(default_factory=lambda: ReaderArgs(path=""))  # how to read them; path is made

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction={self.fraction}: expected above 0 and at most 1")
        if self.name not in DATASETS and not (self.repo and self.files):
            raise UserError(f"name={self.name}: known: {', '.join(DATASETS)}; for another one give repo= and files=")
        if self.sources:
            raise UserError("sources: made from what is fetched, so it cannot be given here")


def download_prepare(args: DownloadArgs) -> None:
    """Fetch what is missing, then prepare it. Raises UserError."""
    repo, pattern = DATASETS.get(args.name, ("", ""))
    repo, pattern = args.repo or repo, args.files or pattern
    local = Path(repo).is_dir()
    folder = Path(repo) if local else Path(args.raw or Path(args.work or args.out).parent / "raw" / args.name)
    if local:
        commit, files = "", sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    else:
        commit, files = list_repository(repo, "dataset", args.revision, folder)
    chosen = choose(files, pattern, args.fraction)
    if not chosen:
        raise UserError(f"{repo}: none of its {len(files)} files matches files={pattern}")
    print(f"{args.name}: {len(chosen)} files of {repo}{' at ' + commit[:12] if commit else ''}", flush=True)
    if not local:
        with Progress(f"{args.name}: fetching", len(chosen), "bytes") as progress:
            for file in chosen:
                progress.advance(1, fetch(repo, "dataset", commit, file, folder).stat().st_size)
    args.reader.path = ",".join(str(folder / file) for file in chosen)
    args.sources = {args.name: args.reader}
    prepare(args)


def choose(files: list[str], pattern: str, fraction: float) -> list[str]:
    """``fraction`` of the files that match, rounded up, in order of their names."""
    matching = sorted((file for file in files if fnmatch.fnmatchcase(file, pattern)), key=text_hash)
    return sorted(matching[: math.ceil(fraction * len(matching))])


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and "=" not in words[0] and not words[0].startswith("-") and words[0] != "help":
        words[0] = f"name={words[0]}"
    cli(DownloadArgs, download_prepare, "python setup/download_prepare_hf_data.py NAME", words)
