"""Whole contrastive trainings: resumed, frozen, on several ranks, from caches, and what comes out of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.embed.run import Embedding, EmbedTrainArgs
from lingua.args import parse
from lingua.checkpoint import load_encoder_weights, load_weights, resolve
from lingua.embedder import load_embedder
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.metrics import read_metrics
from lingua.predictor import Predictor, PredictorArgs
from tests.pairs import backbone, cosine, pairs, words, write_jsonl
from tests.ranks import losses, run_ranks
from tests.support import deterministic, run_app
from tests.tiny_models import make_model
from tests.tiny_run import make_pieces_run

ROWS = pairs(60)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", ROWS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return backbone(tmp_path_factory.mktemp("backbone") / "run")


def records(run: Path) -> list[dict]:
    found = deterministic(read_metrics(run / "metrics.jsonl"))
    return [{key: value for key, value in record.items() if key != "queries_per_second"} for record in found]


SETTINGS = {
    "steps": 14,
    "pooler__warm_start": "true",
    "data__hold_out": 10,
    "validation__every": 7,
    "checkpoint__dump__every": 5,
    "loss__learn_temperature": "true",
}


@pytest.fixture(scope="module")
def finished(data: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen, warm-started training of two epochs and more."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_app("embed", words(data, source, folder, **SETTINGS))
    return folder


def test_it_learns_and_records_what_a_query_sees(finished: Path) -> None:
    steps = [record for record in records(finished) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 15))
    assert {record["negatives"] for record in steps} == {8 * 3 - 1.0}
    assert steps[5]["epoch"] == 1.0  # 50 rows that are not held out: 6 steps of 8
    assert steps[-1]["queries"] == 14 * 8
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert steps[-1]["temperature"] != 0.05
    ranked = [record for record in records(finished) if "valid/held_out/mrr@10" in record]
    assert [record["step"] for record in ranked] == [7, 14]
    assert ranked[1]["valid/held_out/ndcg@10"] > 0.5  # by chance: 0.15


def test_a_frozen_encoder_keeps_every_bit_and_is_used_by_itself(finished: Path, source: Path) -> None:
    before, after = (load_encoder_weights(run)[0].state_dict() for run in (source, finished))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    texts = [row["query"] for row in ROWS[:3]]
    np.testing.assert_array_equal(
        load_encoder(finished, device="cpu").encode(texts), load_encoder(source, device="cpu").encode(texts)
    )


def test_a_warm_start_gives_the_predictors_own_output(data: Path, source: Path, tmp_path: Path) -> None:
    """Before the first step, on the query position that is asked for; each text alone, by the parts of the source."""
    args = parse(EmbedTrainArgs, words(data, source, tmp_path, pooler__warm_start="true", pooler__position=3))
    with Embedding(args) as run, torch.no_grad():
        model = run.build_model()
        model.init_weights()
        (texts,) = run.batch(1).parts[0][:1]
        found_BD, _ = model(*texts.arguments())
    encoder, config = load_encoder_weights(source)
    predictor = Predictor(PredictorArgs(**config["model"]["predictor"]), encoder.args)
    load_weights(source, torch.nn.ModuleDict({"predictor": predictor}))
    with torch.no_grad():
        for row in (0, len(found_BD) // 2, len(found_BD) - 1):
            tokens = texts.tokens_BS[row : row + 1, : texts.lengths_B[row]]
            places = torch.arange(tokens.shape[1])[None]
            expected = predictor(encoder(tokens), places, torch.tensor([[3]]))[0, 0]
            torch.testing.assert_close(found_BD[row], expected, atol=1e-5, rtol=1e-5)


def test_a_run_that_reads_its_own_copy_of_a_vocabulary_goes_on(data: Path, tmp_path: Path) -> None:
    command = words(data, make_pieces_run(tmp_path, predictor={"n_layers": 2}), tmp_path / "embed")
    for steps in (2, 3):
        run_app("embed", [*command, f"steps={steps}", "resume.allow=[steps]"])
    assert [record["step"] for record in records(tmp_path / "embed") if "loss" in record] == [1, 2, 3]


def test_a_killed_run_goes_on_bit_by_bit(
    finished: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    real = Embedding.save

    def save(self: Embedding, step: int, *args: object) -> None:
        real(self, step, *args)
        if step == 9:
            raise Killed

    monkeypatch.setattr(Embedding, "save", save)
    command = words(data, source, tmp_path / "run", **SETTINGS)
    with pytest.raises(Killed):
        run_app("embed", command)
    monkeypatch.undo()
    moved = data.with_name("moved.jsonl")
    moved.write_bytes(data.read_bytes())
    # Where the same data lies, and the backbone, which is in the checkpoint, may change.
    run_app("embed", [*command, f"data.path={moved}", "backbone=gone"])
    assert records(tmp_path / "run") == records(finished)
    write_jsonl(moved, ROWS[:-1])
    with pytest.raises(UserError, match="hold other text"):
        run_app("embed", [*command, f"data.path={moved}", "steps=20", "resume.allow=[steps]"])
    with pytest.raises(UserError, match=r"loss\.temperature=0\.05, this command says loss\.temperature=0\.1"):
        run_app("embed", [*command, "loss.temperature=0.1"])


def test_the_model_is_read_back_as_it_was_validated(finished: Path, data: Path, source: Path) -> None:
    """MRR of the last validation, by a float64 loop over what ``load_embedder`` encodes."""
    model = load_embedder(finished, device="cpu")
    args = parse(EmbedTrainArgs, words(data, source, finished, **SETTINGS))
    with Embedding(args) as run:
        rows, store = run.ranked["held_out"], run.stores["held_out"]
    text = {}
    for row in ROWS:
        for role, name in (
            ("query", "query"),
            ("passage", "positive"),
            ("passage", "negative_1"),
            ("passage", "negative_2"),
        ):
            text[tuple(model.sequences([row[name]], role).ids[0])] = row[name]
    written = [[text[tuple(store.tokens(number))] for number in row] for row in rows]
    corpus = sorted({passage for row in written for passage in row[1:]})
    score_NM = cosine(model.encode([row[0] for row in written], "query"), model.encode(corpus, "passage"))
    reciprocal = []
    for score_M, row in zip(score_NM, written, strict=True):
        rank = 1 + int((score_M > score_M[corpus.index(row[1])]).sum())
        reciprocal.append(1 / rank if rank <= 10 else 0.0)
    assert np.mean(reciprocal) == pytest.approx(records(finished)[-1]["valid/held_out/mrr@10"], abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"loss__in_batch": "false", "loss__cross_rank": "false"}])
def test_parts_and_caches_do_not_change_the_mathematics(
    data: Path, source: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    found = []
    changes = [{"micro_rows": 1000}, {"micro_rows": 5}, {"cache_states": "true"}]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        run_app("embed", words(data, source, folder, dtype="fp64", steps=4, data__hold_out=5, **change, **options))
        found.append(losses(folder))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-5)  # states are kept in float32


def test_the_whole_encoder_learns_if_it_is_not_frozen(data: Path, source: Path, tmp_path: Path) -> None:
    options = {"freeze": "false", "pooler__kind": "mean", "steps": 3, "data__negatives": 1, "loss__matryoshka": "[8]"}
    run_app("embed", words(data, source, tmp_path, **options, data__prompt="{query: 'ask ', passage: 'tell '}"))
    before, after = (load_encoder_weights(run)[0] for run in (source, tmp_path))
    assert not torch.equal(before.layers[0].ffn.w2.weight, after.layers[0].ffn.w2.weight)
    assert records(tmp_path)[0]["negatives"] == 8 * 2 - 1
    model = load_embedder(tmp_path, device="cpu")
    query = ROWS[0]["query"]
    np.testing.assert_allclose(model.encode([query], "query"), model.encode([f"ask {query}"]), atol=1e-6)
    assert np.abs(model.encode([query], "query") - model.encode([query], "passage")).max() > 1e-3


def test_an_encoder_of_hugging_face(data: Path, tmp_path: Path) -> None:
    """A cold pooler on it, and the whole of it; both runs are usable by themselves."""
    hf = make_model(tmp_path / "hf", "bert")
    run_app("embed", words(data, f"hf:{hf}", tmp_path / "pooler", steps=3, data__hold_out=5))
    run_app("embed", words(data, f"hf:{hf}", tmp_path / "whole", steps=2, freeze="false", pooler__kind="first"))
    hf.rename(tmp_path / "elsewhere")
    texts = [row["positive"] for row in ROWS[:4]]
    pooler, whole = (load_embedder(tmp_path / name, device="cpu") for name in ("pooler", "whole"))
    assert pooler.encode(texts).shape == (4, 32)
    plain = load_embedder(f"hf:{tmp_path / 'elsewhere'}", device="cpu")
    kept = plain.model.encoder.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in pooler.model.encoder.state_dict().items())
    assert not all(torch.equal(value, kept[name]) for name, value in whole.model.encoder.state_dict().items())
    run_app("embed", words(data, "hf:gone", tmp_path / "whole", steps=3, freeze="false", pooler__kind="first",
                           resume__allow="[steps]"))  # fmt: skip
    assert resolve(tmp_path / "whole").name == "0000000003"


@pytest.mark.slow
def test_ranks_do_not_change_the_loss_curve(data: Path, source: Path, tmp_path: Path) -> None:
    """One rank; two with copies, and a batch that they cannot share evenly; two that share the weights."""
    options = {
        "dtype": "fp64",
        "freeze": "false",
        "batch_queries": 7,
        "micro_rows": 9,
        "loss__learn_temperature": "true",
    }
    options |= {"data__hold_out": 9, "validation__every": 3}
    run_app("embed", words(data, source, tmp_path / "one", **options))
    for name, shard in (("copies", 1), ("shared", -1)):
        command = words(data, source, tmp_path / name, **options, distributed__dp_shard=shard)
        for ended in run_ranks(2, ["-m", "apps.embed.train", *command], tmp_path / f"{name}_out"):
            assert ended.status == 0, ended.text
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_rows_and_settings_that_cannot_work_are_named(data: Path, source: Path, tmp_path: Path) -> None:
    for change, message in {
        ("batch_queries", "61"): "batch_queries=61: the data has 60 rows",
        ("data.hold_out", "60"): "data.hold_out=60: the rows have 60 different queries",
        ("data.negatives", "3"): "data.negatives=3: no row has more than 2",
        ("loss.matryoshka", "[32]"): "loss.matryoshka has 32: the vectors have 32 channels",
        ("pooler.kind", "mean"): "freeze=true with pooler.kind=mean leaves nothing to train",
        ("pooler.position", "80"): "pooler.position=80: expected a place in the texts, which have at most 80 tokens",
        ("pooler.position", "-1"): "pooler.position=-1: expected at least 0",
        ("cache_states", "true"): "cache_states=true needs freeze=true",
        ("compile", "true"): "compile=true: batches of texts differ in length",
        ("epochs", "1"): "give exactly one of steps and epochs",
        ("backbone", "nowhere"): "nowhere: no such run or checkpoint folder",
        ("data.validation", "{held_out: x}"): "data.validation.held_out: that name is taken",
        ("data.queries", "x"): "data.queries and data.collection go together",
    }.items():
        more = ["freeze=false"] if change[0] == "cache_states" else []
        with pytest.raises(UserError, match=message.replace("[", r"\[")):
            run_app("embed", [*words(data, source, tmp_path / "run"), *more, "=".join(change)])
    (tmp_path / "plain.jsonl").write_text(json.dumps({"query": "a dog", "positive": "It barks ."}) + "\n")
    with pytest.raises(UserError, match="rows without negatives"):
        run_app("embed", words(tmp_path / "plain.jsonl", source, tmp_path / "none", loss__in_batch="false",
                               loss__cross_rank="false", batch_queries=1))  # fmt: skip
    bert = backbone(tmp_path / "bert", predictor=None)
    with pytest.raises(UserError, match="warm_start=true needs a CrossBERT"):
        run_app("embed", words(data, bert, tmp_path / "warm", pooler__warm_start="true"))
