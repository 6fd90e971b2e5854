"""Rows as the model sees them, as text: ``python -m lingua.inspect data.root_dir=DIR``.

Every document begins on a new line. What a view hides is in colour on a terminal and between ``⟦`` and ``⟧``
elsewhere; with the run's ``seed`` and ``data`` settings (and, for a run in phases, its ``batch_tokens`` and ``views``)
these are the rows and the masks of that run.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
import torch

from lingua.args import cli
from lingua.data import DataArgs, TokenStream
from lingua.errors import UserError
from lingua.masking import split_positions
from lingua.tokenizer import Tokenizer, build_tokenizer

SPECIAL, HIDDEN, HEADING, PLAIN = "\033[2;36m", "\033[1;97;41m", "\033[1m", "\033[0m"


@dataclass
class InspectArgs:
    """Prints rows ``first`` to ``first + rows - 1`` of a phase of the training stream."""

    data: DataArgs = field(default_factory=DataArgs)
    phase: int = 0  # 0: that of the fields of data, 1: the first of data.phases, and so on
    first: int = 0  # number of the first row, from the beginning of the phase
    rows: int = 2  # how many
    hidden_ratio: float = 0.5  # share of positions that the view hides; 0: none
    inverse: bool = False  # the other one of two complementary views
    seed: int = 0  # of the run: of its masks and later epochs
    batch_tokens: int = 393216  # of the run: view tokens of a step; with views it says where later phases begin
    views: int = 2  # of the run: of each row (2 with complementary masks, else 1)
    color: str = "auto"  # always | never | auto: on a terminal, unless NO_COLOR is set

    def __post_init__(self) -> None:
        if self.first < 0 or self.rows < 1:
            raise UserError(f"first={self.first} rows={self.rows}: expected at least 0 and at least 1")
        if not 0 <= self.phase <= len(self.data.phases):
            raise UserError(f"phase={self.phase}: data.phases has {len(self.data.phases)}, so expected 0 to that")
        row_tokens = self.views * self.data.seq_len
        if self.data.phases and (row_tokens < 1 or self.batch_tokens < 1 or self.batch_tokens % row_tokens):
            raise UserError(
                f"batch_tokens={self.batch_tokens} views={self.views}: not a whole number of rows of "
                f"data.seq_len={self.data.seq_len}; give those of the run, which say where a phase begins"
            )
        if self.color not in ("always", "never", "auto"):
            raise UserError(f"color={self.color}: expected always, never or auto")


def inspect(args: InspectArgs, out: TextIO | None = None) -> None:
    """Print the rows to ``out`` (standard output). Raises UserError if the data or the ratio is unusable."""
    out = sys.stdout if out is None else out
    tokenizer = build_tokenizer(args.data.tokenizer)
    rows_per_step = args.batch_tokens // (args.views * args.data.seq_len) if args.data.phases else 1
    stream = TokenStream(args.data, tokenizer, args.seed, rows_per_step, views=args.views)
    begin = stream.phases[args.phase].first_row + args.first
    _check_end(args, stream, begin)
    in_color = args.color == "always" or (args.color == "auto" and out.isatty() and "NO_COLOR" not in os.environ)
    for index in range(begin, begin + args.rows):
        print(_row(args, stream, tokenizer, index, in_color), file=out)


def _row(args: InspectArgs, stream: TokenStream, tokenizer: Tokenizer, index: int, in_color: bool) -> str:
    """A heading and the marked text."""
    ids = stream.row(index).astype(np.int64)
    hidden = np.zeros(len(ids), bool)
    if args.hidden_ratio:
        view = split_positions(torch.tensor([index]), len(ids), args.hidden_ratio, args.seed)
        hidden[view.hidden_BM[0].numpy()] = True
        hidden ^= args.inverse
    place = f" (phase {args.phase}, step {_step(stream, args.phase, index)})" if args.data.phases else ""
    borders = int((ids[1:] == tokenizer.bos_id).sum())
    heading = (
        f"row {index}{place}: {len(ids)} tokens, {borders} documents begin in it, {int(hidden.sum())} tokens hidden"
    )
    return "\n".join(
        [f"{HEADING}{heading}{PLAIN}" if in_color else heading, marked(ids, hidden, tokenizer, in_color), ""]
    )


def _step(stream: TokenStream, number: int, index: int) -> int:
    phase = stream.phases[number]
    return phase.first_step + (index - phase.first_row) // phase.rows_per_step


def _check_end(args: InspectArgs, stream: TokenStream, begin: int) -> None:
    """Raise UserError if the rows asked for are beyond the phase."""
    later = stream.phases[args.phase + 1 :]
    if later and begin + args.rows > later[0].first_row:
        length = later[0].first_row - stream.phases[args.phase].first_row
        raise UserError(f"first={args.first} rows={args.rows}: phase {args.phase} has only {length} rows")


def marked(ids: np.ndarray, hidden: np.ndarray, tokenizer: Tokenizer, in_color: bool) -> str:
    """The text of ``ids`` [S], a new line before every document, with the positions ``hidden`` [S] marked."""
    special = np.isin(ids, tokenizer.special_ids)
    kind = 2 * special + hidden
    breaks = np.flatnonzero((kind[1:] != kind[:-1]) | (ids[1:] == tokenizer.bos_id) | special[1:]) + 1
    parts = []
    document = 0  # where the current one begins
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True):
        if ids[first] == tokenizer.bos_id:
            document = first
            parts.append("\n" if first else "")
        text = _text(ids[document:last], first - document, tokenizer)
        if hidden[first]:
            parts.append(f"{HIDDEN}{text}{PLAIN}" if in_color else f"⟦{text}⟧")
        else:
            parts.append(f"{SPECIAL}{text}{PLAIN}" if in_color and special[first] else text)
    return "".join(parts)


def _text(ids: np.ndarray, skip: int, tokenizer: Tokenizer) -> str:
    """What ``ids[skip:]`` adds to the text of ``ids[:skip]``: some tokenizers drop the space before a run."""
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:skip])
    # a run may begin inside a character of several bytes
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[skip:])


if __name__ == "__main__":
    cli(InspectArgs, inspect, "python -m lingua.inspect")
