import base64
import gzip
import struct

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from setup.make_roberta_vocabulary import CONTROL_BYTES, FIRST_END_WORD, MakeArgs, make


def write_inputs(folder, tokens, ranks):
    """The two source files in their own formats, from the committed vocabulary."""
    lines = sorted(zip(ranks, tokens, strict=True))
    (folder / "gpt2").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in lines))
    names = [b"<s>", b"<pad>", b"</s>", b"<unk>", *tokens]
    for index in CONTROL_BYTES:  # the source shows these as spaces
        names[index] = b" "
    names += [b"<|endoftext|>", b"madeupword0000", b"madeupword0001", b"madeupword0002", b"<mask>"]
    header = bytes(4 * FIRST_END_WORD)
    ends = np.cumsum([len(name) for name in names]).tolist()
    (folder / "roberta").write_bytes(header + struct.pack(f"<{len(ends)}I", *ends) + b"".join(names))
    return MakeArgs(gpt2=str(folder / "gpt2"), roberta=str(folder / "roberta"), out=str(folder / "out.gz"))


def test_the_sources_give_the_committed_vocabulary(tmp_path):
    tokenizer = build_tokenizer(TokenizerArgs())
    ranks = [tokenizer.ranks[token] for token in tokenizer.token_bytes]
    make(write_inputs(tmp_path, tokenizer.token_bytes, ranks))
    made = gzip.decompress((tmp_path / "out.gz").read_bytes()).splitlines()
    expected = [
        base64.b64encode(token) + b" %d" % rank for token, rank in zip(tokenizer.token_bytes, ranks, strict=True)
    ]
    assert made == expected
    other = [*tokenizer.token_bytes[:-1], b"never a token of GPT-2"]
    args = write_inputs(tmp_path, other, ranks)
    (tmp_path / "gpt2").write_bytes((tmp_path / "gpt2").read_bytes().replace(base64.b64encode(other[-1]), b"eHl6enk="))
    with pytest.raises(UserError, match="hold different tokens"):
        make(args)


def test_missing_and_foreign_files(tmp_path):
    (tmp_path / "gpt2").write_bytes(b"IQ== 0\n")
    (tmp_path / "roberta").write_bytes(b"something else")
    with pytest.raises(UserError, match="no RoBERTa string table"):
        make(MakeArgs(gpt2=f"{tmp_path}/gpt2", roberta=f"{tmp_path}/roberta", out=f"{tmp_path}/x"))
    with pytest.raises(UserError, match="missing: no such file"):
        make(MakeArgs(gpt2=f"{tmp_path}/gpt2", roberta=f"{tmp_path}/missing", out=f"{tmp_path}/x"))
