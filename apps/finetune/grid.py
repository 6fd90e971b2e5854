"""Every point of a sweep file, one after another, and their table:

    python -m apps.finetune.grid config=apps/finetune/configs/glue.yaml sweep=apps/finetune/configs/glue_sweep.yaml \\
        ckpt=runs/x dump_dir=runs/x_glue

Started again it goes on with the points that have no result. The same file serves ``lingua.stool`` as ``sweep.file``,
which runs the points side by side; ``python -m apps.finetune.report`` makes the table of its folder.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import OmegaConf

from apps.finetune.args import FinetuneArgs
from apps.finetune.report import ReportArgs, report
from apps.finetune.train import finetune
from lingua.args import build, cli, to_dict
from lingua.errors import UserError
from lingua.stool.sweep import names, read_points


@dataclass
class GridArgs(FinetuneArgs):
    """Fine-tune at every point of a sweep file, each in a folder of its own under dump_dir, and make the table."""

    sweep: str = "???"  # YAML file with grid:, points: or draw:, whose keys are those of apps.finetune.train


def points(args: GridArgs) -> list[FinetuneArgs]:
    """The runs of a grid. Raises UserError at the first that cannot be."""
    found = read_points(args.sweep)
    if any("dump_dir" in point for point in found):
        raise UserError(f"{args.sweep}: dump_dir: each point has a folder of its own, named by its keys")
    shared = {field.name: to_dict(args)[field.name] for field in fields(FinetuneArgs)}
    runs = []
    for name, point in zip(names(found), found, strict=True):
        own = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}" for key, value in point.items()]))
        runs.append(
            build(
                FinetuneArgs,
                ("the grid's config", {**shared, "dump_dir": str(Path(args.dump_dir) / name)}),
                (args.sweep, own),
            )
        )
    return runs


def grid(args: GridArgs) -> None:
    """Run what has no result yet, and report."""
    for number, run in enumerate(runs := points(args), start=1):
        print(f"{number}/{len(runs)}: {run.dump_dir}", flush=True)
        finetune(run)
    report(ReportArgs(runs=args.dump_dir))


if __name__ == "__main__":
    cli(GridArgs, grid, "python -m apps.finetune.grid")
