"""Every kind of embedding model behind ``load_embedder``, against plain loops and sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lingua.embedder import load_embedder, role_sequences
from lingua.errors import UserError
from lingua.features import load_encoder
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, make_pieces_run

TEXTS = [*SENTENCES, "dog", " ".join(SENTENCES[:2])]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pieces_run(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hf"), "bert")


def test_a_pretraining_run_is_pooled_by_the_mean(run: Path) -> None:
    model = load_embedder(run, device="cpu")
    expected = load_encoder(run, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS, normalize=False), expected, atol=1e-5)
    found = model.encode(TEXTS, prompt="query", dim=5)
    assert found.dtype == np.float32
    assert found.shape == (len(TEXTS), 5)
    expected = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(model.encode(TEXTS, batch_tokens=1).shape, (len(TEXTS), 32))


def test_hugging_face_and_sentence_transformers_give_the_same_vectors(hf: Path) -> None:
    """A plain encoder: both pool by the mean."""
    ours, theirs = load_embedder(f"hf:{hf}", device="cpu"), load_embedder(f"st:{hf}", device="cpu")
    assert theirs.dim == ours.dim == 32
    for options in ({}, {"normalize": False}, {"dim": 7, "prompt": "passage"}):
        np.testing.assert_allclose(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options), atol=1e-5)
    assert theirs.encode([]).shape == ours.encode([]).shape == (0, 32)
    assert load_embedder(f"st:{hf}", device="cpu", max_length=6).max_length == 6
    assert theirs.weights_digest() == load_embedder(f"st:{hf}", device="cpu").weights_digest()


def test_a_passage_prompt_of_sentence_transformers_is_used_under_either_name(hf: Path, tmp_path: Path) -> None:
    library = load_embedder(f"st:{hf}", device="cpu").model
    expected = library.encode(["It was : " + text for text in TEXTS], normalize_embeddings=True)
    for name in ("passage", "document"):
        library.prompts = {"query": "She said : ", name: "It was : "}
        library.save(str(tmp_path / name))
        found = load_embedder(f"st:{tmp_path / name}", device="cpu").encode(TEXTS, prompt="passage")
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_prompt_that_leaves_no_room_for_text_is_refused(run: Path) -> None:
    encoder = load_encoder(run, device="cpu")
    prompt = SENTENCES[0]
    whole = len(encoder.text_sequences([prompt]).ids[0])
    found = role_sequences(encoder, ["dog"], prompt, whole + 1).ids[0]
    assert len(found) == whole + 1
    with pytest.raises(UserError, match=f"alone has the {whole} tokens of max_length or more"):
        role_sequences(encoder, ["dog"], prompt, whole)


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    model = load_embedder(run, device="cpu")
    with pytest.raises(UserError, match="prompt='title': expected query or passage"):
        model.encode(TEXTS, prompt="title")
    with pytest.raises(UserError, match="dim=33: the model's vectors have 32 channels"):
        model.encode(TEXTS, dim=33)
    with pytest.raises(UserError, match="found one string"):
        model.encode("text")
    with pytest.raises(UserError, match=r"text 1 .* has no token"):
        model.encode(["a dog", ""])
    with pytest.raises(UserError, match=r"^st:.*none: there is no folder .*/none"):
        load_embedder(f"st:{tmp_path}/none", device="cpu")
    with pytest.raises(UserError, match="no such run or checkpoint"):
        load_embedder(tmp_path / "none")
