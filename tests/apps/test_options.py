"""Every option of the apps' masking reaches the model: what it is given, and what it counts, in a real step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apps.bert.model import Bert
from apps.crossbert.model import CrossBert
from tests.support import run_app, tiny_words

MASK_ID = 50264


def calls(app: str, corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[dict]:
    """Arguments and result of each forward pass of a step of 8 rows of 32, with the model's own state."""
    model_class = {"bert": Bert, "crossbert": CrossBert}[app]
    real, seen = model_class.forward, []

    def forward(self, *args):
        part = real(self, *args)
        tokens, view = args[-3], args[-2]
        seen.append({"inputs": args[0], "tokens": tokens, "view": view, "targets": int(part.targets), "model": self})
        return part

    monkeypatch.setattr(model_class, "forward", forward)
    words = tiny_words(app, corpus, folder, steps=1, micro_rows=8, data__validation="{}", **options)
    run_app(app, [word for word in words if not word.startswith("data.validation.")])
    return seen


def test_bert_masks_a_fifth_of_each_row_by_default(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    (call,) = calls("bert", corpus, tmp_path, monkeypatch)
    hidden = call["view"].hidden_BM
    assert hidden.shape == (8, 6)
    shown, original = call["inputs"].gather(1, hidden), call["tokens"].gather(1, hidden)
    special = (original == 0) | (original == 2)
    assert (shown[~special] == MASK_ID).all()
    assert (shown[special] == original[special]).all()
    assert call["targets"] == int((~special).sum())
    assert call["model"].document_start is None


@pytest.mark.parametrize("ratio", [0.4, 0.75])
def test_the_ratio_is_a_field(corpus: Path, tmp_path: Path, monkeypatch, ratio: float) -> None:
    (call,) = calls("bert", corpus, tmp_path / "bert", monkeypatch, masking__hidden_ratio=ratio)
    assert call["view"].hidden_BM.shape == (8, round(32 * ratio))
    views = calls("crossbert", corpus, tmp_path / "crossbert", monkeypatch, masking__hidden_ratio=ratio)
    assert [call["view"].hidden_BM.shape[1] for call in views] == [round(32 * ratio), 32 - round(32 * ratio)]


def test_bert_may_show_random_tokens_or_the_tokens_themselves(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    (call,) = calls("bert", corpus, tmp_path / "keep", monkeypatch, masking__replace__keep_fraction=1.0)
    assert torch.equal(call["inputs"], call["tokens"])
    (call,) = calls("bert", corpus, tmp_path / "random", monkeypatch, masking__replace__random_fraction=1.0)
    hidden = call["view"].hidden_BM
    shown, original = call["inputs"].gather(1, hidden), call["tokens"].gather(1, hidden)
    targets = (original != 0) & (original != 2)
    assert not (shown[targets] == MASK_ID).any()
    assert (shown[targets] != original[targets]).float().mean() > 0.95


def test_special_tokens_are_targets_when_asked(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    (call,) = calls("bert", corpus, tmp_path / "bert", monkeypatch, masking__predict_special="true")
    assert call["targets"] == 8 * 6
    assert (call["inputs"].gather(1, call["view"].hidden_BM) == MASK_ID).all()
    (call,) = calls("crossbert", corpus, tmp_path / "crossbert", monkeypatch, masking__predict_special="true")
    assert call["targets"] == 8 * 32


def test_crossbert_predicts_every_ordinary_token_once_a_step(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    (call,) = calls("crossbert", corpus, tmp_path, monkeypatch)
    tokens = call["tokens"]
    assert call["view"].hidden_BM.shape == (16, 16)
    assert call["targets"] == int(((tokens != 0) & (tokens != 2)).sum())


def test_crossbert_may_train_on_single_views(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    options = {"masking__complementary": "false", "masking__hidden_ratio": 0.25, "batch_tokens": 256}
    (call,) = calls("crossbert", corpus, tmp_path, monkeypatch, **options)
    assert call["view"].hidden_BM.shape == (8, 8)
    assert call["targets"] <= 64


@pytest.mark.parametrize("app", ["bert", "crossbert"])
def test_isolated_documents_reach_the_model(corpus: Path, tmp_path: Path, monkeypatch, app: str) -> None:
    call = calls(app, corpus, tmp_path, monkeypatch, data__isolate_documents="true")[0]
    assert call["model"].document_start == 0
    assert (call["tokens"] == 0).any()
