"""``python -m lingua.hub export ckpt=... to=...``, ``import source=... to=...``, ``fill model=... text=...``."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lingua.args import cli
from lingua.errors import UserError
from lingua.hub.export import ExportArgs, export
from lingua.hub.exported import load_exported
from lingua.hub.importing import ImportArgs, import_model


@dataclass
class FillArgs:
    """Print the likeliest tokens for each mask in a text."""

    model: str = "???"  # folder that export wrote
    text: str = "???"  # with <mask> in it, as the model's tokenizer calls it
    top: int = 5  # tokens for each mask

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UserError(f"top={self.top}: expected at least 1")


def fill(args: FillArgs) -> None:
    """Print a line a mask. Raises UserError as :meth:`lingua.hub.exported.Exported.fill`."""
    for candidates in load_exported(args.model).fill(args.text, args.top):
        print("  ".join(f"{token!r} {100 * probability:.1f}%" for token, probability in candidates))


COMMANDS = {"export": (ExportArgs, export), "import": (ImportArgs, import_model), "fill": (FillArgs, fill)}

if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        print(f"usage: python -m lingua.hub {'|'.join(COMMANDS)} key=value ... [--help]", file=sys.stderr)
        raise SystemExit(2)
    args_class, function = COMMANDS[command]
    cli(args_class, function, f"python -m lingua.hub {command}", sys.argv[2:])
