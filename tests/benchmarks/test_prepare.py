import json

import pytest

from benchmarks.prepare import PrepareRateArgs, main, prepare_rate
from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.real_text import real_lines


def test_both_rates_are_of_the_same_tokens(tmp_path):
    lines = real_lines(300)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    main(PrepareRateArgs(out=f"{tmp_path}/result.json", text=str(source), megabytes=1, rounds=2))
    result = json.loads((tmp_path / "result.json").read_text())
    repeats = result["documents"] // len(lines)
    tokens = sum(map(len, build_tokenizer(TokenizerArgs()).encode_batch(lines)))
    assert result["tokens"] == repeats * tokens
    ratios = [a / b for a, b in zip(result["prepare"], result["tiktoken"], strict=True)]
    assert min(ratios) <= result["ratio"] <= max(ratios)
    assert result["versions"]["tiktoken"] == "0.14.0"


def test_no_text(tmp_path):
    with pytest.raises(UserError, match="no file matches"):
        prepare_rate(f"{tmp_path}/*.jsonl", 1, 1)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no text to measure with"):
        prepare_rate(f"{tmp_path}/*.jsonl", 1, 1)
    with pytest.raises(UserError, match="rounds=0"):
        PrepareRateArgs(out="x", rounds=0)
