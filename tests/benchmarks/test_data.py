import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import DataRateArgs, bars, main, make_cold, read_epoch, table
from benchmarks.made_up import write_shards
from benchmarks.object_store import READINGS
from lingua.errors import UserError
from lingua.manifest import verify
from lingua.tokenizer import RobertaTokenizer
from tests.support import made_up_documents


def stream_result(epoch_0: list[float], epoch_1: list[float]) -> dict:
    def reading(files: str, epoch: int, rates: list[float]) -> dict:
        rows = [rate / 512 for rate in rates]
        return {"files": files, "epoch": epoch, "rows_per_second": rows, "tokens_per_second": rates,
                "share_from_disk": [None] * len(rates)}  # fmt: skip

    cold = [reading("cold", epoch, [1e6, 1e6, 1e6]) for epoch in (0, 1)]
    return {"readings": [*cold, reading("warm", 0, epoch_0), reading("warm", 1, epoch_1)]}


def test_bars_are_medians_of_warm_readings_against_their_bounds() -> None:
    stream = stream_result([50e6, 90e6, 10e6], [49e6, 90e6, 10e6])
    store = {"readings": [{"reading": name, "needed": 0.95 - i} for i, name in enumerate(READINGS)]}
    first, later, preparation, needed = bars(stream, {"ratio": 0.79}, store)
    assert (needed["value"], needed["bound"], needed["met"]) == (0.95, 0.95, True)
    assert (first["value"], first["bound"], first["met"]) == (50e6, 50e6, True)
    assert (later["value"], later["bound"], later["met"]) == (49e6, 50e6, False)
    assert (preparation["value"], preparation["bound"], preparation["met"]) == (0.79, 0.8, False)
    assert bars(stream, {"ratio": 0.8}, None)[2]["met"]
    text = table(stream, {"prepare": [2e6, 4e6, 3e6], "tiktoken": [5e6]})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["stream, warm files, epoch 1", "95,703", "49.0", "unknown"] in cells
    assert ["prepare", "", "3.00", ""] in cells


def test_the_made_up_shards_are_what_preparation_would_write(tmp_path: Path) -> None:
    write_shards(tmp_path, 500_000, RobertaTokenizer())
    large, small = (verify(tmp_path / name / "train") for name in ("large", "small"))  # checksums, ids, documents
    assert len(large.shards) == len(small.shards) == 4
    assert large.tokens / (large.tokens + small.tokens) == pytest.approx(0.75, rel=0.1)
    assert large.tokens + small.tokens == pytest.approx(500_000, rel=0.1)


def test_readings_say_which_part_came_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, 500_000, RobertaTokenizer())
    asked = []
    monkeypatch.setattr("benchmarks.data.make_cold", lambda root: asked.append(root) or make_cold(root))
    counter = iter([100.0, 175.0, 175.0, 175.0])
    monkeypatch.setattr("benchmarks.data.bytes_from_disk", lambda: next(counter))
    args = DataRateArgs(out="x", seq_len=64, batch_rows=100)
    reading = {}
    for cold in (True, False):
        read: list[np.ndarray] = []
        real = read_rows(monkeypatch, read)
        reading[cold] = read_epoch(tmp_path, RobertaTokenizer(), 1, args, cold)
        monkeypatch.setattr("lingua.data.TokenStream.rows", real)
        indices = np.concatenate(read)
        tokens = sum(verify(tmp_path / name / "train").tokens for name in ("large", "small"))
        assert (np.diff(indices) == 1).all()
        assert len(indices) == tokens // 64
        assert indices[0] >= tokens // 64  # past the first epoch
    assert asked == [tmp_path]
    assert (reading[True]["from_disk"], reading[False]["from_disk"]) == (75.0, 0.0)


def read_rows(monkeypatch: pytest.MonkeyPatch, read: list[np.ndarray]):
    """Note the rows that the stream is asked for in ``read``; returns the real method."""
    from lingua.data import TokenStream

    real = TokenStream.rows
    monkeypatch.setattr(TokenStream, "rows", lambda self, indices: read.append(indices) or real(self, indices))
    return real


def test_the_whole_benchmark_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in made_up_documents(200)))
    main(
        DataRateArgs(
            out=f"{tmp_path}/result.json",
            megabytes=2,
            rounds=2,
            text=str(source),
            text_megabytes=1,
            text_rounds=1,
            object_store=False,
        )
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"commit", "processor", "cpus", "versions"} <= set(result)
    assert [(r["files"], r["epoch"]) for r in result["stream"]["readings"]] == [
        ("cold", 0), ("warm", 0), ("cold", 1), ("warm", 1),
    ]  # fmt: skip
    for reading in result["stream"]["readings"]:
        assert len(reading["share_from_disk"]) == 2
        assert all(rate > 0 for rate in reading["rows_per_second"])
        assert reading["tokens_per_second"] == pytest.approx([512 * rate for rate in reading["rows_per_second"]])
    assert result["stream"]["shard_bytes"] == pytest.approx(2e6, rel=0.1)
    assert result["bars"] == bars(result["stream"], result["prepare"], None)
    assert len(result["bars"]) == 3
    assert "| stream, cold files, epoch 0 |" in capsys.readouterr().out


def test_mistakes_are_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seq_len=0: expected at least 1"):
        DataRateArgs(out="x", seq_len=0)
    with pytest.raises(UserError, match="no file matches"):
        main(DataRateArgs(out=f"{tmp_path}/result.json", text=f"{tmp_path}/*.jsonl"))
    assert not (tmp_path / "result.json").exists()
