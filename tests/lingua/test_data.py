from __future__ import annotations

import gc
import itertools
import json
import math
import re
import shutil
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lingua.data import DataArgs, PhaseArgs, TokenStream
from lingua.errors import UserError
from lingua.manifest import load_manifest
from lingua.source import PERIOD, TokenSource, interleave
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.support import made_up_documents, prepare


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(TokenizerArgs())


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    prepare(folder, made_up_documents(80, seed=1), "first")
    return prepare(folder, made_up_documents(50, seed=2), "second", shard_tokens=700)  # several shards


def whole(folder: Path) -> np.ndarray:
    manifest = load_manifest(folder)
    return np.concatenate([manifest.open_tokens(i) for i in range(len(manifest.shards))])


def test_the_first_epoch_reads_the_shards_in_order(two_sources: Path) -> None:
    for name in ("first", "second"):
        corpus = whole(two_sources / name / "train")
        source = TokenSource(two_sources / name / "train", 48, seed=0)
        n_rows = len(corpus) // 48
        assert (source.rows(np.arange(n_rows)).flatten() == corpus[: n_rows * 48]).all()


@pytest.mark.parametrize("block_bytes", [400, 4 << 20])
@pytest.mark.parametrize("seq_len", [48, 50])
def test_every_token_appears_once_an_epoch(
    two_sources: Path, seq_len: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lingua.source.BLOCK_BYTES", block_bytes)
    corpus = whole(two_sources / "second/train")
    source = TokenSource(two_sources / "second/train", seq_len, seed=3)
    epochs = 4
    stream = source.rows(np.arange(-(-epochs * len(corpus) // seq_len))).flatten()
    for epoch in range(epochs):
        part = stream[epoch * len(corpus) : (epoch + 1) * len(corpus)]
        assert Counter(part.tolist()) == Counter(corpus.tolist())
        assert (part == corpus).all() == (epoch == 0)
    # Rows of later epochs are stretches of the corpus, so documents stay whole inside them.
    windows = {tuple(window) for window in np.lib.stride_tricks.sliding_window_view(corpus, seq_len)}
    rows = stream[: len(stream) // seq_len * seq_len].reshape(-1, seq_len)
    torn = [tuple(row) not in windows for row in rows]
    assert sum(torn) <= epochs  # only where one epoch's tail meets the next one's head


def test_later_epochs_permute_rows_inside_blocks(two_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lingua.source.BLOCK_BYTES", 10 * 32 * 2)  # 10 rows
    source = TokenSource(two_sources / "first/train", 32, seed=0)
    n_rows = source.tokens // 32
    units = [source._permuted(2, n_rows, unit) for unit in range(n_rows)]
    assert sorted(units) == list(range(n_rows))
    blocks = [unit // 10 for unit in units]
    changes = sum(a != b for a, b in itertools.pairwise(blocks))
    assert changes == -(-n_rows // 10) - 1  # a block is read to its end before the next
    assert blocks != sorted(blocks)
    assert units != [source._permuted(3, n_rows, unit) for unit in range(n_rows)]


def test_every_later_epoch_has_orders_of_its_own(two_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blocks, and of the rows in each block; both change with the seed, too."""
    monkeypatch.setattr("lingua.source.BLOCK_BYTES", 10 * 32 * 2)  # 10 rows
    source = TokenSource(two_sources / "first/train", 32, seed=0)
    other = TokenSource(two_sources / "first/train", 32, seed=1)
    n_rows = source.tokens // 32 // 10 * 10
    blocks, rows = [], []
    for of_seed, epoch in ((source, 1), (source, 2), (source, 3), (other, 3)):
        units = np.array([of_seed._permuted(epoch, n_rows, unit) for unit in range(n_rows)]).reshape(-1, 10)
        order = units[:, 0] // 10
        blocks.append(order.tolist())
        rows += (units % 10).tolist()
    assert len(blocks[0]) > 5
    assert len(set(map(tuple, blocks))) == len(blocks)
    assert len(set(map(tuple, rows))) == len(rows)


def test_a_source_that_is_no_longer_used_lets_go_of_its_files(two_sources: Path) -> None:
    source = TokenSource(two_sources / "first/train", 32, seed=0)
    source.row(3 * source.tokens // 32 + 5)  # of a later epoch, so that the orders of that epoch are cached
    alive = weakref.ref(source)
    del source
    gc.collect()
    assert alive() is None


def test_rows_are_the_same_from_any_number_of_readers(two_sources: Path, tokenizer) -> None:
    args = DataArgs(root_dir=str(two_sources), seq_len=32)
    alone = TokenStream(args, tokenizer, seed=5, rows_per_step=12, micro_rows=4)
    expected = alone.rows(np.arange(36))
    for world_size in (1, 2, 3, 8):
        seen = {}
        for rank in range(world_size):
            stream = TokenStream(args, tokenizer, 5, 12, 4, rank, world_size)
            for step in (1, 2, 3):
                for rows in stream.step_rows(step):
                    kept = rows.weight_B > 0
                    for index, tokens in zip(rows.index_B[kept].tolist(), rows.tokens_BS[kept], strict=True):
                        assert index not in seen
                        seen[index] = tokens.numpy()
        assert sorted(seen) == list(range(36))
        assert all((seen[i] == expected[i]).all() for i in seen)
    assert (alone.row(17) == expected[17]).all()


def test_every_rank_gets_the_same_number_of_batches_of_the_same_shape(two_sources: Path, tokenizer) -> None:
    args = DataArgs(root_dir=str(two_sources), seq_len=32)
    shapes = set()
    for rank in range(3):
        batches = TokenStream(args, tokenizer, 0, 10, 3, rank, 3).step_rows(1)
        shapes.add(tuple(tuple(rows.tokens_BS.shape) for rows in batches))
    assert shapes == {((3, 32), (3, 32))}


def test_weights_hold_at_every_prefix_to_within_one_row_a_source() -> None:
    weights = [0.65, 0.25, 0.1]
    period = interleave(weights)
    counts = np.bincount(period)
    assert counts.tolist() == [666, 256, 102]  # 665.6, 256, 102.4: the one left over goes to the largest remainder
    for source in range(3):
        taken = np.cumsum(period == source)
        assert np.abs(taken - np.arange(1, PERIOD + 1) * counts[source] / PERIOD).max() <= 1.0


def test_a_source_of_tiny_weight_still_comes() -> None:
    assert np.bincount(interleave([1e-9, 1.0])).tolist() == [1, 1023]
    assert len(interleave([1.0] * 1024)) == PERIOD
    with pytest.raises(UserError, match="1025 sources"):
        interleave([1.0] * 1025)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0, -1.0, 1.7e308])
def test_weights_that_cannot_be_shares_are_refused(bad: float) -> None:
    with pytest.raises(UserError, match=rf"data\.sources: weights 1\.0, {re.escape(str(bad))}, .*expected finite"):
        interleave([1.0, bad, 1e308])


def test_mixed_rows_come_from_their_sources_in_order(two_sources: Path, tokenizer) -> None:
    args = DataArgs(root_dir=str(two_sources), sources={"first": 3.0, "second": 1.0}, seq_len=16)
    stream = TokenStream(args, tokenizer, seed=0)
    rows = stream.rows(np.arange(100))
    which = interleave([3.0, 1.0])[:100]
    for i, name in enumerate(("first", "second")):
        corpus = whole(two_sources / name / "train")
        mine = rows[which == i]
        assert (mine.flatten() == corpus[: mine.size]).all()
        assert stream.progress(100)[f"epoch/{name}"] == pytest.approx(mine.size / len(corpus))


def test_documents_seen_are_counted_exactly_in_the_first_epoch(two_sources: Path, tokenizer) -> None:
    stream = TokenStream(DataArgs(root_dir=str(two_sources), sources={"second": 1.0}, seq_len=16), tokenizer, 0)
    corpus = whole(two_sources / "second/train")
    for rows in (0, 1, 7, 40, len(corpus) // 16):
        assert stream.progress(rows)["documents/second"] == (corpus[: rows * 16] == tokenizer.eos_id).sum()
    total = load_manifest(two_sources / "second/train").documents
    twice = stream.progress(2 * len(corpus) // 16)
    assert twice["documents/second"] == pytest.approx(2 * total, abs=1)


def test_phases_change_mix_and_length_and_go_on_where_the_sources_were(two_sources: Path, tokenizer) -> None:
    args = DataArgs(
        root_dir=str(two_sources),
        sources={"first": 1.0, "second": 1.0},
        seq_len=16,
        phases=[
            PhaseArgs(from_tokens=10 * 96 * 2, sources={"second": 1.0}, seq_len=32),  # after 10 steps of 96 tokens
            PhaseArgs(from_tokens=13 * 96 * 2 - 1, sources={"first": 1.0}),  # within step 13: after it
        ],
    )
    stream = TokenStream(args, tokenizer, seed=0, rows_per_step=6, micro_rows=4, views=2)
    assert [(phase.first_step, phase.first_row, phase.seq_len) for phase in stream.phases] == [
        (1, 0, 16), (11, 60, 32), (14, 69, 16),
    ]  # fmt: skip
    taken: dict[str, list[int]] = {"first": [], "second": []}
    which = interleave([1.0, 1.0])
    indices = []
    for step in range(1, 16):
        for rows in stream.step_rows(step):
            for index, tokens, weight in zip(rows.index_B.tolist(), rows.tokens_BS, rows.weight_B, strict=True):
                if weight:
                    source = "second" if 11 <= step < 14 else "first" if step >= 14 or which[index] == 0 else "second"
                    indices.append(index)
                    taken[source].append((index, tokens))
            assert rows.tokens_BS.shape == (2, 32) if 11 <= step < 14 else (4, 16)
        used = {name: sum(len(tokens) for _, tokens in rows) for name, rows in taken.items()}
        assert stream.used(step) == used
    assert sorted(indices) == list(range(60 + 9 + 12))  # row numbers, which masks hang on, never repeat
    for name, rows in taken.items():
        tokens = np.concatenate([tokens for _, tokens in sorted(rows, key=lambda row: row[0])])
        assert (tokens == whole(two_sources / name / "train")[: len(tokens)]).all()


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([PhaseArgs(from_tokens=1e4, seq_len=7)], "seq_len=7 does not divide the 96 text tokens of a step"),
        ([PhaseArgs(from_tokens=0)], "begins at step 1, not after the one before it"),
        ([PhaseArgs(from_tokens=900), PhaseArgs(from_tokens=800)], "from_tokens=800 begins at step 10"),
        ([PhaseArgs(from_tokens=900, sources={"third": 1.0})], "no folder .*third"),
    ],
)
def test_impossible_phases_are_named(two_sources: Path, tokenizer, phases: list[PhaseArgs], message: str) -> None:
    args = DataArgs(root_dir=str(two_sources), seq_len=16, phases=phases)
    with pytest.raises(UserError, match=message):
        TokenStream(args, tokenizer, seed=0, rows_per_step=6)


def test_prefetched_steps_are_the_steps(two_sources: Path, tokenizer) -> None:
    stream = TokenStream(DataArgs(root_dir=str(two_sources), seq_len=16), tokenizer, 0, 6, 4)
    for step, batches in enumerate(stream.steps(3, 9), 3):
        for got, expected in zip(batches, stream.step_rows(step), strict=True):
            assert torch.equal(got.tokens_BS, expected.tokens_BS)
            assert torch.equal(got.index_B, expected.index_B)


def test_an_error_while_reading_ahead_reaches_the_loop(two_sources: Path, tokenizer, monkeypatch) -> None:
    stream = TokenStream(DataArgs(root_dir=str(two_sources), seq_len=16), tokenizer, 0)
    monkeypatch.setattr(stream, "step_rows", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream.steps(1, 2))


def damaged(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "data")
    return tmp_path / "data"


def test_bad_data_is_named(two_sources: Path, tmp_path: Path, tokenizer) -> None:
    def stream(root: Path, **changes) -> TokenStream:
        return TokenStream(DataArgs(root_dir=str(root), seq_len=16, **changes), tokenizer, 0)

    with pytest.raises(UserError, match=r"data\.root_dir=.*nowhere: no such folder; setup/prepare_data\.py"):
        stream(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no source"):
        stream(tmp_path)
    with pytest.raises(UserError, match=r"data\.sources\.third: no folder .*sources there: \['first', 'second'\]"):
        stream(two_sources, sources={"third": 1.0})
    with pytest.raises(UserError, match=r"data\.sources\.first=0\.0: a weight must be above 0"):
        stream(two_sources, sources={"first": 0.0})
    with pytest.raises(UserError, match="fewer than one row"):
        TokenStream(DataArgs(root_dir=str(two_sources), seq_len=10**6), tokenizer, 0)

    root = damaged(two_sources, tmp_path)
    shard = root / "first/train/shard_00000.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(UserError, match=r"shard_00000\.tokens: truncated: found \d+ bytes, expected \d+"):
        stream(root)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard_00000\.tokens: missing"):
        stream(root)
    shard.write_bytes(content)
    manifest = root / "first/train/manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(values | {"dtype": "<i8"}))
    with pytest.raises(UserError, match=r"dtype '<i8', expected <u2 or <u4"):
        stream(root)
    manifest.write_text(json.dumps(values | {"tokenizer": {"kind": "sentencepiece", "vocab_size": 7}}))
    with pytest.raises(UserError, match="written with another tokenizer"):
        stream(root)
