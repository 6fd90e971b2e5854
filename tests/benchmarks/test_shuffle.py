import json

import pytest

from benchmarks.shuffle import ShuffleRateArgs, main
from lingua.errors import UserError
from lingua.tokenizer import RobertaTokenizer
from tests.corpora import write_jsonl
from tests.real_text import real_lines


def test_the_whole_benchmark_at_toy_size(tmp_path, capsys):
    lines = real_lines(300)
    write_jsonl(tmp_path / "a.jsonl", [*lines, " "])
    main(ShuffleRateArgs(out=f"{tmp_path}/r.json", text=f"{tmp_path}/a.jsonl", megabytes=1, rounds=2, workers=[1, 2]))
    result = json.loads((tmp_path / "r.json").read_text())
    tokens = sum(len(ids) + 2 for ids in RobertaTokenizer().encode_batch(lines))
    assert result["tokens"] % tokens == 0
    assert [entry["workers"] for entry in result["workers"]] == [1, 2]
    for entry in result["workers"]:
        for reading in entry["rounds"]:
            seconds = reading["tokenize"] + reading["sort"] + reading["pack"]
            assert reading["tokens_per_second"] == pytest.approx(result["tokens"] / seconds)
            of_workers = reading["tokenize_workers_cpu"]
            assert 0 < reading["tokenize_own_cpu"] < 1.5 * reading["tokenize"] + 0.1
            assert of_workers > 0.1 if entry["workers"] > 1 else of_workers == 0
    said = capsys.readouterr().out
    assert "| workers | tokenize, s | sort, s | pack, s | million tokens/s | one reader at most |" in said


def test_bad_settings(tmp_path):
    with pytest.raises(UserError, match="expected at least 1"):
        ShuffleRateArgs(out="x", workers=[0])
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no text to measure with"):
        main(ShuffleRateArgs(out="x", text=f"{tmp_path}/a.jsonl"))
