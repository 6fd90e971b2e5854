"""Fine-tuning: what is learned and trained, grids through kills, diverged seeds in the open, what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from seqeval.metrics import f1_score

from apps.finetune import train as train_module
from apps.finetune.args import FinetuneArgs
from apps.finetune.data import commonest_tag, load_data, take
from apps.finetune.grid import GridArgs, grid, points
from apps.finetune.model import Batch, FinetuneModel
from apps.finetune.report import EIGHT, ReportArgs, interval, report
from apps.finetune.train import finetune, load, make_pooler, start_from
from lingua.args import parse
from lingua.checkpoint import load_weights
from lingua.errors import UserError
from lingua.evaluation.tasks import Split
from lingua.hashing import counter_hash
from tests.glue_files import write_official
from tests.support import ROOT, environment
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, make_pieces_run

WORDS = sorted({word for sentence in SENTENCES for word in sentence.split() if word.isalpha() and len(word) > 2})
OTHERS = [word for word in WORDS if word not in ("fox", "river", "town")]


def text(i: int, *said: str) -> list[str]:
    """Nine words, ``said`` among them in one run."""
    words = [OTHERS[counter_hash(i, j) % len(OTHERS)] for j in range(9 - len(said))]
    place = counter_hash(i, 99) % (len(words) + 1)
    return [*words[:place], *said, *words[place:]]


def qa_file(rows: range) -> dict[str, Any]:
    paragraphs = []
    for i in rows:
        context = " ".join(text(i, *(["fox"] if i % 3 else [])))
        answers = [{"text": "fox", "answer_start": context.index("fox")}] if i % 3 else []
        qas = [{"id": f"q{i}", "question": "Who barks ?", "answers": answers, "is_impossible": not answers}]
        paragraphs.append({"context": context, "qas": qas})
    return {"data": [{"paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CrossBERT, a BERT of Hugging Face, and files of a task of each kind."""
    home = tmp_path_factory.mktemp("finetune")
    make_pieces_run(home, predictor={"n_layers": 2})
    make_model(home / "hf", "bert")
    make_model(home / "modern", "modernbert")
    for name, rows in (("train", range(160)), ("test", range(500, 580)), ("dev", range(700, 740))):
        animals = {i: text(i, "fox" if i % 2 else "river") for i in rows}
        files = {
            "animal.jsonl": [{"text": " ".join(words), "label": i % 2} for i, words in animals.items()],
            "count.csv": [f"{' '.join(text(i, *['fox'] * (i % 4)))},{i % 4 * 1.5 - 7}" for i in rows],
            "ner.conll": ["\n".join(f"{w} {t}" for w, t in tagged(i)) + "\n" for i in rows],
        }
        (home / f"{name}_animal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in files["animal.jsonl"]))
        (home / f"{name}_count.csv").write_text("\n".join(["text,label", *files["count.csv"]]) + "\n")
        (home / f"{name}_ner.conll").write_text("\n".join(files["ner.conll"]))
        (home / f"{name}_qa.json").write_text(json.dumps(qa_file(rows)))
    return home


def tagged(i: int) -> list[tuple[str, str]]:
    """A place is two words, the second of which says so only behind the first."""
    words = text(i, "river", "town") if i % 2 else text(i, "fox", "town")
    tags = {"river": "B-LOC", "town": "I-LOC", "fox": "B-ANI"}
    found = [(word, tags.get(word, "O")) for word in words]
    return [(w, "I-ANI" if t == "I-LOC" and i % 2 == 0 else t) for w, t in found]


TASKS = {
    "animal": ("animal.jsonl", "classification"),
    "count": ("count.csv", "regression"),
    "ner": ("ner.conll", "tokens"),
    "qa": ("qa.json", "qa"),
}


def args_of(home: Path, out: Path, task: str = "animal", cls: type = FinetuneArgs, **changes: Any) -> Any:
    """Words of the command line, with dots as two underscores, and tasks' fields behind ``task__``."""
    words = {"dump_dir": out, "ckpt": home / "run", "task": task, "epochs": 4, "dtype": "fp32", "device": "cpu"}
    words |= {"optim.lr": 5e-3, "batch_rows": 16, "dropout": 0.0}
    for name, (file, kind) in TASKS.items():
        values = {"train": home / f"train_{file}", "test": home / f"test_{file}", "kind": kind}
        words |= {f"tasks.{name}.{key}": value for key, value in values.items()}
    for key, value in changes.items():
        key = key.replace("__", ".")
        words[f"tasks.{task}{key[4:]}" if key.startswith("task.") else key] = value
    return parse(cls, [f"{key}={value}" for key, value in words.items() if value is not None])


def prepared(args: FinetuneArgs) -> tuple[Any, FinetuneModel]:
    encoder = load(args)
    data = load_data(args, encoder)
    pooler = make_pooler(args, data.kind, encoder)
    return data, FinetuneModel(encoder, pooler, data.kind, data.outputs, args.dropout, args.train_layers)


# --- what is learned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "metric"), [("animal", "accuracy"), ("count", "spearman"), ("ner", "span_f1"), ("qa", "f1")]
)
@pytest.mark.parametrize("model", ["ours", "hf"])
def test_each_kind_is_learned(home: Path, tmp_path: Path, task: str, metric: str, model: str) -> None:
    origin = {"ckpt": None, "model": f"hf:{home / 'modern'}"} if model == "hf" else {}
    result = finetune(args_of(home, tmp_path / "out", task, epochs=8, patience=8, **origin))
    assert result["metrics"][0] == metric
    assert result["diverged"] is None
    assert result["scores"][metric] > 0.9 > 0.7 > result["baselines"]["majority"][metric]
    assert result["chosen_on"] == "held-out training rows (0.1)"
    best = max(result["history"], key=lambda entry: (entry["dev"][metric], entry["step"]))
    assert (result["step"], result["dev"]) == (best["step"], best["dev"])
    predictions = json.loads((tmp_path / "out/predictions.json").read_text())
    if task == "animal":
        rows = [json.loads(line) for line in (home / "test_animal.jsonl").read_text().splitlines()]
        right = [str(row["label"]) == said for row, said in zip(rows, predictions, strict=True)]
        assert np.mean(right) == result["scores"]["accuracy"]
    if task == "count":
        wanted = [float(line.split(",")[1]) for line in (home / "test_count.csv").read_text().splitlines()[1:]]
        assert stats.pearsonr(wanted, predictions).statistic == pytest.approx(result["scores"]["pearson"])
        assert np.mean(np.abs(np.array(wanted) - predictions)) < 0.8  # in the units of the file, not standardized
    if task == "ner":
        from seqeval.metrics import f1_score

        target = [[tag for _, tag in tagged(i)] for i in range(500, 580)]
        assert f1_score(target, predictions) == pytest.approx(result["scores"]["span_f1"])
        assert result["baselines"]["majority"]["span_f1"] == 0.0
        # The commonest tag of a word cannot tell which place a town belongs to.
        assert result["baselines"]["commonest tag of each word"]["span_f1"] < result["scores"]["span_f1"]
    if task == "qa":
        questions = [paragraph["qas"][0] for paragraph in qa_file(range(500, 580))["data"][0]["paragraphs"]]
        wanted = [question["answers"][0]["text"] if question["answers"] else "" for question in questions]
        right = [predictions[question["id"]] == said for question, said in zip(questions, wanted, strict=True)]
        assert np.mean(right) == result["scores"]["exact"]
        assert result["scores"]["null_threshold"] == result["dev"]["null_threshold"]
        assert result["baselines"]["majority"]["f1"] == pytest.approx(np.mean([not said for said in wanted]))


def test_the_loss_is_that_of_a_plain_loop(home: Path, tmp_path: Path) -> None:
    for task in TASKS:
        data, model = prepared(args_of(home, tmp_path, task, qa__stride=4, max_length=18 if task == "qa" else 64))
        rows = data.parts["train"]
        batch = Batch.of(rows, np.arange(6), model.pad_id, "cpu")
        summed, targets = model.loss(batch)
        loss = 0.0
        for i, out in enumerate(model.outputs(rows, 100)[:6]):
            out = out.astype(np.float64)
            if task == "count":
                loss += float((out[0, 0] - rows.targets[i][0]) ** 2)
            elif task == "qa":
                logs = out - np.log(np.exp(out).sum(0))
                loss -= float(logs[rows.targets[i], [0, 1]].mean())
            else:
                logs = out - np.log(np.exp(out).sum(1, keepdims=True))
                loss -= float(logs[np.arange(len(out)), rows.targets[i]].sum())
        count = sum(len(target) for target in rows.targets[:6]) if task == "ner" else 6
        assert float(targets) == count
        assert summed.item() == pytest.approx(loss, rel=1e-5)


def test_padding_and_neighbours_change_nothing(home: Path, tmp_path: Path) -> None:
    for task in TASKS:
        data, model = prepared(args_of(home, tmp_path, task, pooler__kind="attention" if task == "animal" else "mean"))
        rows = data.parts["test"]
        together, alone = model.outputs(rows, 10_000), model.outputs(rows, 1)
        assert len({len(ids) for ids in rows.sequences.ids}) > 1
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_cut_into_micro_batches_changes_nothing(home: Path, tmp_path: Path) -> None:
    whole, cut = (finetune(args_of(home, tmp_path / str(rows), "ner", epochs=2, micro_rows=rows)) for rows in (16, 5))
    for a, b in zip(whole["history"], cut["history"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert whole["scores"]["accuracy"] == pytest.approx(cut["scores"]["accuracy"], abs=0.01)


# --- what is trained -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["ours", "hf"])
@pytest.mark.parametrize("layers", [-1, 0, 1])
def test_only_what_is_asked_for_is_trained(home: Path, tmp_path: Path, layers: int, origin: str) -> None:
    more = {"ckpt": None, "model": f"hf:{home / 'hf'}"} if origin == "hf" else {}
    args = args_of(home, tmp_path / "out", train_layers=layers, epochs=1, keep_weights=True, **more)
    before = {name: value.clone() for name, value in prepared(args)[1].state_dict().items()}
    finetune(args)
    from safetensors.torch import load_file

    after = load_file(tmp_path / "out/weights.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    encoder = {name for name in changed if name.startswith("embedder.encoder.")}
    last = "embedder.encoder.layers.1." if origin == "ours" else "embedder.encoder.encoder.layer.2."
    norm = {"embedder.encoder.norm.weight"} if origin == "ours" else set()
    wanted = {name for name in before if name.startswith(last)} | norm
    assert {"out.weight", "out.bias"} <= changed
    if layers == 0:
        assert encoder == set()
    elif layers == 1:
        assert encoder == wanted or encoder == wanted - {n for n in wanted if n.endswith("key.bias")}
    else:
        assert wanted - {n for n in wanted if n.endswith("key.bias")} < encoder
        assert any("embedding" in name for name in encoder)


def test_dropout_of_hugging_face_is_on_in_training_only(home: Path, tmp_path: Path) -> None:
    args = args_of(home, tmp_path, ckpt=None, model=f"hf:{home / 'hf'}")
    data, model = prepared(args)
    batch = Batch.of(data.parts["train"], np.arange(4), model.pad_id, "cpu")
    assert not torch.equal(model.train()(batch), model(batch))
    assert torch.equal(model.eval()(batch), model(batch))
    _, frozen = prepared(args_of(home, tmp_path, ckpt=None, model=f"hf:{home / 'hf'}", train_layers=0))
    assert torch.equal(frozen.train()(batch), frozen(batch))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = {"epochs": 1, "dropout": 0.1, "ckpt": None, "model": f"hf:{home / 'hf'}"}
    results = [finetune(args_of(home, tmp_path / name, **again)) for name in ("a", "b")]
    assert results[0] == results[1]  # the same dropout
    assert torch.equal(torch.get_rng_state(), state)  # and nobody else's random numbers are touched


def test_a_pooler_starts_as_the_predictor(home: Path, tmp_path: Path) -> None:
    args = args_of(home, tmp_path / "out", pooler__kind="attention", pooler__warm_start=True, epochs=5)
    _, model = prepared(args)
    from lingua.predictor import Predictor, PredictorArgs

    shape = model.embedder.encoder.args
    whole = torch.nn.ModuleDict({"predictor": Predictor(PredictorArgs(n_layers=2), shape)})
    load_weights(home / "run", whole)
    own = model.embedder.pooler.predictor.state_dict()
    for name, value in whole["predictor"].state_dict().items():
        assert torch.equal(own[name].squeeze(0) if name == "mask_vector" else own[name], value)
    cold = prepared(args_of(home, tmp_path / "cold", pooler__kind="attention"))[1].embedder.pooler.predictor
    assert not torch.equal(cold.layers[0].ffn.w2.weight, own["layers.0.ffn.w2.weight"])
    assert finetune(args)["scores"]["accuracy"] > 0.9


def test_a_run_starts_from_the_encoder_of_another(home: Path, tmp_path: Path) -> None:
    glue = write_official(tmp_path / "GLUE", rows=24)
    shared = {"glue__path": glue, "epochs": 1, "dev_share": 0.0}
    mnli = finetune(args_of(home, tmp_path / "mnli", "mnli", keep_weights=True, **shared))
    assert mnli["chosen_on"] == "the evaluation rows"
    assert set(mnli["scores"]) >= {"accuracy", "mismatched_accuracy"}
    assert mnli["scores"]["mismatched_accuracy"] == mnli["scores"]["accuracy"]  # the files hold the same rows
    path = tmp_path / "mnli/result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": None}))
    args = args_of(home, tmp_path / "all/rte", "rte", init=tmp_path / "mnli", **shared)
    _, model = prepared(args)
    before = model.embedder.encoder.embedding.weight.clone()
    weights = mnli["encoder_weights"]
    assert start_from(model, args.init, weights) == {"task": "mnli", "folder": str(tmp_path / "mnli")}
    assert not torch.equal(model.embedder.encoder.embedding.weight, before)
    assert finetune(args)["init"]["task"] == "mnli"
    finetune(args_of(home, tmp_path / "all/rte_plain", "rte", **shared))
    names = [row["name"] for row in report(ReportArgs(str(tmp_path / "all")))["rows"]]
    assert sorted(names) == ["rte", "rte (from mnli)"]
    with pytest.raises(UserError, match=r"init=.*: no weights.safetensors: expected a finished fine-tuning with keep"):
        start_from(model, str(tmp_path / "all/rte"), weights)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": "x"}))
    with pytest.raises(UserError, match="this run diverged"):
        start_from(model, args.init, weights)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": None}))
    _, other = prepared(args_of(home, tmp_path / "o", "rte", ckpt=None, model=f"hf:{home / 'hf'}", **shared))
    with pytest.raises(UserError, match="has other weights than the one here"):
        start_from(other, args.init, weights)
    (tmp_path / "again").mkdir()  # a run of the same shape
    make_pieces_run(tmp_path / "again", predictor={"n_layers": 2}, init_truncate=1.0)
    with pytest.raises(UserError, match=r"init=.*mnli: is a fine-tuning of another encoder \(.*run/checkpoints/"):
        finetune(args_of(home, tmp_path / "x", "rte", init=args.init, **shared, ckpt=tmp_path / "again/run"))


# --- dev rows and early stopping -----------------------------------------------------------------------------


def test_dev_rows_are_whole_sentences_and_the_same_for_every_seed(home: Path, tmp_path: Path) -> None:
    splits = [load_data(a, load(a)).splits for a in (args_of(home, tmp_path, "ner", seed=s) for s in (0, 1))]
    dev, train = splits[0]["dev"].sentences, splits[0]["train"].sentences
    assert (len(dev), len(train)) == (16, 144)
    assert splits[1]["dev"].sentences == dev
    both = sorted(" ".join(words) for words in dev + train)
    assert both == sorted(" ".join(word for word, _ in tagged(i)) for i in range(160))
    own = args_of(home, tmp_path, "ner", task__dev=home / "dev_ner.conll")
    data = load_data(own, load(own))
    assert data.chosen_on == "the dev rows"
    assert data.splits["dev"].sentences == [[word for word, _ in tagged(i)] for i in range(700, 740)]
    assert len(data.splits["train"].sentences) == 160
    qa = args_of(home, tmp_path, "qa")
    squads = load_data(qa, load(qa)).squads
    assert (len(squads["dev"].questions), len(squads["train"].questions)) == (16, 144)
    assert not {q.context for q in squads["dev"].questions} & {q.context for q in squads["train"].questions}


def test_dev_questions_that_cannot_choose_a_threshold_are_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    content = qa_file(range(700, 730))
    answered = [paragraph for paragraph in content["data"][0]["paragraphs"] if paragraph["qas"][0]["answers"]]
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": answered}]}))
    own = args_of(home, tmp_path / "out", "qa", task__dev=tmp_path / "dev.json", epochs=1)
    result = finetune(own)
    without = sum(i % 3 == 0 for i in range(500, 580))
    assert f"{without} of the 80 evaluation questions have no answer, but none of the dev q" in capsys.readouterr().out
    assert result["data"]["null_threshold"] == {"from": None}
    assert [result["data"][part]["without_answer"] for part in ("dev", "test")] == [0, without]
    assert "null_threshold" not in result["scores"]
    for changes, wanted in (({}, "dev"), ({"qa__null_threshold": 1.5}, "qa.null_threshold")):
        other = args_of(home, tmp_path, "qa", **changes)
        assert load_data(other, load(other)).facts["null_threshold"] == {"from": wanted}
    assert "have no answer" not in capsys.readouterr().out


def test_it_stops_early_and_keeps_the_best_step(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.7, 0.7, 0.6, 0.9])
    args = args_of(home, tmp_path / "out", epochs=5, patience=2)
    data, model = prepared(args)
    weights = []

    def score(part: str, outputs: Any, dev: Any) -> dict[str, float]:
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {"accuracy": next(scores)}

    monkeypatch.setattr(data, "score", score)
    history, best, diverged = train_module.train(model, data, args)
    assert [entry["dev"]["accuracy"] for entry in history] == [0.5, 0.7, 0.7, 0.6]  # two no better: it ends
    assert diverged is None
    assert best["step"] == history[2]["step"] == 27  # 144 rows in steps of 16; of equals the last
    assert all(torch.equal(best["weights"][name], value) for name, value in weights[2].items())


def test_evaluations_within_an_epoch(home: Path, tmp_path: Path) -> None:
    result = finetune(args_of(home, tmp_path, epochs=2, evals_per_epoch=3, patience=0))
    assert [entry["step"] for entry in result["history"]] == [3, 6, 9, 12, 15, 18]


def test_commonest_tags_by_hand() -> None:
    split = Split({}, 3, sentences=[["a", "b"], ["a", "b", "a"]], labels=["x"] * 5, y=np.array([2, 1, 0, 0, 2]))
    assert commonest_tag(split) == {"a": 2, "b": 0}
    part = take(split, np.array([False, False, True, True, True]))
    assert (part.sentences, part.y.tolist()) == ([["a", "b", "a"]], [0, 0, 2])


# --- grids, kills and seeds that diverge ---------------------------------------------------------------------


def sweep_file(path: Path, text: str = "grid: {optim.lr: [5e-3, 1e-3], seed: [0, 1]}") -> Path:
    path.write_text(text)
    return path


def test_a_grid_goes_on_where_it_was_stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_file(tmp_path / "sweep.yaml")
    shared = {"sweep": sweep, "epochs": 1, "dropout": 0.1, "task__max_train_rows": 64}
    grid(args_of(home, tmp_path / "whole", cls=GridArgs, **shared))
    update, steps = train_module.update, []

    def stopped(*given: Any) -> Any:
        steps.append(1)
        if len(steps) == 10:  # in the middle of the third run, of four steps
            raise KeyboardInterrupt
        return update(*given)

    monkeypatch.setattr(train_module, "update", stopped)
    killed = args_of(home, tmp_path / "killed", cls=GridArgs, **shared)
    with pytest.raises(KeyboardInterrupt):
        grid(killed)
    found = report(ReportArgs(str(tmp_path / "killed")))
    assert [Path(path).name for path in found["unfinished"]] == ["lr=0.001_seed=0"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/result.json")}
    assert len(before) == 2
    grid(killed)
    assert len(steps) == 10 + 2 * 4
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert_same_files(tmp_path / "whole", tmp_path / "killed")
    grid(killed)
    assert len(steps) == 18  # nothing is left to do


def assert_same_files(a: Path, b: Path) -> None:
    names = sorted(path.relative_to(a) for path in a.rglob("result*"))
    assert len(names) == 4 + 2
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.slow
def test_a_grid_that_is_killed_goes_on(home: Path, tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path / "sweep.yaml")
    shared = {"sweep": sweep, "epochs": 4, "dropout": 0.1}
    grid(args_of(home, tmp_path / "whole", cls=GridArgs, **shared))
    config = tmp_path / "config.yaml"
    from lingua.args import to_yaml

    config.write_text(to_yaml(args_of(home, tmp_path / "killed", cls=GridArgs, **shared)))
    command = [sys.executable, "-m", "apps.finetune.grid", f"config={config}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed/lr=0.001_seed=0/config.yaml").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list((tmp_path / "killed").glob("*/result.json"))) in (2, 3)
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished already" in done.stdout
    assert_same_files(tmp_path / "whole", tmp_path / "killed")


def test_a_seed_that_is_not_finite_is_reported(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = train_module.update

    def spoilt(model: FinetuneModel, *given: Any) -> Any:
        if given[-1].seed == 1 and given[-2] == 7:
            model.out.weight.data[0, 0] = math.nan
        return update(model, *given)

    monkeypatch.setattr(train_module, "update", spoilt)
    sweep = sweep_file(tmp_path / "s.yaml", "grid: {seed: [0, 1, 2]}")
    grid(args_of(home, tmp_path / "out", cls=GridArgs, sweep=sweep, epochs=6))
    result = json.loads((tmp_path / "out/seed=1/result.json").read_text())
    assert result["diverged"] == "loss or gradient not finite at step 9"
    assert result["scores"] == result["baselines"]["majority"]
    assert result["history"] == []
    assert not (tmp_path / "out/seed=1/predictions.json").exists()
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert row["diverged"] == {"1": "loss or gradient not finite at step 9"}
    own = [json.loads((tmp_path / f"out/seed={i}/result.json").read_text())["scores"]["accuracy"] for i in range(3)]
    assert own[1] == 0.5
    assert min(own[0], own[2]) > 0.9
    assert row["all_seeds"]["accuracy"]["mean"] == pytest.approx(np.mean(own))
    assert row["without_diverged"]["accuracy"]["mean"] == pytest.approx((own[0] + own[2]) / 2)
    table = (tmp_path / "out/results.md").read_text()
    assert "- animal, seed 1: diverged, loss or gradient not finite at step 9" in table
    assert table in capsys.readouterr().out


def test_a_learning_rate_that_overflows_is_not_chosen(home: Path, tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path / "s.yaml", "grid: {optim.lr: [1e38, 5e-3], seed: [0, 1]}")
    grid(args_of(home, tmp_path / "out", cls=GridArgs, sweep=sweep, epochs=2))
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert row["lr"] == 5e-3
    assert row["diverged"] == {}
    assert row["lrs"]["1e+38"] == {"seeds": 2, "dev": -1.0}
    found = json.loads((tmp_path / "out/lr=1e+38_seed=0/result.json").read_text())
    assert "not finite" in found["diverged"]


def test_one_no_better_than_the_majority_keeps_its_score(home: Path, tmp_path: Path) -> None:
    result = finetune(args_of(home, tmp_path / "out", optim__lr=1e-12, epochs=1))
    (row,) = report(ReportArgs(str(tmp_path / "out")))["rows"]
    if result["scores"]["accuracy"] > 0.5:
        pytest.skip("the untrained head was lucky")
    assert result["diverged"] == "no better than the majority (accuracy 50.0)"
    assert row["without_diverged"] == {}
    assert row["all_seeds"]["accuracy"] == {"mean": result["scores"]["accuracy"], "plus_minus": None}


def fake(folder: Path, task: str, lr: float, seed: int, dev: float, score: float, **more: Any) -> None:
    """A finished run without the training."""
    config = {"task": task, "seed": seed, "optim": {"lr": lr}, "tasks": {}, "init": None}
    result = {
        "task": task, "metrics": ["accuracy"], "lr": lr, "seed": seed, "init": None, "chosen_on": "the dev rows",
        "dev": {"accuracy": dev}, "scores": {"accuracy": score}, "diverged": None,
        "baselines": {"majority": {"accuracy": 0.5}}, "config": config, **more,
    }  # fmt: skip
    run = folder / f"{task}_{lr}_{seed}"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps(result))


def test_the_learning_rate_is_the_dev_rows_choice(tmp_path: Path) -> None:
    values = [0.81, 0.84, 0.79]
    for seed, value in enumerate(values):
        fake(tmp_path, "cola", 1e-5, seed, dev=0.7 + 0.01 * seed, score=value)
        fake(tmp_path, "cola", 2e-5, seed, dev=0.7 - 0.01 * seed, score=0.99)
    (row,) = report(ReportArgs(str(tmp_path), out=str(tmp_path / "o")))["rows"]
    assert row["lr"] == 1e-5
    assert row["best_run_on_dev"] == "cola_1e-05_2"
    found = row["all_seeds"]["accuracy"]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["plus_minus"] == pytest.approx((high - low) / 2, rel=1e-3)
    assert "81.3 ± 6.3" in (tmp_path / "o/results.md").read_text()
    for count in (2, 5, 31):
        drawn = [counter_hash(count, i) % 100 / 100 for i in range(count)]
        t = stats.t.ppf(0.975, count - 1)
        assert interval(drawn)["plus_minus"] == pytest.approx(t * stats.sem(drawn), rel=1e-3)


def test_the_mean_of_eight_names_what_it_is_of(tmp_path: Path) -> None:
    for i, task in enumerate(EIGHT):
        fake(tmp_path / "plain", task, 1e-5, 0, 0.5, 0.6 + i / 100)
    found = report(ReportArgs(str(tmp_path)))
    assert [row["task"] for row in found["rows"]] == EIGHT
    assert found["glue_means"] == [{"mean": pytest.approx(0.635), "initialized_from": {}, "diverged_seeds": 0}]
    for task in ("rte", "stsb"):
        config = {"task": task, "optim": {}, "tasks": {}, "init": "runs/mnli"}
        origin = {"task": "mnli", "folder": "runs/mnli"}
        fake(tmp_path / "moved", task, 1e-5, 0, 0.5, 0.9, init=origin, config=config, diverged="why")
    _, moved = report(ReportArgs(str(tmp_path)))["glue_means"]
    before = {task: 0.6 + i / 100 for i, task in enumerate(EIGHT)}
    assert moved["mean"] == pytest.approx(np.mean(list((before | {"rte": 0.9, "stsb": 0.9}).values())))
    table = (tmp_path / "results.md").read_text()
    assert "GLUE, mean of 8, all seeds: 63.5\n" in table
    assert f"all seeds: {100 * moved['mean']:.1f} (stsb, rte initialized from mnli; 2 seeds diverged)" in table
    other = {"task": "cola", "optim": {}, "tasks": {}, "dropout": 0.5, "init": None}
    fake(tmp_path, "cola", 1e-5, 1, 0.5, 0.6, config=other)
    assert report(ReportArgs(str(tmp_path)))["glue_means"] == []  # CoLA twice: which is meant?


def test_settings_side_by_side_are_told_apart(home: Path, tmp_path: Path) -> None:
    sweep = sweep_file(tmp_path / "s.yaml", "grid: {train_layers: [0, -1], task: [animal, ner]}")
    runs = points(args_of(home, tmp_path / "out", cls=GridArgs, sweep=sweep, epochs=1))
    assert [(run.train_layers, run.task, Path(run.dump_dir).name) for run in runs] == [
        (0, "animal", "train_layers=0_task=animal"), (0, "ner", "train_layers=0_task=ner"),
        (-1, "animal", "train_layers=-1_task=animal"), (-1, "ner", "train_layers=-1_task=ner"),
    ]  # fmt: skip
    for run in runs:
        finetune(run)
    names = [row["name"] for row in report(ReportArgs(str(tmp_path / "out")))["rows"]]
    assert sorted(names) == [
        "animal, train_layers=-1", "animal, train_layers=0", "ner, train_layers=-1", "ner, train_layers=0",
    ]  # fmt: skip


def test_runs_that_were_begun_are_named(tmp_path: Path) -> None:
    fake(tmp_path, "cola", 1e-5, 0, 0.5, 0.5)
    for name in ("cola_1e-05_0/stool", "failed/stool", "killed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    found = report(ReportArgs(str(tmp_path)))
    assert found["unfinished"] == [str(tmp_path / "failed"), str(tmp_path / "killed")]
    assert f"- not finished, and not in the table: {tmp_path}/failed" in (tmp_path / "results.md").read_text()


def test_data_side_by_side_are_told_apart(home: Path, tmp_path: Path) -> None:
    for rows in (16, 32):
        finetune(args_of(home, tmp_path / f"out/{rows}", epochs=1, task__max_train_rows=rows))
    names = [row["name"] for row in report(ReportArgs(str(tmp_path / "out")))["rows"]]
    assert sorted(names) == ["animal, tasks.animal.max_train_rows=16", "animal, tasks.animal.max_train_rows=32"]


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"task"', r"result\.json: not JSON"), ('{"task": "x"}', r"result\.json: is not of apps\.finetune")],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str, message: str) -> None:
    fake(tmp_path, "cola", 1e-5, 0, 0.5, 0.5)
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=message):
        report(ReportArgs(str(tmp_path)))


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ckpt": None}, "give one of ckpt=RUN and model=hf:ID"),
        ({"model": "hf:x"}, "give one of ckpt=RUN and model=hf:ID"),
        ({"ckpt": None, "model": "bert"}, "model=bert: expected hf:ID or hf:FOLDER"),
        ({"task": "colla"}, r"task=colla: expected one of cola, .*, rte, or one of tasks \(animal, count, ner, qa\)"),
        ({"task": "mnli_mm"}, "mnli has the mismatched rows too"),
        ({"task__kind": "classify"}, "kind=classify: expected one of classification, regression, tokens, qa"),
        ({"task__metric": "f2"}, "metric=f2: a classification task has"),
        ({"dev_share": 1.0}, "dev_share=1.0: expected at least 0 and less than 1"),
        ({"epochs": 0}, "epochs=0: expected at least 1"),
        ({"qa__stride": 0}, "qa.stride=0: expected at least 1"),
        ({"pooler__kind": "sum"}, "pooler.kind=sum: expected one of attention"),
        ({"optim__lr": -1}, "optim.lr=-1.0: expected a finite number above 0"),
        ({"tasks__cola__train": "x", "tasks__cola__test": "x"}, "tasks.cola: a task of GLUE has this name"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused(home: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        args_of(home, tmp_path, **changes)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("animal", {"train_layers": 3}, "train_layers=3: the encoder has 2 blocks"),
        ("ner", {"pooler__kind": "first"}, "pooler.kind=first: a tokens task reads the states of tokens"),
        ("animal", {"ckpt": None, "model": "hf:HOME/hf", "pooler__kind": "attention", "pooler__warm_start": True},
         "warm_start=true needs a CrossBERT"),
        ("animal", {"init": "nowhere"}, "init=nowhere: no result.json"),
        ("animal", {"ckpt": "nowhere"}, "nowhere: no such run or checkpoint folder"),
        ("animal", {"task__dev": "HOME/dev_count.csv"}, r"dev_count.csv: the label '-2.5' is neither in the training"),
        ("ner", {"task__test": "HOME/test_animal.jsonl"}, "no column 'words'"),
        ("qa", {"max_length": 8}, "leave no room for a paragraph"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(home: Path, tmp_path: Path, task: str, changes: dict[str, Any], message: str) -> None:
    changes = {k: v.replace("HOME", str(home)) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(UserError, match=message):
        finetune(args_of(home, tmp_path / "out", task, **changes))


def test_a_mistake_is_put_right_in_the_same_folder(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column 'txt'; found text, label"):
        finetune(args_of(home, tmp_path / "out", epochs=1, task__text="txt"))
    assert finetune(args_of(home, tmp_path / "out", epochs=1))["step"]


def test_span_scores_need_span_tags(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("a X\nb Y\n\nc X\n\n")
    with pytest.raises(UserError, match="metric=span_f1: expected tags B-X, I-X and O, found X, Y"):
        finetune(args_of(home, tmp_path / "o", "ner", task__train=path, task__test=path, task__metric="span_f1"))


def test_spans_without_a_beginning_are_spans_where_it_is_said(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "iob1.conll"
    path.write_text("".join(f"{w} {t.replace('B-', 'I-')}\n" for i in range(40) for w, t in [*tagged(i), ("end", "O")]))
    path.write_text(path.read_text().replace("end O\n", "end O\n\n"))
    shared = {"task__train": path, "task__test": path}
    data, _ = prepared(args_of(home, tmp_path / "a", "ner", **shared))
    assert data.metrics[0] == "accuracy"
    data, _ = prepared(args_of(home, tmp_path / "b", "ner", task__metric="span_f1", **shared))
    assert data.metrics[0] == "span_f1"
    target = data._sentences(data.splits["test"], data.splits["test"].y)
    guess = [["O" if tag == "I-ANI" else tag for tag in tags] for tags in target]
    y = np.array([data.classes.index(tag) for tags in guess for tag in tags])
    found = data._scores(data.splits["test"], y)["span_f1"]
    assert found == pytest.approx(f1_score(target, guess)) == pytest.approx(2 / 3)


def test_a_rare_class_is_not_left_to_the_dev_rows(home: Path, tmp_path: Path) -> None:
    lines = (home / "train_animal.jsonl").read_text().splitlines()
    plain = load_data(args := args_of(home, tmp_path), load(args)).splits
    place = next(i for i, line in enumerate(lines) if json.loads(line)["text"] == plain["dev"].texts[0])
    lines[place] = json.dumps({"text": plain["dev"].texts[0], "label": "rare"})
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    args = args_of(home, tmp_path, task__train=tmp_path / "train.jsonl")
    splits = load_data(args, load(args)).splits
    assert splits["train"].labels.count("rare") == 1
    assert set(plain["dev"].texts[1:]) < set(splits["dev"].texts)
    assert len(splits["dev"].texts) == len(plain["dev"].texts)


def test_labels_that_are_never_trained_are_told(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = tmp_path / "test.jsonl"
    more = "".join(json.dumps({"text": "a fox", "label": name}) + "\n" for name in ("new", "new", "newer"))
    test.write_text((home / "test_animal.jsonl").read_text() + more)
    result = finetune(args_of(home, tmp_path / "out", task__test=test, epochs=1))
    assert result["data"]["labels_never_trained"] == {"test": {"new": 2, "newer": 1}}
    assert "test rows have labels that no training row has, which count as wrong: 'new' (2), 'newer' (1)" in (
        capsys.readouterr().out
    )


def test_a_newer_checkpoint_and_changed_files_are_noticed(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    data = tmp_path / "train.jsonl"
    data.write_bytes((home / "train_animal.jsonl").read_bytes())
    shared = {"ckpt": tmp_path / "run", "task__train": data, "epochs": 1}
    result = finetune(args_of(home, tmp_path / "out", **shared))
    (only,) = (tmp_path / "run/checkpoints").iterdir()
    assert result["config"]["ckpt"] == str(only)
    assert finetune(args_of(home, tmp_path / "out", **shared)) == json.loads(json.dumps(result))
    later = only.with_name(f"{int(only.name) + 1:010d}")
    shutil.copytree(only, later)
    with pytest.raises(UserError, match=rf"another config \(ckpt; ckpt={only} there, {later} now\)"):
        finetune(args_of(home, tmp_path / "out", **shared))
    pinned = {**shared, "ckpt": only}
    assert finetune(args_of(home, tmp_path / "out", **pinned))["step"] == result["step"]
    data.write_bytes(data.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"out is finished, and .*train\.jsonl has changed since"):
        finetune(args_of(home, tmp_path / "out", **pinned))


def test_a_folder_of_another_config_is_left_alone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(home, tmp_path / "out", epochs=1)
    first = finetune(args)
    monkeypatch.setattr(train_module, "load", None)  # a finished run needs no encoder
    assert finetune(args_of(home, tmp_path / "out", epochs=1, micro_rows=2)) == json.loads(json.dumps(first))
    with pytest.raises(UserError, match=r"out is there already with another config \(optim, seed\)"):
        finetune(args_of(home, tmp_path / "out", epochs=1, seed=3, optim__lr=1e-3))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match="fine-tuning is one process"):
        finetune(args)
    with pytest.raises(UserError, match=r"no result.json in it"):
        report(ReportArgs(str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="dump_dir: each point has a folder of its own"):
        points(args_of(home, tmp_path, cls=GridArgs, sweep=sweep_file(tmp_path / "s.yaml", "points: [{dump_dir: x}]")))
