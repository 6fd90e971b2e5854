"""Runs side by side, what differs in their configs first: ``python -m apps.plots.compare runs=[runs/a,runs/b]``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.plots.report import NONE, names_of, rows_of
from lingua.args import cli, read_yaml
from lingua.errors import UserError
from lingua.evaluation.results import markdown_table, writable_folder, write_whole
from lingua.resume import flat
from lingua.run_folder import summarize


@dataclass
class CompareArgs:
    """Compare the configs and the figures of runs."""

    runs: list[str] = field(default_factory=list)  # two run folders or more
    out: str | None = None  # folder for compare.md; none: print only

    def __post_init__(self) -> None:
        if len(self.runs) < 2 or len({Path(run).resolve() for run in self.runs}) < len(self.runs):
            raise UserError(f"runs={self.runs}: expected two run folders at least, all different")


def compare(args: CompareArgs) -> str:
    """Print, and write if asked, two tables: keys that differ, and what came of the runs."""
    for run in args.runs:
        if Path(run).is_dir() and not any((Path(run) / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
            raise UserError(
                f"{run}: no run folder, it has neither config.yaml nor metrics.jsonl; of a sweep give runs inside it"
            )
    names = names_of(args.runs)
    runs = [summarize(Path(run), name) for run, name in zip(args.runs, names, strict=True)]
    missing = [run for run in args.runs if not Path(run).is_dir()]
    if missing:
        raise UserError(f"not there: {', '.join(missing)}")
    text = f"# {', '.join(names)}\n\n"
    differing = differences([config_of(Path(run)) for run in args.runs])
    same = "The configs are the same, but for their folders.\n"
    text += markdown_table(["config", *names], differing) if differing else same
    text += "\n" + markdown_table(["", *names], rows_of(runs))
    text += "\n" + "".join(f"- {note}\n" for run in runs for note in run.notes)
    if args.out is not None:
        write_whole(writable_folder(args.out) / "compare.md", text.encode())
    print(text, end="")
    return text


def config_of(run: Path) -> dict[str, Any]:
    """A run's config with dotted keys; empty if it has none."""
    path = run / "config.yaml"
    return flat(read_yaml(path)) if path.is_file() else {}


def differences(configs: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of keys whose values are not the same everywhere; a key that a config does not have is ``-``."""
    keys = list(dict.fromkeys(key for config in configs for key in config if key != "dump_dir"))
    lines = [[key, *(str(config[key]) if key in config else NONE for config in configs)] for key in keys]
    return [line for line in lines if len(set(line[1:])) > 1]


if __name__ == "__main__":
    cli(CompareArgs, compare, "python -m apps.plots.compare")
