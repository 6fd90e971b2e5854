"""Embedding models as folders of sentence-transformers, read by a process without this project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lingua.embedder import BACKBONE, Embedder, load_embedder
from lingua.errors import UserError
from lingua.hub.export import ExportArgs, export
from lingua.pooler import Pooler, PoolerArgs
from lingua.predictor import PredictorArgs
from lingua.rotary import RopeScaling
from lingua.saving import save
from lingua.tokenizer import SentencePieceTokenizer, TokenizerArgs, build_tokenizer
from lingua.transformer import Encoder, TransformerArgs
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, train_sentencepiece

# Of the pieces of "1999" two orders are equally likely, and the libraries take different ones (docs/hub.md).
TEXTS = [sentence.replace("1999", "1987") for sentence in SENTENCES]
PROMPTS = {"query": "She said : ", "passage": "A dog and "}
READER = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer
texts, out = json.load(open(sys.argv[1])), {}
for folder in sys.argv[3:]:
    model = SentenceTransformer(folder, device="cpu", trust_remote_code="attention" in folder)
    name = folder.rsplit("/", 1)[1]
    for batch_size in (32, 1):
        out[f"{name} query {batch_size}"] = model.encode_query(texts, batch_size=batch_size)
        out[f"{name} passage {batch_size}"] = model.encode_document(texts, batch_size=batch_size)
    out[f"{name} plain"] = model.encode(texts)
    model.save(folder + "_again")
    again = SentenceTransformer(folder + "_again", device="cpu", trust_remote_code="attention" in folder)
    assert np.array_equal(again.encode(texts), out[f"{name} plain"]), folder
    assert model.get_sentence_embedding_dimension() == out[f"{name} plain"].shape[1]
assert not any(name.split(".")[0] in ("lingua", "apps") for name in sys.modules)
np.savez(sys.argv[2], **out)
"""


@dataclass
class Case:
    pooler: PoolerArgs
    predictor: PredictorArgs | None = None
    shape: dict | None = None  # fields of the encoder
    hf: str | None = None  # instead, a kind of model of Hugging Face
    query_length: int = 40


CASES = {
    "mean": Case(PoolerArgs("mean")),
    "first": Case(PoolerArgs("first")),
    "max": Case(PoolerArgs("max")),
    "last": Case(PoolerArgs("last")),
    "attention": Case(PoolerArgs(n_queries=3, position=5), PredictorArgs(n_layers=2)),
    "attention_narrow": Case(PoolerArgs(), PredictorArgs(n_layers=1, dim=16), {"qk_norm": True, "rope_theta": 500.0}),
    "attention_scaled": Case(
        PoolerArgs(n_queries=2),
        PredictorArgs(n_layers=1),
        {"rope_theta": 100.0, "rope_scaling": RopeScaling(8.0, original_max_position_embeddings=8)},
    ),
    "attention_hf": Case(PoolerArgs(), hf="bert"),
    "hf": Case(PoolerArgs("mean"), hf="roberta"),
}


def make(folder: Path, case: Case, pieces: Path, objective: str = "mlm") -> Path:
    """A run of ``apps.embed`` with one checkpoint, of random weights."""
    torch.manual_seed(0)
    tokenizer = {"name": "sentencepiece", "path": str(pieces)}
    lengths = {"query": case.query_length, "passage": 40}
    config = {"pooler": asdict(case.pooler), "data": {"max_length": lengths, "prompt": PROMPTS}}
    state: dict = {"step": 3}
    if case.hf is not None:
        import transformers

        make_model(folder / BACKBONE, case.hf)
        encoder: nn.Module = transformers.AutoModel.from_pretrained(folder / BACKBONE)
        backbone: dict = {"hf": str(folder)}
        shape = TransformerArgs(dim=32, n_layers=3, n_heads=2, vocab_size=150)
    else:
        vocab_size = SentencePieceTokenizer(str(pieces)).vocab_size
        shape = TransformerArgs(dim=32, n_layers=2, n_heads=2, vocab_size=vocab_size, **(case.shape or {}))
        encoder = Encoder(shape)
        model = asdict(shape) | ({} if case.predictor is None else {"predictor": asdict(case.predictor)})
        backbone = {"model": model, "seed": 7, "data": {"seq_len": 64, "tokenizer": tokenizer}}
        state |= {"tokenizer": build_tokenizer(TokenizerArgs(**tokenizer)).identity(), "objective": objective}
    embedder = Embedder(encoder, Pooler(case.pooler, shape, case.predictor))
    for name, parameter in embedder.named_parameters():
        if case.hf is None or name.startswith("pooler"):
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    optimizer = torch.optim.AdamW(embedder.parameters())
    save(
        folder / "checkpoints" / f"{3:010d}",
        embedder, optimizer, state | {"backbone": backbone}, yaml.safe_dump(config),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("pieces") / "pieces")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pieces: Path) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    for name, case in CASES.items():
        make(folder / "runs" / name, case, pieces)
        export(ExportArgs(ckpt=str(folder / "runs" / name), to=str(folder / "out" / name)))
    return folder


def read_elsewhere(folders: list[Path], texts: list[str], where: Path) -> dict[str, np.ndarray]:
    """What a process without this project reads in the folders."""
    (where / "texts.json").write_text(json.dumps(texts))
    words = [sys.executable, "-c", READER, str(where / "texts.json"), str(where / "out.npz"), *map(str, folders)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(where / "home"), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)
    ended = subprocess.run(words, cwd=where, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(np.load(where / "out.npz"))


def test_a_process_without_this_project_has_the_same_vectors(runs: Path, tmp_path: Path) -> None:
    texts = [*TEXTS, "dog", " ".join(TEXTS), "  naïve  café\n"]
    theirs = read_elsewhere([runs / "out" / name for name in CASES], texts, tmp_path)
    for name in CASES:
        model = load_embedder(runs / "runs" / name, device="cpu")
        ours = {role: model.encode(texts, prompt=role) for role in PROMPTS}
        assert 0 < model.truncated < 2 * len(texts)
        plain = model.encode(texts)
        for batch_size in (32, 1):
            for role in PROMPTS:
                found = theirs[f"{name} {role} {batch_size}"]
                np.testing.assert_allclose(found, ours[role], atol=1e-5, rtol=0, err_msg=f"{name} {role}")
        np.testing.assert_allclose(theirs[f"{name} plain"], plain, atol=1e-5, rtol=0)
        assert np.abs(ours["passage"] - plain).max() > 0.01
        assert np.abs(ours["query"] - ours["passage"]).max() > 0.01
        assert np.abs(ours["query"][0] - ours["query"][1]).max() > 0.01


def test_stock_modules_only_unless_the_pooler_learns_and_then_why(
    runs: Path, tmp_path: Path, pieces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CASES:
        kinds = [module["type"] for module in json.loads((runs / "out" / name / "modules.json").read_text())]
        assert all(kind.startswith("sentence_transformers.models.") for kind in kinds) == ("attention" not in name)
        card = (runs / "out" / name / "README.md").read_text()
        assert ("trust_remote_code=True" in card) == ("attention" in name)
        assert all(f"- before a {role}: `{text}`\n" in card for role, text in PROMPTS.items())
    export(ExportArgs(ckpt=str(runs / "runs/attention"), to=str(tmp_path / "again")))
    said = capsys.readouterr().out
    assert "trust_remote_code=True is needed because" in said
    code = (tmp_path / "again/crossattention_pooler.py").read_text()
    assert "lingua" not in code
    found = load_embedder(f"st:{tmp_path}/again", device="cpu", trust_remote_code=True).encode(TEXTS)
    ours = load_embedder(runs / "runs/attention", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, ours, atol=1e-5)
    with pytest.raises(UserError, match="trust_remote_code"):
        load_embedder(f"st:{tmp_path}/again", device="cpu")


def test_what_sentence_transformers_cannot_do_is_refused_or_said(
    tmp_path: Path, pieces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mix_layers", "self_attention"):
        run = make(tmp_path / name, Case(PoolerArgs(), PredictorArgs(n_layers=1, **{name: True})), pieces)
        with pytest.raises(UserError, match=rf"predictor.{name}=true"):
            export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    run = make(tmp_path / "clm", CASES["mean"], pieces, objective="clm")
    with pytest.raises(UserError, match="causal"):
        export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))
    run = make(tmp_path / "lengths", Case(PoolerArgs("mean"), query_length=20), pieces)
    export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
    assert "queries at 20 and passages at 40" in capsys.readouterr().out
    assert "queries at 20 and passages at 40" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(UserError, match="is there already"):
        export(ExportArgs(ckpt=str(run), to=str(tmp_path / "out")))
