"""Layouts of training rows, what is named or counted, and which rows come when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from apps.embed.batches import Batches, held_out, share, spread_duplicates
from apps.embed.data import BadRows, PairArgs, read_ids, read_pairs
from apps.embed.store import Store, build, store_folder
from apps.embed.texts import read_texts
from lingua.args import build as build_args
from lingua.errors import UserError
from lingua.features import TextEncoder
from lingua.transformer import Encoder, TransformerArgs
from lingua.vocabularies import BytesTokenizer
from tests.pairs import pairs, write_jsonl

ENCODER = TextEncoder(Encoder(TransformerArgs(dim=8, n_layers=1, n_heads=1, vocab_size=261)), BytesTokenizer(), 64)
ROWS = [
    {"query": "ask one", "positive": "yes one", "negative_1": "no one", "negative_2": "not one"},
    {"query": "ask two", "positive": "yes two", "negative_1": "no two", "negative_2": "yes one"},
]
EXPECTED = [[row[name] for name in ("query", "positive", "negative_1", "negative_2")] for row in ROWS]


def open_store(folder: Path, path: Path | str, **options: Any) -> Store:
    args = build_args(PairArgs, ("here", {"path": str(path), **options}))
    place = store_folder(folder, str(path), args, ENCODER)
    for _ in build(place, str(path), args, ENCODER):
        pass
    return Store(place)


def texts(store: Store) -> list[list[str | None]]:
    """What the rows say."""
    return [
        [None if number < 0 else ENCODER.tokenizer.decode(store.tokens(number)[1:-1]) for number in row]
        for row in store.rows
    ]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def renamed(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in row.items()}


def listed(row: dict[str, Any]) -> dict[str, Any]:
    return {"query": row["query"], "positive": row["positive"], "negatives": [row["negative_1"], row["negative_2"]]}


@pytest.mark.parametrize("write", [write_jsonl, parquet])
@pytest.mark.parametrize("layout", ["numbered", "anchor", "list"])
def test_layouts_of_sentence_transformers_are_the_same_rows(tmp_path: Path, write: Any, layout: str) -> None:
    """triplet-50's negative_1, negative_2, ...; anchor for query; and a list."""
    rows = {
        "numbered": ROWS,
        "anchor": [renamed(row, {"query": "anchor"}) for row in ROWS],
        "list": [listed(row) for row in ROWS],
    }[layout]
    store = open_store(tmp_path / "cache", write(tmp_path / f"rows.{write.__name__.removeprefix('write_')}", rows))
    assert texts(store) == EXPECTED
    assert len(store) == 2 + 5  # "yes one" stands once
    assert store.manifest["negatives"] == 2


def test_triplets_pairs_and_rows_of_different_width(tmp_path: Path) -> None:
    triplets = [{"query": a, "positive": b, "negative": c} for a, b, c, _ in EXPECTED]
    assert texts(open_store(tmp_path, write_jsonl(tmp_path / "triplets.jsonl", triplets))) == [r[:3] for r in EXPECTED]
    plain = [{"query": a, "positive": b} for a, b, *_ in EXPECTED]
    assert texts(open_store(tmp_path, write_jsonl(tmp_path / "plain.jsonl", plain))) == [r[:2] for r in EXPECTED]
    ragged = [listed(ROWS[0]), {**listed(ROWS[1]), "negatives": ["no two"]}]
    found = texts(open_store(tmp_path, write_jsonl(tmp_path / "ragged.jsonl", ragged)))
    assert found == [EXPECTED[0], [*EXPECTED[1][:3], None]]


@pytest.mark.parametrize("suffix", ["", "_id"])
def test_ids_are_joined_with_queries_and_collection(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "queries.tsv").write_text("7\task one\n8\task two\n9\tnever asked\n")
    (tmp_path / "collection.tsv").write_text("1\tyes one\n2\tno one\n3\tnot one\n4\tyes two\n5\tno two\n6\t \n")
    rows = [
        {f"query{suffix}": 7, f"positive{suffix}": 1, f"negative{suffix}_1": 2, f"negative{suffix}_2": 3},
        {f"query{suffix}": "8", f"positive{suffix}": "4", f"negative{suffix}_1": "5", f"negative{suffix}_2": "1"},
    ]
    ids = {"queries": str(tmp_path / "queries.tsv"), "collection": str(tmp_path / "collection.tsv")}
    assert texts(open_store(tmp_path, write_jsonl(tmp_path / "ids.jsonl", rows), **ids)) == EXPECTED
    assert texts(open_store(tmp_path, parquet(tmp_path / "ids.parquet", rows[:1]), **ids)) == EXPECTED[:1]
    for place, change, message in (
        ("unknown", {f"positive{suffix}": 17}, r"unknown.jsonl, line 1: passage 17 is not in .*collection.tsv"),
        ("empty", {f"positive{suffix}": 6}, r"empty.jsonl, line 1: passage '6' has no token"),
    ):
        with pytest.raises(UserError, match=message):
            open_store(tmp_path, write_jsonl(tmp_path / f"{place}.jsonl", [rows[0] | change]), **ids)
    with (tmp_path / "queries.tsv").open("a") as file:
        file.write("7\tagain\n")
    with pytest.raises(UserError, match=r"queries\.tsv, line 4: the id 7 stands there a second time"):
        open_store(tmp_path, tmp_path / "ids.jsonl", **ids)


BAD = [
    ({"query": " "}, "query is empty"),
    ({"positive": ""}, "positive is empty"),
    ({"query": None}, "no query"),
    ({"negative_2": None}, "no negative_2"),
    ({"negative_1": "yes one"}, "the positive is also a negative"),
    ({"positive": 1.5}, "positive is float: expected a text or an id"),
    ({"negatives": ["no one"]}, "a column negatives that the file's first row does not have: give it to all or none"),
    ({"anchor": "ask"}, "a column anchor that the file's first row does not have: give it to all or none"),
    ({"query": "half a smile \ud83d"}, "query has half of a surrogate pair, which is no character"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, change: dict, reason: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[1], ROWS[0] | change])
    with pytest.raises(UserError, match=f"rows.jsonl, line 2: {reason}; .*data.on_error=skip"):
        open_store(tmp_path / "cache", path)


def test_bad_rows_that_are_skipped_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without = {key: value for key, value in ROWS[0].items() if key != "negative_1"}
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, *(ROWS[0] | change for change, _ in BAD), without])
    with caplog.at_level("INFO"):
        store = open_store(tmp_path / "cache", path, on_error="skip")
    assert texts(store) == EXPECTED
    counts = store.manifest["left_out"]
    assert sum(counts.values()) == len(BAD) + 1
    assert counts["query is empty"] == counts["positive among negatives"] == counts["no negative_1"] == 1
    assert store.manifest["left_out_examples"][-1] == f"{path}, line 12: no negative_1"
    assert "10 left out: " in caplog.text
    with pytest.raises(UserError, match=r"no row to train on; 1 left out: 1 query is empty \(such as .*, line 1"):
        open_store(tmp_path / "cache", write_jsonl(tmp_path / "all.jsonl", [ROWS[0] | BAD[0][0]]), on_error="skip")


def test_wrong_columns_broken_lines_and_missing_files_are_named(tmp_path: Path) -> None:
    for row, message in (
        ({"text": "a", "positive": "b"}, "one column of query, anchor, .* for the query, found none among text, pos"),
        ({"query": "a", "anchor": "b", "positive": "c"}, "found query, anchor among"),
        ({"query": "a", "answer": "b"}, "for the positive, found none"),
    ):
        with pytest.raises(UserError, match=f"line 1: .*{message}"):
            open_store(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]))
    (tmp_path / "cut.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"query": "a')
    with pytest.raises(UserError, match=r"cut\.jsonl, line 2: not JSON"):
        open_store(tmp_path, tmp_path / "cut.jsonl", on_error="skip")
    with pytest.raises(UserError, match="no file matches"):
        open_store(tmp_path, tmp_path / "none.jsonl")
    for name in ("pairs.txt", "pairs.json", "pairs.conll"):
        (tmp_path / name).write_text("a\tb\n")
        with pytest.raises(UserError, match=rf"{name}: rows are read from \.jsonl, \.csv, \.tsv .*or \.parquet$"):
            open_store(tmp_path, tmp_path / name)
    assert not list(tmp_path.glob("*/manifest.json"))


BLANK = {
    "jsonl": ["", '{"query": "q 1", "positive": "p 1"}', "", " \t ", '{"query": "q 2", "positive": ""}', ""],
    "csv": ["", "query,positive", "q 1,p 1", "", "  ", '"q 2",""', ""],
    "tsv": ["", "query\tpositive", "q 1\tp 1", "", "  ", "q 2\t", ""],
}


@pytest.mark.parametrize("ending", BLANK)
def test_blank_lines_are_passed_over_by_all_readers_and_lines_are_those_of_the_file(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_text("\n".join(BLANK[ending]) + "\n")
    at = [number for number, line in enumerate(BLANK[ending], start=1) if "q " in line]
    assert [(t.line, t.text, t.bad) for t in read_texts(str(path), "query")] == [(at[0], "q 1", ""), (at[1], "q 2", "")]
    bad = BadRows("skip")
    assert [(row.place, row.query, row.positive) for row in read_pairs(str(path), bad)] == [
        (f"{path}, line {at[0]}", "q 1", "p 1")
    ]
    assert bad.examples == [f"{path}, line {at[1]}: positive is empty"]


def test_blank_lines_among_ids_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "queries.tsv"
    path.write_text("\n7\task one\n\n  \n8\task two\n\n")
    assert list(read_ids(str(path))) == [(f"{path}, line 2", "7", "ask one"), (f"{path}, line 5", "8", "ask two")]
    path.write_text("7\task one\n\n8\n")
    with pytest.raises(UserError, match=r"queries\.tsv, line 3: expected an id and a text, found \['8'\]"):
        list(read_ids(str(path)))


def test_long_texts_are_cut_and_counted_and_prompts_count_too(tmp_path: Path) -> None:
    options = {"max_length": {"query": 6, "passage": 9}, "prompt": {"query": "?", "passage": ""}}
    rows = [{"query": "ab", "positive": "abcdefg", "negatives": ["abcdefgh"]}, {"query": "abcd", "positive": "x"}]
    store = open_store(
        tmp_path, write_jsonl(tmp_path / "rows.jsonl", [rows[0], {**rows[1], "negatives": []}]), **options
    )
    assert texts(store) == [["?ab", "abcdefg", "abcdefg"], ["?abc", "x", None]]
    assert store.manifest["cut"] == {"query": 1, "passage": 1}


def test_the_store_is_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    first = open_store(tmp_path / "cache", path)
    manifest = next((tmp_path / "cache").glob("*/manifest.json"))
    made = manifest.stat().st_mtime_ns
    assert open_store(tmp_path / "cache", path).manifest == first.manifest
    assert manifest.stat().st_mtime_ns == made
    write_jsonl(path, ROWS[:1])
    assert len(open_store(tmp_path / "cache", path).rows) == 1
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return open_store(folder / "cache", write_jsonl(folder / "rows.jsonl", pairs(50)))


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(store: Store) -> None:
    batches = Batches(store, np.arange(50), 10, -1, False, seed=1)
    epochs = [np.concatenate([batches.numbers(step)[:, 0] for step in range(first, first + 5)]) for first in (1, 6)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(store.rows[:, 0])
    assert not np.array_equal(*epochs)
    again = Batches(store, np.arange(50), 10, -1, False, seed=1)
    np.testing.assert_array_equal(again.numbers(7), batches.numbers(7))  # asked for at once, as after a resume
    other = Batches(store, np.arange(50), 10, -1, False, seed=2)
    assert not np.array_equal(other.numbers(7), batches.numbers(7))
    assert Batches(store, np.arange(50), 12, -1, False, seed=1).position(5) == (1, 0)  # 2 rows wait for no batch


def test_fewer_negatives_are_drawn_anew_in_each_epoch(store: Store) -> None:
    batches = Batches(store, np.arange(50), 50, 1, False, seed=0)
    drawn = []
    for step in (1, 2, 3):
        numbers = batches.numbers(step)
        drawn.append({int(row[0]): int(row[2]) for row in numbers})
        for row in numbers:
            whole = store.rows[np.flatnonzero(store.rows[:, 0] == row[0])[0]]
            assert row[2] in whole[2:]
    assert 5 < sum(drawn[0][query] != drawn[1][query] for query in drawn[0]) < 45


def test_no_batch_has_a_text_twice_if_asked() -> None:
    """Each passage is in four rows, each query in two."""
    rows = np.array([[100 + i // 2, i % 10, (i + 3) % 10] for i in range(20)], dtype=np.int32)
    order = np.arange(20)
    chosen = spread_duplicates(order, rows, 4)
    assert len(chosen) >= 16
    assert len(set(chosen.tolist())) == len(chosen)
    for batch in chosen.reshape(-1, 4):
        assert len(np.unique(rows[batch])) == 4 * 3
    assert any(len(np.unique(rows[batch])) < 12 for batch in order.reshape(-1, 4))
    assert not len(spread_duplicates(order, rows, 6))  # ten passages are too few for six rows of two


def test_held_out_queries_take_all_their_rows_along() -> None:
    rows = np.array([[i % 7, 50 + i] for i in range(30)], dtype=np.int32)
    mask = held_out(rows, 3)
    assert len(set(rows[mask, 0])) == 3
    assert not set(rows[mask, 0]) & set(rows[~mask, 0])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_share_every_query_once(size: int) -> None:
    numbers = np.arange(7 * 4).reshape(7, 4)
    shares = [share(numbers, rank, size, True) for rank in range(size)]
    assert len({len(texts) for texts, _, _ in shares}) == 1
    queries = np.concatenate([found.query_N[found.weight_N > 0].numpy() for _, _, found in shares])
    assert sorted(queries) == list(range(7))
    for _, _, found in shares:  # every rank compares with the same passages
        for name in ("owner_M", "positive_M", "real_M"):
            np.testing.assert_array_equal(getattr(found, name), getattr(shares[0][2], name))
        assert int(found.real_M.sum()) == 7 * 3
