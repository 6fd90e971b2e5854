"""Training from an object store: fsspec's memory file system here, a real S3 protocol server in test_s3.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lingua import remote
from lingua.data import DataArgs, TokenStream
from lingua.errors import UserError
from lingua.metrics import read_metrics
from lingua.remote import BlockCache, RemoteTokens
from lingua.source import TokenSource
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.support import deterministic, made_up_documents, prepare, run_app, tiny_words


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, none a whole number of blocks."""
    return prepare(tmp_path_factory.mktemp("remote"), made_up_documents(150), shard_tokens=3000)


@pytest.fixture
def url(local: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same on a remote file system, with blocks of 500 tokens."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1000)
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True) if system.exists("/") else None
    system.put(str(local), "/data", recursive=True)
    return "memory://data"


def test_rows_are_those_of_the_local_shards_in_every_epoch(local: Path, url: str, tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 1.0)
    here = TokenSource(local / "made_up/train", 24, seed=1)
    there = TokenSource(f"{url}/made_up/train", 24, seed=1, cache=cache)
    indices = np.arange(3 * here.tokens // 24)
    assert (here.rows(indices) == there.rows(indices)).all()
    assert there.fingerprint == here.fingerprint
    assert there.progress(5000) == here.progress(5000)
    blocks = sum(-(-len(shard) * 2 // 1000) for shard in here._shards)
    assert cache.fetched == blocks  # each once
    again = BlockCache(str(tmp_path), 1.0)
    assert (TokenSource(f"{url}/made_up/train", 24, 1, cache=again).rows(indices) == here.rows(indices)).all()
    assert again.fetched == 0


def test_the_cache_stays_within_its_bound(local: Path, url: str, tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 5000 / 1e9)
    here, there = TokenSource(local / "made_up/train", 24, 1), TokenSource(f"{url}/made_up/train", 24, 1, cache=cache)
    for start in range(0, here.tokens // 24, 20):
        rows = np.arange(start, start + 20)
        assert (here.rows(rows) == there.rows(rows)).all()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
    with pytest.raises(UserError, match=r"data\.cache_gb=1e-06: at least 2e-06, two blocks"):
        BlockCache(str(tmp_path), 1e-6)


def test_the_least_recently_used_block_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10)
    fsspec.filesystem("memory").pipe("/file", bytes(range(100)))
    cache = BlockCache(str(tmp_path), 30 / 1e9)
    for index in (0, 1, 2, 0, 3):
        assert cache.block("memory://file", "c" * 64, index, 10).tolist() == list(range(10 * index, 10 * index + 10))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["0", "2", "3"]


def test_slices_over_block_borders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 16)
    values = np.arange(61, dtype="<u4")
    fsspec.filesystem("memory").pipe("/numbers", values.tobytes())
    tokens = RemoteTokens("memory://numbers", "d" * 64, "<u4", 61, BlockCache(str(tmp_path), 1.0))
    assert len(tokens) == 61
    for start in range(0, 62):
        for stop in (start, start + 1, start + 4, start + 9, 61, 99):
            assert tokens[start:stop].tolist() == values[start:stop].tolist()


def test_a_run_reads_remote_data_as_it_reads_local_data(local: Path, url: str, tmp_path: Path) -> None:
    settings = {"steps": 6, "validation__every": 3, "data__cache_dir": tmp_path / "cache"}
    run_app("crossbert", tiny_words("crossbert", local, tmp_path / "local", **settings))
    words = tiny_words("crossbert", local, tmp_path / "remote", **settings)
    run_app("crossbert", [word.replace(f"={local}", f"={url}") for word in words])
    figures = [deterministic(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("local", "remote")]
    assert figures[0] == figures[1]


def test_mistakes_are_named(local: Path, url: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerArgs())
    system = fsspec.filesystem("memory")

    def stream(root: str) -> TokenStream:
        return TokenStream(DataArgs(root_dir=root, seq_len=16, cache_dir=str(tmp_path)), tokenizer, 0)

    with pytest.raises(UserError, match=r"data\.root_dir=memory://nowhere: holds no source"):
        stream("memory://nowhere")
    with pytest.raises(UserError, match=r"data\.root_dir=nonsense://x: cannot be listed"):
        stream("nonsense://x")
    with pytest.raises(UserError, match=r"memory://data/made_up: no manifest\.json there"):
        TokenSource("memory://data/made_up", 16, 0)
    shard = "/data/made_up/train/shard_00001.tokens"
    content = system.cat(shard)
    system.pipe(shard, content[:-2])
    with pytest.raises(UserError, match=r"shard_00001\.tokens: \d+ bytes there, expected \d+"):
        stream(url)
    system.pipe(shard, content)
    fine = stream(url)
    system.rm(shard)  # after the start
    with pytest.raises(UserError, match=r"shard_00001\.tokens: "):
        fine.rows(np.arange(fine.phases[0].mix.sources["made_up"].tokens // 16))


def test_a_full_cache_disk_is_named(local: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    source = TokenSource(f"{url}/made_up/train", 16, 0, cache=BlockCache(str(tmp_path), 1.0))
    with pytest.raises(UserError, match=r"data\.cache_dir=.*: cannot be written: No space left on device"):
        source.row(0)
    shutil.rmtree(tmp_path)
