"""Encoding of files: order, formats, bad rows, kills; vectors against sentence-transformers."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from apps.embed import encode as module
from apps.embed.encode import EncodeArgs, encode
from apps.embed.texts import read_texts
from lingua.args import cli
from lingua.errors import UserError
from lingua.tokenizer import SentencePieceTokenizer
from tests.ranks import run_ranks
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, make_pieces_run

TEXTS = [sentence[i:].strip() for i in range(0, 21, 3) for sentence in SENTENCES]  # 35 of many lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face (``bert``), a run (``run``) and the texts in files of every kind."""
    folder = tmp_path_factory.mktemp("encode")
    make_model(folder / "bert", "bert")
    make_pieces_run(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    with gzip.open(folder / "texts.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(TEXTS)])
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "texts.parquet")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """Vectors of TEXTS by sentence-transformers itself."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder / "bert"), device="cpu").encode(TEXTS, normalize_embeddings=True)


def args(folder: Path, out: Path, name: str = "texts.jsonl", **changes: object) -> EncodeArgs:
    return EncodeArgs(
        **{"model": f"hf:{folder}/bert", "input": str(folder / name), "out": str(out), "part_rows": 8, **changes}
    )


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.txt", "texts.csv.gz", "texts.parquet"])
def test_every_kind_of_file_gives_the_vectors_of_sentence_transformers_in_order(
    folder: Path, expected: np.ndarray, tmp_path: Path, name: str
) -> None:
    summary = encode(args(folder, tmp_path / "v.npy", name))
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-5)
    assert (summary["rows"], summary["parts"], summary["bad"]) == (35, 5, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.npy", "v.npy.json"]


def test_parquet_parts_name_the_row_and_several_files_follow_one_another(
    folder: Path, expected: np.ndarray, tmp_path: Path
) -> None:
    with fsspec.open("memory://texts.jsonl", "w") as file:
        file.write((folder / "texts.jsonl").read_text())
    both = f"memory://texts.jsonl,{folder}/texts.txt"
    encode(args(folder, tmp_path / "v", input=both, format="parquet"))
    table = parquet.read_table(tmp_path / "v")
    got = np.stack(table["vector"].to_numpy())
    first = table["file"].to_pylist()[0]
    assert table["line"].to_pylist() == [*range(1, 36), *range(1, 36)]
    assert (
        table["file"].to_pylist()
        == [first] * 35 + [({f"{folder}/texts.txt", "memory:///texts.jsonl"} - {first}).pop()] * 35
    )
    np.testing.assert_allclose(got, np.concatenate([expected, expected]), atol=1e-5)


def test_a_run_is_encoded_and_a_text_over_the_length_is_counted(folder: Path, tmp_path: Path) -> None:
    changes = {"model": None, "ckpt": str(folder / "run"), "max_length": 16}
    summary = encode(args(folder, tmp_path / "v.npy", **changes))
    assert summary["model"] == "run/0000000003"
    assert summary["truncated"] == sum(len(ids) > 14 for ids in _pieces(folder))
    assert np.load(tmp_path / "v.npy").shape == (35, 32)


def _pieces(folder: Path) -> list[np.ndarray]:
    return SentencePieceTokenizer(str(folder / "pieces.model")).encode_batch(TEXTS)


def test_after_a_kill_only_the_missing_parts_are_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(args(folder, tmp_path / "whole"))
    made, write = [], module._make_part

    def dies_at_the_third(arguments: EncodeArgs, *rest: object) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(rest[2])
        write(arguments, *rest)

    monkeypatch.setattr(module, "_make_part", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        encode(args(folder, tmp_path / "v"))
    assert not (tmp_path / "v" / module.DONE).exists()
    (tmp_path / "v/_part_000003.json").write_text("{}")  # a kill between a part's account and its vectors
    made.clear()
    monkeypatch.setattr(module, "_make_part", lambda arguments, *rest: (made.append(rest[2]), write(arguments, *rest)))
    encode(args(folder, tmp_path / "v"))
    assert made == [3, 4]
    for name in ("_vectors.json", *(f"part_{i:06d}.npy" for i in range(5))):
        assert (tmp_path / "v" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_vectors_of_something_else_are_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    encode(args(folder, tmp_path / "v"))
    encode(args(folder, tmp_path / "v.npy"))
    other = make_model(tmp_path / "other", "bert", seed=1)
    for out in ("v", "v.npy"):
        with pytest.raises(UserError, match=r"differs in identity"):
            encode(args(folder, tmp_path / out, model=f"hf:{other}"))
        with pytest.raises(UserError, match=r"differs in input"):
            encode(args(folder, tmp_path / out, "texts.txt"))
    (tmp_path / "else").mkdir()
    (tmp_path / "else/file").touch()
    with pytest.raises(UserError, match="something else"):
        encode(args(folder, tmp_path / "else"))


def test_bad_rows_are_named_by_file_and_line_or_keep_their_place_as_zeros(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a dog"}\n{"text": "  "}\n{"text": 5}\n{"text": "\\u200b"}\n{"text": "a fox"}\nno json\n')
    bad.write_text(bad.read_text() + '{"body": "a cat"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: empty text"):
        encode(args(folder, tmp_path / "v.npy", input=str(bad)))
    summary = encode(args(folder, tmp_path / "z.npy", input=str(bad), bad_rows="zeros"))
    vectors = np.load(tmp_path / "z.npy")
    assert list(np.linalg.norm(vectors, axis=1).round(5)) == [1, 0, 0, 0, 1, 0, 0]
    assert summary["bad"] == 5
    assert summary["bad_listed"][-1].endswith("no column 'text', found body; name it with column=COLUMN")
    assert [line.split("bad.jsonl, ")[1].split(":")[0] for line in summary["bad_listed"]] == [
        "line 2", "line 3", "line 4", "line 6", "line 7",
    ]  # fmt: skip
    for index, (text, reason) in enumerate((("\\u200b", "no token"), ("a \\ud83d", "the text has half of a surrog"))):
        bad.write_text(f'{{"text": "a dog"}}\n{{"text": "{text}"}}\n')
        with pytest.raises(UserError, match=rf"bad.jsonl, line 2: {reason}"):
            encode(args(folder, tmp_path / f"v{index}.npy", input=str(bad)))
        assert encode(args(folder, tmp_path / f"z{index}.npy", input=str(bad), bad_rows="zeros"))["bad"] == 1


def test_columns_that_are_missing_and_damaged_files_are_told(folder: Path, tmp_path: Path) -> None:
    for name in ("texts.jsonl", "texts.csv.gz", "texts.parquet"):
        with pytest.raises(UserError, match=rf"{name}.*no column 'body', found .*text.*column=COLUMN"):
            list(read_texts(str(folder / name), "body"))
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes((folder / "texts.csv.gz").read_bytes()[:-200])
    with pytest.raises(UserError, match=r"cut.csv.gz: cannot be read after line"):
        list(read_texts(str(cut), "text"))
    (tmp_path / "wrong.csv").write_text('id,text\n1,"two\nlines"\n2\n3,three\n')
    rows = read_texts(str(tmp_path / "wrong.csv"), "text")
    assert next(rows).text == "two\nlines"
    with pytest.raises(UserError, match=r"wrong.csv, line 4: 1 columns, the first line names 2"):
        next(rows)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="has no rows"):
        encode(args(folder, tmp_path / "none", input=str(tmp_path / "empty.jsonl")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "csv"}, "expected one of npy, parquet"),
        ({"out": "v.npy", "format": "parquet"}, "give a folder"),
        ({"bad_rows": "skip"}, "expected fail or zeros"),
        ({"part_rows": 0}, "at least 1"),
        ({"prompt": "question"}, "expected query or passage"),
        ({"ckpt": "runs/x"}, "give one of ckpt=RUN and model="),
        ({"model": "bert"}, "expected hf:NAME or st:NAME"),
        ({"dtype": "fp16"}, "expected fp32, bf16 or auto"),
        ({"dim": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder: Path, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        args(folder, **{"out": Path("v"), **change})


def test_fewer_channels_are_a_prefix_and_more_are_refused(
    folder: Path, expected: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model=hf:{folder}/bert", f"input={folder}/texts.txt", f"out={tmp_path}/v.npy"]
    cli(EncodeArgs, encode, "encode", [*words, "dim=8"])
    prefix = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), prefix, atol=1e-5)
    with pytest.raises(SystemExit):
        cli(EncodeArgs, encode, "encode", [*words[:2], f"out={tmp_path}/w", "dim=64"])
    assert "dim=64" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_the_parts_and_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    encode(args(folder, tmp_path / "one"))
    words = ["-m", "apps.embed.encode", f"model=hf:{folder}/bert", f"input={folder}/texts.jsonl", "part_rows=8"]
    for ended in run_ranks(2, [*words, f"out={tmp_path}/two"], tmp_path / "logs"):
        assert ended.status == 0, ended.text
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name
