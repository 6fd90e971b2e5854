"""Exported folders in a process that knows nothing of this project, and the way back."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from lingua.checkpoint import _load_tensors, read_state, resolve
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.hub.export import ExportArgs, export, load_predictor
from lingua.hub.exported import load_exported
from lingua.hub.importing import ImportArgs, import_model
from tests.lingua.evaluation.test_watch import rewrite
from tests.support import ROOT, environment, run_app, tiny_words
from tests.tiny_run import SENTENCES, make_run, train_sentencepiece

TEXTS = [*(text for text in SENTENCES if "1999" not in text), "Short.", "naïve café 🙂 中文"]
MASKED = "The quick brown<mask> jumps over the<mask> dog."
# What a user runs. "-I" keeps this repository off its path.
THEIR_CODE = """
import json, sys
import numpy as np, torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline
folder, out, texts, masked = json.loads(sys.argv[1])
found = {}
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
batch = tokenizer(texts, padding=True, return_tensors="pt")
found["keys"] = sorted(batch)
found["ids"], found["real"] = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
found["pair"] = tokenizer(texts[0], texts[1])["input_ids"]
with torch.inference_mode():
    states = model(**batch, output_hidden_states=True).hidden_states
    for i, state in enumerate(states):
        found[f"state{i}"] = state.numpy()
if model.config.architectures == ["EuroBertForMaskedLM"]:
    head, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    batch = tokenizer(masked, return_tensors="pt")
    found["masked_ids"] = batch["input_ids"][0].numpy()
    found["logits"] = head.eval()(**batch).logits[0].detach().numpy()
    answers = pipeline("fill-mask", model=folder, device="cpu")(masked, top_k=2)  # a list for each mask
    found["filled"] = [[(answer["token"], answer["score"]) for answer in answers_of_one] for answers_of_one in answers]
else:
    head, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}, info  # and transformers warns of it
assert type(model).__module__.startswith("transformers."), type(model)
from sentence_transformers import SentenceTransformer
st = SentenceTransformer(folder, device="cpu")
found["vectors"], found["max_seq_length"] = st.encode(texts), st.max_seq_length
assert not [name for name in sys.modules if name.split(".")[0] in ("lingua", "apps")]
np.savez(out, **found)
"""


def their_view(folder: Path, out: Path) -> dict[str, np.ndarray]:
    words = json.dumps([str(folder), str(out), TEXTS, MASKED])
    variables = environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent)}
    done = subprocess.run(
        [sys.executable, "-I", "-c", THEIR_CODE, words], cwd=out.parent, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A BERT with RoBERTa's vocabulary: run and exported folder."""
    folder = tmp_path_factory.mktemp("bert")
    run = make_run(folder / "run", {"name": "roberta", "path": None, "pattern": None}, 50265, n_layers=3)
    export(ExportArgs(ckpt=str(run), to=str(folder / "out")))
    return run, folder / "out"


@pytest.fixture(scope="module")
def theirs_of_bert(bert: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return their_view(bert[1], tmp_path_factory.mktemp("theirs") / "theirs.npz")


@pytest.fixture(scope="module")
def theirs_of_crossbert(
    crossbert: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    return their_view(crossbert[1], tmp_path_factory.mktemp("theirs") / "theirs.npz")


@pytest.fixture(scope="module")
def crossbert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A CrossBERT with a SentencePiece vocabulary, another feed-forward width, and a predictor of another width."""
    folder = tmp_path_factory.mktemp("crossbert")
    model = train_sentencepiece(folder / "vocabulary")
    size = load_size(model)
    tokenizer = {"name": "sentencepiece", "path": str(model), "pattern": None}
    run = make_run(
        folder / "run",
        tokenizer,
        size,
        predictor={"dim": 16, "n_layers": 2, "n_heads": 2},
        ffn_dim=40,
        rope_theta=500.0,
    )
    export(ExportArgs(ckpt=str(run), to=str(folder / "out")))
    return run, folder / "out"


def load_size(model: Path) -> int:
    from lingua.tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(str(model)).vocab_size


@pytest.mark.parametrize("kind", ["bert", pytest.param("crossbert", marks=pytest.mark.slow)])
def test_another_process_sees_the_same_model(kind: str, request: pytest.FixtureRequest) -> None:
    run, folder = request.getfixturevalue(kind)
    theirs = request.getfixturevalue(f"theirs_of_{kind}")
    ours = load_encoder(run, device="cpu")
    sequences = ours.text_sequences(TEXTS).ids
    assert theirs["keys"].tolist() == ["attention_mask", "input_ids"]
    assert theirs["pair"].tolist() == ours.text_sequences(TEXTS[:1], TEXTS[1:2]).ids[0].tolist()
    layers = list(range(ours.n_layers + 1))
    for row, ids in enumerate(sequences):
        real = theirs["real"][row].astype(bool)
        assert theirs["ids"][row][real].tolist() == ids.tolist()
        with torch.inference_mode():
            states = list(ours.encoder.states(torch.from_numpy(ids)[None]))
            states[-1] = ours.encoder.norm(states[-1])  # theirs is normed, and the others are not
        for layer in layers:
            found = theirs[f"state{layer}"][row][real]
            np.testing.assert_allclose(found, states[layer][0].numpy(), rtol=0, atol=1e-5)
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert np.abs(theirs[f"state{ours.n_layers}"]).max() > 1
    np.testing.assert_allclose(theirs["vectors"], ours.encode(TEXTS), rtol=0, atol=1e-5)
    assert theirs["max_seq_length"] == 256
    if kind == "bert":
        with torch.inference_mode():
            expected = ours.encoder(torch.from_numpy(theirs["masked_ids"])[None])[0] @ ours.encoder.embedding.weight.T
        np.testing.assert_allclose(theirs["logits"], expected.numpy(), rtol=0, atol=1e-5)
        assert (theirs["masked_ids"] == 50264).sum() == 2
        # The mask takes the space before it along, as tokens do.
        assert " <mask>" not in MASKED
        with_space = load_exported(folder).fill(MASKED.replace("<mask>", " <mask>"))
        assert with_space == load_exported(folder).fill(MASKED)


def weights(run: Path) -> dict[str, Tensor]:
    """Every tensor of a run's model."""
    import torch.distributed.checkpoint as dcp

    folder = resolve(run)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    state = {name: torch.empty(stored[f"model.{name}"].size) for name in names}
    _load_tensors(folder, {"model": state})
    return state


@pytest.mark.parametrize("kind", ["bert", "crossbert"])
def test_export_and_import_is_the_identity(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run, folder = request.getfixturevalue(kind)
    import_model(ImportArgs(source=str(folder), to=str(tmp_path / "back")))
    one, other = weights(run), weights(tmp_path / "back")
    assert one.keys() == other.keys()
    assert any(name.startswith("predictor.") for name in one) == (kind == "crossbert")
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    here, back = load_encoder(run, device="cpu"), load_encoder(tmp_path / "back", device="cpu")
    assert here.config["model"] == back.config["model"]
    assert here.tokenizer.identity() == back.tokenizer.identity() == read_state(resolve(run))["tokenizer"]
    assert back.max_length == here.max_length
    np.testing.assert_array_equal(here.encode(TEXTS), back.encode(TEXTS))
    # and once more round
    export(ExportArgs(ckpt=str(tmp_path / "back"), to=str(tmp_path / "again")))
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "config.json",
        *["predictor.safetensors"][: kind == "crossbert"],
    ):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@torch.inference_mode()
def test_a_crossbert_fills_masks_by_its_predictor(crossbert: tuple[Path, Path]) -> None:
    run, folder = crossbert
    found = load_exported(folder).fill("The quick <mask> jumps over the <mask> dog .", top=3)
    assert [len(row) for row in found] == [3, 3]
    ours = load_encoder(run, device="cpu")
    tokenizer, mask = ours.tokenizer, ours.tokenizer.mask_id
    pieces = [ids.tolist() for ids in tokenizer.encode_batch(["The quick", " jumps over the", " dog ."])]
    ids = [tokenizer.bos_id, *pieces[0], mask, *pieces[1], mask, *pieces[2], tokenizer.eos_id]
    hidden = [place for place, token in enumerate(ids) if token == mask]
    visible = [place for place, token in enumerate(ids) if token != mask]
    states = ours.encoder(torch.tensor([[ids[place] for place in visible]]), torch.tensor([visible]))
    predictor = load_predictor(resolve(run), ours.encoder, ours.config["model"])
    out = predictor(states, torch.tensor([visible]), torch.tensor([hidden]))[0]
    logits = out @ ours.encoder.embedding.weight.T
    logits[:, list(tokenizer.special_ids)] = -torch.inf
    for row, probabilities in zip(found, logits.softmax(dim=1), strict=True):
        best = probabilities.argsort(descending=True)[:3].tolist()
        assert [token for token, _ in row] == [tokenizer.decode([i]) for i in best]
        assert [p for _, p in row] == pytest.approx(probabilities[best].tolist(), rel=1e-4)


def test_a_berts_masks_are_filled_by_its_own_head(
    bert: tuple[Path, Path], theirs_of_bert: dict[str, np.ndarray]
) -> None:
    theirs = theirs_of_bert
    exported = load_exported(bert[1])
    logits = torch.from_numpy(theirs["logits"][theirs["masked_ids"] == 50264])
    for row, probabilities in zip(theirs["filled"], logits.softmax(dim=1), strict=True):
        best = probabilities.topk(2)
        assert row[:, 0].tolist() == best.indices.tolist()
        assert row[:, 1].tolist() == pytest.approx(best.values.tolist(), rel=1e-3)
    logits[:, list(exported.tokenizer.special_ids)] = -torch.inf
    for row, probabilities in zip(exported.fill(MASKED, top=4), logits.softmax(dim=1), strict=True):
        assert [p for _, p in row] == pytest.approx(probabilities.topk(4).values.tolist(), rel=1e-3)
    for row in exported.fill(MASKED, top=10**6):
        assert len(row) == exported.tokenizer.vocab_size - len(exported.tokenizer.special_ids)
    with pytest.raises(UserError, match="has no <mask>"):
        exported.fill("no mask")


def test_training_goes_on_from_an_import(corpus: Path, tmp_path: Path) -> None:
    from lingua.metrics import read_metrics
    from tests.support import run_app, tiny_words

    run_app("crossbert", tiny_words("crossbert", corpus, tmp_path / "first", steps=12, validation__every=12))
    export(ExportArgs(ckpt=str(tmp_path / "first"), to=str(tmp_path / "out")))
    import_model(ImportArgs(source=str(tmp_path / "out"), to=str(tmp_path / "imported")))
    for start in ("first", "imported"):
        words = tiny_words(
            "crossbert", corpus, tmp_path / f"from_{start}", steps=3, validation__every=9, init__path=tmp_path / start
        )
        run_app("crossbert", words)
    one, other = (read_metrics(tmp_path / f"from_{start}/metrics.jsonl") for start in ("first", "imported"))
    assert [r["loss"] for r in one if "loss" in r] == [r["loss"] for r in other if "loss" in r]
    card = (tmp_path / "out" / "README.md").read_text()
    record = next(r for r in read_metrics(tmp_path / "first/metrics.jsonl") if r["step"] == 12 and "flops" in r)
    for expected in (
        "library_name: transformers", "pipeline_tag: feature-extraction", "arxiv.org/abs/2607.04011", "| steps | 12 |",
        f"| tokens (each view of a row counts) | {record['tokens']:,} |", f"| {record['flops']:.3g} |",
        "| hidden positions | 50% |", "| complementary masks | yes |", "predictor.safetensors",
    ):  # fmt: skip
        assert expected in card
    assert "Scores" not in card  # none were taken


def test_the_card_has_the_scores_of_its_checkpoint(bert: tuple[Path, Path], tmp_path: Path) -> None:
    found = bert[0] / "eval" / f"{3:010d}"
    found.mkdir(parents=True)
    (found / "results.md").write_text("Bert, step 3, /some/path. Scores x 100.\n\nridge, `paper`:\n\n| layer | x |\n")
    (found / "results.json").write_text(json.dumps({"versions": {"torch": "2.13.0"}}))
    export(ExportArgs(ckpt=str(bert[0]), to=str(tmp_path / "out"), name="my-bert", license="apache-2.0"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "# my-bert\n" in card
    assert "pipeline_tag: fill-mask" in card
    assert "Scores x 100 (torch 2.13.0).\n\nridge, `paper`:\n\n| layer | x |" in card
    assert "/some/path" not in card
    assert str(tmp_path) not in card


def test_broken_sources_are_named(bert: tuple[Path, Path], crossbert: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    def copy(source: Path, name: str) -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    def refused(source: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            import_model(ImportArgs(source=str(source), to=str(tmp_path / "run")))

    cut = copy(bert[1], "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(cut, "model.safetensors: not a whole safetensors file")
    (cut / "model.safetensors").unlink()
    refused(cut, "has no model.safetensors")
    (cut / "pytorch_model.bin").touch()
    refused(cut, "pytorch_model.bin is a pickle: convert it")
    other = copy(bert[1], "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    refused(other, "lingua.json says norm_eps=1e-05, config.json 0.001")
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    refused(other, "lingua.json says n_layers=3, config.json 9: they are not of one export")
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    refused(other, "lingua.json says ffn_dim=256, config.json 8")
    (other / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    refused(other, "model_type=bert: only eurobert, llama, qwen2 and qwen3 have")
    (other / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    refused(other, "config.json has no number for hidden_size")
    (other / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    refused(other, "lingua.json says n_kv_heads=2, config.json 1")
    (other / "config.json").write_text("{")
    refused(other, "config.json: not valid JSON")
    vocabulary = copy(crossbert[1], "vocabulary")
    changed = train_sentencepiece(tmp_path / "changed", vocab_size=120)
    next((vocabulary / "lingua_tokenizer").iterdir()).write_bytes(changed.read_bytes())
    refused(vocabulary, "is not the vocabulary that lingua.json describes")
    (vocabulary / "predictor.safetensors").write_bytes(b"")
    refused(vocabulary, "predictor.safetensors: cannot be loaded")
    refused(tmp_path / "nowhere" / "at" / "all", "no such folder, and the hub does not give it")


def test_what_cannot_be_exported_is_refused(bert: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        export(ExportArgs(ckpt=str(bert[0]), to=str(bert[1])))
    tokenizer = {"name": "bytes", "path": None, "pattern": None}
    impossible = [
        ({"qk_norm": True, "biases": ["ffn"]}, r"model\.qk_norm=True with model\.biases=\['ffn'\] cannot be exported"),
        ({"n_heads": 3, "head_dim": 8}, r"model\.dim=32 with model\.n_heads=3 cannot be exported: the eurobert"),
    ]
    for number, (changes, message) in enumerate(impossible):
        run = make_run(tmp_path / f"run{number}", tokenizer, 261, **changes)
        with pytest.raises(UserError, match=message):
            export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


class Hub:
    """Enough of the hub's protocol, on loopback, to take a pushed folder; knows one user by a token."""

    def __init__(self) -> None:
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Authorization"] != "Bearer the-users-own":
                    self.answer(401, {"error": "Invalid credentials"})
                elif self.path == "/api/repos/create":
                    hub.created.append(json.loads(body))
                    self.answer(200, {"url": f"{hub.url}/me/enc"})
                elif self.path == "/api/validate-yaml":
                    self.answer(200, {"warnings": [], "errors": []})
                elif self.path == "/api/models/me/enc/preupload/main":
                    files = [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in json.loads(body)["files"]
                    ]
                    self.answer(200, {"files": files})
                elif self.path == "/api/models/me/enc/commit/main":
                    for line in body.splitlines():
                        entry = json.loads(line)
                        if entry["key"] == "file":
                            hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                    self.answer(200, {"commitUrl": f"{hub.url}/me/enc/commit/1", "commitOid": "1", "success": True})
                else:
                    self.answer(404, {"error": self.path})

            def do_GET(self) -> None:
                self.answer(200, {"id": "me/enc", "sha": "0" * 40, "siblings": []})

            def answer(self, status: int, value: dict) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def push(self, run: Path, to: Path, token: str) -> subprocess.CompletedProcess:
        words = ["export", f"ckpt={run}", f"to={to}", "push=me/enc"]
        home = {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(to.parent / "home")}
        return subprocess.run(
            [sys.executable, "-m", "lingua.hub", *words],
            cwd=ROOT,
            env=environment() | home,
            capture_output=True,
            text=True,
        )


@pytest.mark.slow
def test_push_uploads_with_the_users_token(crossbert: tuple[Path, Path], tmp_path: Path) -> None:
    hub = Hub()
    try:
        done = hub.push(crossbert[0], tmp_path / "one", "the-users-own")
        assert done.returncode == 0, done.stderr[-2000:]
        assert hub.created[0]["name"] == "enc"
        assert hub.created[0]["organization"] == "me"
        assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private", hub.created
        written = {p.relative_to(tmp_path / "one").as_posix(): p for p in (tmp_path / "one").rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in written.items()} == hub.files
        refused = hub.push(crossbert[0], tmp_path / "two", "somebody-elses")
    finally:
        hub.server.shutdown()
    assert refused.returncode == 2
    assert "push=me/enc: the hub refuses" in refused.stderr
    assert "somebody-elses" not in refused.stderr + refused.stdout
    assert (tmp_path / "two" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="expected user/name"):
        ExportArgs(ckpt=str(crossbert[0]), to=str(tmp_path / "three"), push="enc")


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(
    crossbert: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"to=.*out: cannot be written: No space left on device"):
        export(ExportArgs(ckpt=str(crossbert[0]), to=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


def test_the_commands(bert: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from lingua.hub.__main__ import FillArgs, fill

    fill(FillArgs(model=str(bert[1]), text=MASKED, top=2))
    lines = capsys.readouterr().out.splitlines()
    expected = load_exported(bert[1]).fill(MASKED, top=2)
    assert lines == ["  ".join(f"{token!r} {100 * p:.1f}%" for token, p in row) for row in expected]
    done = subprocess.run(
        [sys.executable, "-m", "lingua.hub", "exprot"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "usage: python -m lingua.hub export|import|fill" in done.stderr


def test_what_an_objective_leaves_is_exported_honestly(corpus: Path, tmp_path: Path) -> None:
    """An ELECTRA as a bare encoder with its discriminator's weights; a causal model not at all."""
    from transformers import AutoModel

    for objective in ("rtd", "clm"):
        options = {"objective": objective, "steps": 2, "rtd__disentangled": str(objective == "rtd").lower()}
        run_app("bert", tiny_words("bert", corpus, tmp_path / objective, **options))
    with pytest.raises(UserError, match=r"trained to predict each next token \(objective=clm\).*Train it on with"):
        export(ExportArgs(ckpt=str(tmp_path / "clm"), to=str(tmp_path / "out_clm")))
    assert not (tmp_path / "out_clm").exists()

    out = tmp_path / "out"
    export(ExportArgs(ckpt=str(tmp_path / "rtd"), to=str(out)))
    assert json.loads((out / "config.json").read_text())["architectures"] == ["EuroBertModel"]
    card = (out / "README.md").read_text()
    assert "the discriminator of an ELECTRA" in card
    assert "pipeline_tag: feature-extraction" in card
    assert "predictor.safetensors" not in card
    encoder = load_encoder(tmp_path / "rtd").encoder
    tokens = torch.arange(10, 30)[None]
    theirs = AutoModel.from_pretrained(out)(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(theirs, encoder(tokens), rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="was not trained to predict tokens"):
        load_exported(out).fill("the cat <mask>")
    # and it is still one after it came back
    import_model(ImportArgs(source=str(out), to=str(tmp_path / "back")))
    export(ExportArgs(ckpt=str(tmp_path / "back"), to=str(tmp_path / "again")))
    assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == ["EuroBertModel"]


def test_the_longest_row_of_all_phases_is_the_models_length(bert: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(bert[0], tmp_path / "run")
    folder = resolve(run)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["phases"] = [{"seq_len": None}, {"seq_len": 4 * config["data"]["seq_len"]}]
    rewrite(folder / "config.yaml", yaml.safe_dump(config))
    export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    written = [json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", "tokenizer_config.json")]
    longest = 4 * config["data"]["seq_len"]
    assert (written[0]["max_position_embeddings"], written[1]["model_max_length"]) == (longest, longest)


def test_a_predictor_with_switches_answers_after_export_as_before(tmp_path: Path) -> None:
    switches = {"n_layers": 2, "self_attention": True, "mix_layers": True}
    run = make_run(tmp_path / "run", {"name": "bytes", "path": None, "pattern": None}, 261, predictor=switches)
    export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    found = load_exported(tmp_path / "out")
    encoder = load_encoder(run).encoder
    predictor = load_predictor(resolve(run), encoder, {"predictor": switches})
    tokens, visible, hidden = torch.arange(20, 28)[None], torch.arange(0, 16, 2)[None], torch.arange(1, 16, 2)[None]
    before, after = (
        p(p.read(e, tokens, visible), visible, hidden)
        for p, e in ((predictor, encoder), (found.predictor, found.encoder))
    )
    assert torch.equal(before, after)
    assert len(found.fill("a <mask> c", top=3)[0]) == 3
