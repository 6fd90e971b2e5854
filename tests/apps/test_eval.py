"""The evaluation command on a real, tiny run of each app, against scikit-learn on the features of single layers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from apps.bert import eval as bert_eval
from apps.bert.model import Bert, BertArgs
from apps.crossbert import eval as crossbert_eval
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.args import build, cli
from lingua.errors import UserError
from lingua.evaluation.evaluate import EvalArgs, evaluate
from lingua.evaluation.glue import GLUE
from lingua.evaluation.probe import probe
from lingua.evaluation.results import markdown_table, write_whole
from lingua.evaluation.tasks import TaskArgs
from lingua.features import load_encoder
from lingua.hf_encoder import load_hf_encoder
from lingua.tokenizer import SentencePieceTokenizer
from lingua.transformer import Encoder
from tests.glue_files import a, b, write_official
from tests.support import run_command
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, make_run, train_sentencepiece


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("eval")
    model = train_sentencepiece(folder / "pieces")
    vocab_size = SentencePieceTokenizer(str(model)).vocab_size
    tokenizer = {"name": "sentencepiece", "path": str(model)}
    words = [sentence.split() for sentence in SENTENCES]
    tagged = [{"words": w, "tags": ["SHORT" if len(word) < 4 else "LONG" for word in w]} for w in words * 3]
    texts = [
        {"text": " ".join(w[i:]), "label": "the" if "the" in w[i:] else "none", "score": len(w) - i}
        for w in words
        for i in range(8)
    ]
    for name, rows in (("words", tagged), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "bert": make_run(folder / "bert", tokenizer, vocab_size),
        "crossbert": make_run(folder / "crossbert", tokenizer, vocab_size, predictor={"n_layers": 1}),
        "words": folder / "words.jsonl",
        "texts": folder / "texts.jsonl",
    }


def eval_args(files: dict[str, Path], ckpt: Path | None, **changes: Any) -> EvalArgs:
    words, texts = str(files["words"]), str(files["texts"])
    tasks = {
        "words": {"train": words, "test": words, "kind": "tokens", "max_train_rows": 100},
        "texts": {"train": texts, "test": texts},
        "lengths": {"train": texts, "test": texts, "kind": "regression", "label": "score"},
    }
    values = {"ckpt": ckpt and str(ckpt), "tasks": tasks, "device": "cpu", **changes}
    return build(EvalArgs, ("a test", values))


def test_scores_of_each_layer_equal_scikit_learns(files: dict[str, Path], tmp_path: Path) -> None:
    args = eval_args(files, files["bert"], out=str(tmp_path / "out"))
    results = evaluate(args, Bert, BertArgs)
    assert results["layers"] == [0, 1, 2]
    encoder = load_encoder(files["bert"], device="cpu")

    rows = [json.loads(line) for line in files["texts"].read_text().splitlines()]
    y = np.array([row["label"] == "the" for row in rows]).astype(int)
    scores = np.array([row["score"] for row in rows])
    for layer in (0, 1, 2):
        x = encoder.encode([row["text"] for row in rows], layers=layer).astype(np.float64)
        ridges = [Ridge(alpha=a, fit_intercept=False).fit(x, np.eye(2)[y]) for a in args.probe.penalties()]
        expected = [float((ridge.predict(x).argmax(1) == y).mean()) for ridge in ridges]
        found = results["tasks"]["texts"]["layers"][str(layer)]["ridge"]
        assert [entry["accuracy"] for entry in found["grid"]] == expected
        assert found["paper"]["accuracy"] == max(expected)
        lengths = results["tasks"]["lengths"]["layers"][str(layer)]["ridge"]["grid"][0]["pearson"]
        theirs = Ridge(alpha=1.0, fit_intercept=False).fit(x, scores).predict(x)
        assert lengths == pytest.approx(np.corrcoef(theirs, scores)[0, 1], abs=1e-6)

    tagged = [json.loads(line) for line in files["words"].read_text().splitlines()]
    n_words = sum(len(row["words"]) for row in tagged)
    words = results["tasks"]["words"]
    assert words["test"]["rows"] == n_words
    assert 60 < words["train"]["rows"] <= 100
    long = sum(tag == "LONG" for row in tagged for tag in row["tags"])
    assert words["majority"]["accuracy"] == pytest.approx(max(long, n_words - long) / n_words)
    assert words["layers"]["0"]["knn"]["paper"]["accuracy"] > words["majority"]["accuracy"]


def test_results_are_written_whole_and_the_same_each_time(files: dict[str, Path]) -> None:
    args = eval_args(files, files["crossbert"])
    out = files["crossbert"] / "eval" / "0000000003"
    written = []
    for _ in range(2):
        evaluate(args, CrossBert, CrossBertArgs)
        written.append((out / "results.json").read_bytes())
    assert written[0] == written[1]
    assert sorted(path.name for path in out.iterdir()) == ["layers.png", "results.json", "results.md", "samples.png"]
    results = json.loads(written[0])
    assert results["step"] == 3
    assert results["config"]["probe"]["lambdas"] == 9
    assert len(results["tasks"]["texts"]["train"]["files"][str(files["texts"])]) == 64
    # dim 32, ffn 256, two blocks; the predictor has one block; the vocabulary counts once
    block, vocabulary = 4 * 32 * 32 + 3 * 32 * 256, results_vocabulary(files)
    encoder, full = 2 * block + 32 * vocabulary, 3 * block + 32 * vocabulary
    assert results["parameters"] == {"full": full, "per_token": full // 2, "encoder": encoder}
    table = (out / "results.md").read_text()
    assert "| majority |" in table
    paper = 100 * results["tasks"]["texts"]["layers"]["2"]["ridge"]["paper"]["accuracy"]
    assert f"{paper:.1f}" in table.split("ridge, `paper`")[1].split("| majority |")[0].splitlines()[-1]


def results_vocabulary(files: dict[str, Path]) -> int:
    return load_encoder(files["crossbert"]).encoder.args.vocab_size


def test_the_untrained_baseline_is_the_model_at_step_0(files: dict[str, Path]) -> None:
    args = eval_args(files, files["crossbert"], random_init=True, layers=-1)
    results = evaluate(args, CrossBert, CrossBertArgs)
    assert results["layers"] == [2]
    assert (files["crossbert"] / "eval" / "untrained" / "results.json").is_file()
    encoder = load_encoder(files["crossbert"], random_init=True).encoder
    start = CrossBert(CrossBertArgs(dim=32, n_layers=2, n_heads=2, vocab_size=encoder.args.vocab_size), seed=7)
    for name, value in start.encoder.state_dict().items():
        assert torch.equal(encoder.state_dict()[name], value), name


def test_words_beyond_the_length_are_counted_and_left_out(files: dict[str, Path], tmp_path: Path) -> None:
    args = eval_args(files, files["bert"], max_length=10, layers=[0], out=str(tmp_path))
    args.tasks = {"words": replace(args.tasks["words"], max_train_rows=-1)}
    found = evaluate(args, Bert, BertArgs)["tasks"]["words"]
    tagged = [json.loads(line) for line in files["words"].read_text().splitlines()]
    x, kept = load_encoder(files["bert"], max_length=10).encode_words([row["words"] for row in tagged], 0)
    y = np.array([tag == "SHORT" for row in tagged for tag in row["tags"]]).astype(int)[kept]
    sentence = np.array([number for number, row in enumerate(tagged) for _ in row["words"]])[kept]
    assert found["layers"]["0"] == probe(x, y, x, y, args.probe, "accuracy", sentence)
    assert found["layers"]["0"] != probe(x, y, x, y, args.probe, "accuracy")  # held out word by word
    assert found["train"]["truncated_sequences"] == len(tagged)
    for split in ("train", "test"):
        assert found[split]["rows"] == kept.sum()
        assert found[split]["rows_beyond_max_length"] == len(kept) - kept.sum() > 0


def test_classes_that_only_the_test_rows_have_are_named(files: dict[str, Path], tmp_path: Path) -> None:
    extra = tmp_path / "extra.jsonl"
    extra.write_text(files["texts"].read_text() + '{"text": "A dog .", "label": "other"}\n')
    args = eval_args(files, files["bert"], layers=0, out=str(tmp_path))
    args.tasks = {"x": TaskArgs(str(files["texts"]), str(extra))}
    task = evaluate(args, Bert, BertArgs)["tasks"]["x"]
    assert task["classes_only_in_test"] == ["other"]
    assert task["layers"]["0"]["ridge"]["paper"]["accuracy"] < 1.0


@pytest.mark.parametrize(
    ("module", "run", "message"),
    [
        (bert_eval, "crossbert", "is not a run of Bert: its model has predictor against this app's config"),
        (crossbert_eval, "bert", "is not a run of CrossBert: its model has predictor against"),
    ],
)
def test_a_run_of_another_app_is_refused(
    files: dict[str, Path], module: Any, run: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"ckpt={files[run]}", f"tasks.a.train={files['texts']}", f"tasks.a.test={files['texts']}"]
    with pytest.raises(SystemExit) as stopped:
        cli(EvalArgs, module.run, "eval", words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_the_table(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"ckpt={files['bert']}", f"tasks.a.train={files['texts']}", f"tasks.a.test={files['texts']}"]
    cli(EvalArgs, bert_eval.run, "eval", [*words, "layers=[0,-1]", "probe.kinds=[ridge]"])
    printed = capsys.readouterr().out
    assert "a: 40 rows to train, 40 to test; 0 sequences cut at 256 tokens" in printed
    assert (files["bert"] / "eval" / "0000000003" / "results.md").read_text() in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "last"}, "layers=last: expected all, a number or a list"),
        ({"layers": []}, "layers="),
        ({"layers": [0.5]}, "layers="),
        ({"layers": 3}, r"layers=3: the encoder has layers 0 \(embedding\) to 2"),
        ({"tasks": {}}, "no tasks"),
        ({"tasks": "glu"}, "tasks=glu: expected glue, some of cola, sst2, .*, or tasks.glu.train=FILE"),
        ({"tasks": ["cola", "boolq"]}, "tasks=boolq: expected glue"),
        ({"tasks": "rte", "glue": {"path": "nowhere"}}, "rte: neither nowhere/RTE/train.tsv nor"),
        ({"model": "hf:x"}, "give one of ckpt=RUN and model=hf:ID"),
        ({"ckpt": None}, "give one of ckpt=RUN and model=hf:ID"),
        ({"ckpt": None, "model": "hf:x", "watch": True}, "random_init and watch are for runs"),
        ({"watch_minutes": -1.0}, "watch_minutes=-1.0"),
        ({"dtype": "fp64"}, "dtype=fp64: expected fp32, bf16 or auto"),
        ({"probe": {"kinds": ["attentive"]}}, r"tasks.words: the attentive probe pools a text; this task labels words"),
        ({"tasks": {"a": {"trian": "x"}}}, "unknown key tasks.a.trian: did you mean tasks.a.train"),
        ({"tasks": {"a": {"train": "x"}}}, "no value for tasks.a.test"),
        ({"tasks": {"a": {"train": "x.csv", "test": "y.csv"}}}, "x.csv: no such file"),
        ({"ckpt": "nowhere"}, "nowhere: no such run or checkpoint folder"),
        ({"pooling": "cls"}, "pooling=cls"),
        ({"batch_tokens": 0}, "batch_tokens=0: expected at least 1"),
        ({"device": "tpu"}, "device=tpu cannot be used"),
        ({"tasks": {"a|b": {"train": "x.csv", "test": "y.csv"}}}, r"tasks.a\|b: its name goes into tables"),
        ({"probe": {"kinds": ["svm"]}}, "probe.kinds"),
    ],
)
def test_bad_settings_are_refused(files: dict[str, Path], changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(eval_args(files, **{"ckpt": files["bert"], **changes}), Bert, BertArgs)


def test_an_unwritable_folder_is_refused_before_any_work(files: dict[str, Path]) -> None:
    args = eval_args(files, files["bert"], out=str(files["texts"] / "out"))
    args.tasks = {"a": TaskArgs("not_read.csv", "not_read.csv")}
    with pytest.raises(UserError, match=r"texts.jsonl/out: cannot be written: Not a directory"):
        evaluate(args, Bert, BertArgs)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "results.json", b"old")

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"results.json: cannot be written: No space left on device"):
        write_whole(tmp_path / "results.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_bytes() == b"old"


def test_markdown_table() -> None:
    assert markdown_table(["a", "score"], [["long name", "1.0"], ["b", "10.0"]]) == (
        "| a         | score |\n| :-------- | ----: |\n| long name |   1.0 |\n| b         |  10.0 |\n"
    )


def test_glue_end_to_end(files: dict[str, Path], tmp_path: Path) -> None:
    """All of GLUE at every layer: each task's metrics, the plain mean of the eight, and a table of all."""
    glue = {"path": str(write_official(tmp_path / "glue", 24))}
    out = tmp_path / "out"
    args = eval_args(files, files["bert"], tasks="glue", glue=glue, out=str(out), probe={"samples": 2})
    results = evaluate(args, Bert, BertArgs)
    assert list(results["tasks"]) == list(GLUE)
    assert json.loads((out / "results.json").read_text())["glue_average"] == results["glue_average"]
    eight = [name for name in GLUE if name != "mnli_mm"]
    for layer in ("0", "2"):
        for kind in ("ridge", "knn"):
            for score in ("paper", "honest", "full"):
                primary = {
                    name: results["tasks"][name]["layers"][layer][kind][score][GLUE[name].metrics[0]] for name in eight
                }
                assert results["glue_average"][layer][kind][score] == pytest.approx(np.mean(list(primary.values())))
    assert results["tasks"]["qqp"]["lines_left_out"] == {str(tmp_path / "glue/QQP/train.tsv"): [5, 6]}
    assert results["tasks"]["mnli"]["classes"] == ["entailment", "neutral", "contradiction"]
    table = (out / "results.md").read_text()
    header = next(line for line in table.splitlines() if line.startswith("| layer"))
    names = [cell.strip() for cell in header.strip("| ").split("|")]
    assert names == [
        "layer", "cola matthews", "cola accuracy", "sst2 accuracy", "mrpc accuracy", "mrpc f1", "qqp accuracy",
        "qqp f1", "stsb spearman", "stsb pearson", "mnli accuracy", "mnli_mm accuracy", "qnli accuracy", "rte accuracy",
        "mean of 8",
    ]  # fmt: skip
    assert f"{100 * results['glue_average']['2']['knn']['honest']:.1f} |" in table
    some = evaluate(eval_args(files, files["bert"], tasks=["rte", "cola"], glue=glue, out=str(out)), Bert, BertArgs)
    assert some["tasks"]["rte"] == {**results["tasks"]["rte"], "layers": some["tasks"]["rte"]["layers"]}
    assert some["glue_average"] is None


def test_the_pairs_of_glue_are_one_sequence(files: dict[str, Path], tmp_path: Path) -> None:
    glue = {"path": str(write_official(tmp_path / "glue", 24))}
    args = eval_args(files, files["bert"], tasks="rte", glue=glue, out=str(tmp_path / "out"), layers=1)
    found = evaluate(args, Bert, BertArgs)["tasks"]["rte"]["layers"]["1"]
    rows = [load_encoder(files["bert"]).encode([a(i) for i in range(n)], 1, [b(i) for i in range(n)]) for n in (24, 12)]
    y = np.array([1 - i % 2 for i in range(24)])  # entailment, which odd rows are, comes first
    assert found == probe(rows[0], y, rows[1], y[:12], args.probe, "accuracy")


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_hugging_face_model_through_the_same_command(
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_model(tmp_path / "tiny-bert", kind)
    texts, words = files["texts"], files["words"]
    tasks = [f"tasks.a.train={texts}", f"tasks.a.test={texts}", f"tasks.w.train={words}", f"tasks.w.test={words}"]
    cli(EvalArgs, crossbert_eval.run, "eval", [f"model=hf:{folder}", *tasks, "tasks.w.kind=tokens", "layers=[0,-1]"])
    results = json.loads((tmp_path / "eval/tiny-bert/results.json").read_text())
    assert (results["checkpoint"], results["step"], results["layers"]) == (str(folder), None, [0, 3])
    assert set(results["parameters"]) == {"total", "without_embedding"}
    assert results["versions"]["transformers"]
    encoder = load_hf_encoder(str(folder), device="cpu")
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    x = encoder.encode([row["text"] for row in rows])
    y = np.array([row["label"] == "the" for row in rows]).astype(int)
    assert results["tasks"]["a"]["layers"]["3"] == probe(x, y, x, y, build(EvalArgs, ("", {
        "model": "x", "tasks": "rte"})).probe, "accuracy")  # fmt: skip
    out = capsys.readouterr().out
    assert "from Hugging Face. Scores x 100." in out
    decoder = f"hf:{folder} is a decoder: the features of a token know those before it only" in out
    assert results["causal"] is decoder is (kind == "llama")
    namesake = shutil.copytree(folder, tmp_path / "others" / "tiny-bert")
    with pytest.raises(UserError, match=rf"eval/tiny-bert holds the results of {folder}: give out=FOLDER"):
        crossbert_eval.run(eval_args(files, None, model=f"hf:{namesake}"))


def test_the_attentive_probe_beside_the_others(files: dict[str, Path], tmp_path: Path) -> None:
    tasks = {"texts": {"train": str(files["texts"]), "test": str(files["texts"])}}
    settings = {"kinds": ["ridge", "attentive"], "attentive": {"epochs": 3}, "max_samples": 30}
    args = eval_args(files, files["bert"], tasks=tasks, probe=settings, out=str(tmp_path / "out"), layers=[2])
    found = evaluate(args, Bert, BertArgs)["tasks"]["texts"]["layers"]["2"]
    assert found["attentive"]["full"] is None
    assert found["ridge"]["full"] is not None
    assert found["attentive"]["samples"][0]["rows"] == 30
    assert set(found["attentive"]["paper"]) >= {"learning_rate", "accuracy", "f1"}
    table = (tmp_path / "out/results.md").read_text()
    assert table.count("attentive, `") == 2
    assert table.count("ridge, `") == 3


def test_a_second_evaluation_makes_no_pass_and_features_can_be_dropped(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "a/out")
    first = evaluate(eval_args(files, files["bert"], out=out), Bert, BertArgs)
    assert list((tmp_path / "a/features").glob("*/layer_01.npy"))

    def states(*args: Any, **options: Any) -> Any:
        raise AssertionError("a forward pass")

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "states", states)
        changed = evaluate(eval_args(files, files["bert"], out=out, probe={"standardize": True}), Bert, BertArgs)
    assert changed["tasks"]["texts"] != first["tasks"]["texts"]
    evaluate(eval_args(files, files["bert"], out=str(tmp_path / "b/out"), keep_features=False), Bert, BertArgs)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["out"]


def test_two_processes_and_any_batch_size_give_the_same_results(files: dict[str, Path], tmp_path: Path) -> None:
    words = [f"ckpt={files['crossbert']}", f"tasks.a.train={files['texts']}", f"tasks.a.test={files['texts']}"]
    words += [f"tasks.w.train={files['words']}", f"tasks.w.test={files['words']}", "tasks.w.kind=tokens", "device=cpu"]
    words += [f"tasks.r.train={files['texts']}", f"tasks.r.test={files['texts']}", "tasks.r.kind=regression"]
    words += ["tasks.r.label=score", "probe.samples=2"]
    one, two = tmp_path / "one/out", tmp_path / "two/out"
    cli(EvalArgs, crossbert_eval.run, "eval", [*words, f"out={one}", "batch_tokens=50"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = run_command([*torchrun, "-m", "apps.crossbert.eval", *words, f"out={two}"], timeout=120)
    assert (two / "results.json").is_file(), done.stderr
    assert done.stdout.count("written to") == 1
    alone, shared = (json.loads((out / "results.json").read_text())["tasks"] for out in (one, two))
    for name in ("a", "w", "r"):
        for layer in ("0", "1", "2"):
            for kind in ("ridge", "knn"):
                for score in ("paper", "honest", "full"):
                    ours, theirs = (found[name]["layers"][layer][kind][score] for found in (alone, shared))
                    assert theirs == pytest.approx(ours, abs=1e-5), (name, layer, kind, score)


def test_an_electra_is_named_and_counted_with_its_generator(
    files: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apps.bert import eval as bert_eval
    from tests.support import run_app, tiny_words

    words = tiny_words("bert", corpus, tmp_path / "run", objective="rtd", steps=2, rtd__n_layers=1)
    run_app("bert", words)
    args = eval_args(files, tmp_path / "run", layers=[1], out=str(tmp_path / "out"))
    found = []
    monkeypatch.setattr(bert_eval, "evaluate", lambda *a: found.append(evaluate(*a)))
    bert_eval.run(args)
    block = 4 * 32**2 + 3 * 32 * 256
    assert found[0]["model"] == "Electra"
    assert found[0]["parameters"]["full"] == 50265 * 32 + 3 * block
    assert found[0]["parameters"]["encoder"] == 50265 * 32 + 2 * block


def test_a_row_that_cannot_be_read_is_told_with_its_file(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": text}) + "\n" for text in ("dog", "\u200b")))
    tasks = {"a": {"train": str(path), "test": str(path)}}
    with pytest.raises(UserError, match=r"empty.jsonl, of the rows used: text 1 .* has no token"):
        evaluate(eval_args(files, files["bert"], tasks=tasks), Bert, BertArgs)
