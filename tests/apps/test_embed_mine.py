"""Hard negatives against a plain loop over all passages; kills; what is refused; that training reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.embed import mine as module
from apps.embed.data import BadRows, read_pairs
from apps.embed.mine import MineArgs, mine, nearest
from lingua.embedder import load_embedder
from lingua.errors import UserError
from tests.ranks import run_ranks
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES

TEXTS = [sentence[i:].strip() for i in range(0, 30, 3) for sentence in SENTENCES]  # 50, all different


CHOICE = {"rank_to": 12, "max_share": 0.999}  # cosines of an untrained model are above 0.9 all


def pairs() -> list[dict]:
    """Pairs; query 0 has three positives, and query 2 is a passage as well."""
    numbers = [*((i, i + 20) for i in range(20)), (0, 45), (0, 46), (3, 2)]
    rows = [{"query": TEXTS[query], "positive": TEXTS[positive], "negatives": []} for query, positive in numbers]
    rows[5]["negatives"] = [TEXTS[47]]
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    make_model(folder / "roberta", "roberta")
    make_model(folder / "bert", "bert")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    (folder / "corpus.txt").write_text("\n".join([*TEXTS[48:], TEXTS[0], TEXTS[48]]) + "\n")
    return folder


def args(folder: Path, out: Path, **changes: object) -> MineArgs:
    given = {"model": f"hf:{folder}/roberta", "path": str(folder / "pairs.jsonl"), "out": str(out), "part_rows": 7}
    return MineArgs(**{**given, "corpus": str(folder / "corpus.txt"), "negatives": 4, **CHOICE, **changes})


def expected(folder: Path, rank_from: int, rank_to: int, share: float, margin: float, n: int) -> list[dict]:
    """The same by a loop, a row at a time."""
    model = load_embedder(f"hf:{folder}/roberta", device="cpu")
    rows, passages = pairs(), list(dict.fromkeys([*(r["positive"] for r in pairs()), TEXTS[47], *TEXTS[48:], TEXTS[0]]))
    x = model.encode(passages).astype(np.float64)
    found = []
    for row in rows:
        q = model.encode([row["query"]])[0].astype(np.float64)
        scores = x @ q
        positive = scores[passages.index(row["positive"])]
        own = {r["positive"] for r in rows if r["query"] == row["query"]} | {row["query"]}
        others = [i for i in np.argsort(-scores) if passages[i] not in own][rank_from:rank_to]
        limit = min(positive - (1 - share) * abs(positive), positive - margin)
        kept = [i for i in others if scores[i] <= limit][:n]
        found.append({"negatives": [passages[i] for i in kept], "scores": [positive, *scores[kept]]})
    return found


@pytest.mark.parametrize(
    ("rank_from", "rank_to", "share", "margin", "n"),
    [(0, 12, 1.0, 0.0, 4), (2, 9, 0.999, 0.0, 4), (0, 44, 1.0, 0.01, 3), (0, 44, 0.97, 0.0, 3)],
)
def test_negatives_are_those_of_a_plain_loop(
    folder: Path, tmp_path: Path, rank_from: int, rank_to: int, share: float, margin: float, n: int
) -> None:
    changes = {"rank_from": rank_from, "rank_to": rank_to, "max_share": share, "margin": margin, "negatives": n}
    account = mine(args(folder, tmp_path / "out.jsonl", **changes))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    wanted = expected(folder, rank_from, rank_to, share, margin, n)
    assert [(line["query"], line["positive"]) for line in lines] == [(r["query"], r["positive"]) for r in pairs()]
    for line, right in zip(lines, wanted, strict=True):
        assert line["negatives"] == right["negatives"]
        np.testing.assert_allclose(line["scores"], right["scores"], atol=2e-6)
    counts = [len(right["negatives"]) for right in wanted]
    assert account["short"] == sum(count < n for count in counts)
    assert account["none"] == counts.count(0)
    assert account["negatives_found"] == sum(counts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.json"]


def test_training_reads_them_and_rows_that_are_short_can_be_dropped(folder: Path, tmp_path: Path) -> None:
    account = mine(args(folder, tmp_path / "out.jsonl", short_rows="drop"))
    rows = list(read_pairs(str(tmp_path / "out.jsonl"), BadRows("fail")))
    assert len(rows) == account["rows"] == len(pairs()) - account["dropped"]
    assert 0 < account["dropped"] == account["short"]
    assert all(len(row.negatives) == 4 and row.positive not in row.negatives for row in rows)


def test_the_lot_takes_others_of_the_same_window_and_again_the_same(folder: Path, tmp_path: Path) -> None:
    def negatives(**changes: object) -> list[list[str]]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        mine(args(folder, out, max_share=1.0, **changes))
        return [json.loads(line)["negatives"] for line in out.read_text().splitlines()]

    window = negatives(negatives=12)
    lots = [negatives(pick="lot", seed=seed) for seed in (0, 0, 1)]
    assert lots[0] == lots[1] != lots[2]
    assert lots[0] != negatives()
    for row, whole in zip(lots[0], window, strict=True):
        assert row == [text for text in whole if text in row]  # some of the window, in its order
        assert len(row) == min(4, len(whole))


def test_after_a_kill_it_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine(args(folder, tmp_path / "whole.jsonl"))
    plain, calls = module.nearest, []

    def dies_at_the_third(*rest: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*rest)

    monkeypatch.setattr(module, "nearest", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        mine(args(folder, tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(UserError, match="differs in part_rows"):
        mine(args(folder, tmp_path / "out.jsonl", part_rows=8))
    mine(args(folder, tmp_path / "out.jsonl"))
    assert len(calls) == 3 + 2  # of four parts two were done
    mine(args(folder, tmp_path / "out.jsonl"))
    assert len(calls) == 5
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_blocks_and_files_change_nothing_and_ties_go_to_the_lower_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    queries, passages = (generator.integers(-2, 3, size=(n, 4)).astype(np.float32) for n in (11, 40))
    files = []
    for index, part in enumerate(np.split(passages, [9, 10, 33])):
        files.append(tmp_path / f"{index}.npy")
        np.save(files[-1], part)
    monkeypatch.setattr(module, "QUERY_BLOCK", 4)
    scores, numbers = nearest(queries, files, 40, torch.device("cpu"))
    whole = queries @ passages.T
    order = np.argsort(-whole, axis=1, kind="stable")
    np.testing.assert_array_equal(numbers, order)
    np.testing.assert_array_equal(scores, np.take_along_axis(whole, order, 1))
    assert nearest(queries, files, 5, torch.device("cpu"))[0].tolist() == scores[:, :5].tolist()


def test_bad_rows_and_settings_are_named(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "a fox", "positive": "a dog"}\n{"query": "", "positive": "a dog"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: query is empty; .* with on_error=skip"):
        mine(args(folder, tmp_path / "out.jsonl", path=str(bad)))
    account = mine(args(folder, tmp_path / "skip.jsonl", path=str(bad), on_error="skip"))
    assert (account["rows"], account["bad"]) == (1, 1)
    (tmp_path / "corpus.txt").write_text("a text\n\n")
    with pytest.raises(UserError, match=r"corpus.txt, line 2: empty text"):
        mine(args(folder, tmp_path / "corpus.jsonl", corpus=str(tmp_path / "corpus.txt")))
    account = mine(args(folder, tmp_path / "c.jsonl", corpus=str(tmp_path / "corpus.txt"), on_error="skip"))
    assert (account["passages"], account["bad"]) == (25, 1)
    for change, message in (
        ({"negatives": 0}, "at least 1"),
        ({"rank_from": 10}, r"rank_from \+ negatives"),
        ({"max_share": 1.5}, "at most 1"),
        ({"margin": float("nan")}, "at least 0"),
        ({"pick": "best"}, "top or lot"),
        ({"out": "x.parquet"}, "ends in .jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            args(folder, **{"out": tmp_path / "x.jsonl", **change})


def test_texts_that_the_tokenizer_drops_are_bad_rows(folder: Path, tmp_path: Path) -> None:
    rows = [{"query": "a fox", "positive": "a dog"}, {"query": "\u200b", "positive": "an owl"}]
    bad = tmp_path / "bad.jsonl"
    given = {"model": f"hf:{folder}/bert", "path": str(bad), "max_share": 1.0, "rank_to": 40}
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: a text without a token"):
        mine(args(folder, tmp_path / "out.jsonl", **given))
    bad.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"query": "a cat", "positive": "\ud83d"}]))
    account = mine(args(folder, tmp_path / "skip.jsonl", **given, on_error="skip"))
    assert account["bad_listed"] == [
        f"{bad}, line 2: a text without a token: the tokenizer drops all of it",
        f"{bad}, line 3: positive has half of a surrogate pair, which is no character",
    ]


def test_where_nothing_is_mined_it_says_so_and_another_choice_uses_the_same_vectors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=r"no row gets a negative: .* train it on the pairs first"):
        mine(args(folder, out, margin=2.0))
    assert not out.exists()
    texts = (tmp_path / "out.jsonl.work" / "texts.json").stat()
    vectors = sorted((tmp_path / "out.jsonl.work").glob("*/part_*.npy"))
    before = {path: path.stat().st_mtime_ns for path in vectors}
    seen = []
    plain = module._join

    def join(*rest: object) -> object:
        seen.append({path: path.stat().st_mtime_ns for path in vectors} == before)
        seen.append((tmp_path / "out.jsonl.work" / "texts.json").stat() == texts)
        return plain(*rest)

    monkeypatch.setattr(module, "_join", join)
    account = mine(args(folder, out, max_share=1.0))
    monkeypatch.undo()
    assert seen == [True, True]
    assert account["negatives_found"] > 0
    mine(args(folder, tmp_path / "whole.jsonl", max_share=1.0))
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    capsys.readouterr()
    account = mine(args(folder, tmp_path / "few.jsonl", max_share=0.96, rank_to=44))
    assert len(pairs()) > account["none"] > len(pairs()) / 2
    assert "Most rows have none: the passages of these ranks are as near" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    mine(args(folder, tmp_path / "one.jsonl"))
    words = [f"model=hf:{folder}/roberta", f"path={folder}/pairs.jsonl", f"corpus={folder}/corpus.txt", "part_rows=7"]
    words += ["negatives=4", *(f"{name}={value}" for name, value in CHOICE.items()), f"out={tmp_path}/two.jsonl"]
    for ended in run_ranks(2, ["-m", "apps.embed.mine", *words], tmp_path / "logs"):
        assert ended.status == 0, ended.text
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
