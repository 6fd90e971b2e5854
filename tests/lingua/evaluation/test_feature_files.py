"""Feature files: what decides their key, no forward pass for what is there, damage, and two processes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lingua.distributed import World
from lingua.errors import UserError
from lingua.evaluation import feature_files as module
from lingua.evaluation.feature_files import FeatureFiles
from lingua.features import TextEncoder, load_encoder
from tests.support import ROOT, environment
from tests.tiny_run import SENTENCES, make_pieces_run

TEXTS = SENTENCES * 3 + ["dog", "The fox ."]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pieces_run(tmp_path_factory.mktemp("feature_files"))


@pytest.fixture
def enc(run: Path) -> TextEncoder:
    return load_encoder(run, device="cpu")


@pytest.fixture
def files(tmp_path: Path) -> FeatureFiles:
    return FeatureFiles(tmp_path / "features", World(torch.device("cpu")))


def forbid(enc: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*args: Any, **options: Any) -> Iterator[torch.Tensor]:
        raise AssertionError("a forward pass")

    monkeypatch.setattr(enc.encoder, "states", states)


def test_the_files_hold_what_encode_gives_and_cost_no_second_pass(
    enc: TextEncoder, files: FeatureFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = enc.text_sequences(TEXTS)
    found = files.get(enc, sequences, [0, 2])
    expected = enc.encode(TEXTS, layers=[0, 2])
    np.testing.assert_array_equal(found, expected)
    names = sorted(path.name for path in files.folder.glob("*/*"))
    assert names == ["layer_00.npy", "layer_02.npy"]
    (path,) = files.folder.glob("*/layer_02.npy")
    np.testing.assert_array_equal(np.load(path), expected[1])
    files.get(enc, sequences, [1])  # the layer that is missing
    with monkeypatch.context() as patch:
        forbid(enc, patch)
        again = files.get(enc, enc.text_sequences(TEXTS), [2, 1, 0], batch_tokens=100)
        np.testing.assert_array_equal(again[0], expected[1])
        with pytest.raises(AssertionError, match="a forward pass"):
            files.get(enc, enc.text_sequences(TEXTS), [0], pooling="max")


def test_what_decides_the_features_decides_the_key(run: Path, enc: TextEncoder, files: FeatureFiles) -> None:
    def keys() -> int:
        return len(list(files.folder.iterdir()))

    files.get(enc, enc.text_sequences(TEXTS), [0])
    variants = [
        (enc, enc.text_sequences(TEXTS[:-1]), {}),
        (enc, enc.text_sequences(TEXTS[::-1]), {}),
        (enc, enc.text_sequences(TEXTS, TEXTS), {}),
        (enc, enc.text_sequences(TEXTS), {"pooling": "first"}),
        (enc, enc.text_sequences(TEXTS), {"final_norm": False}),
        (enc, enc.text_sequences(TEXTS).every_token(), {}),
        (enc, enc.word_sequences([text.split() for text in TEXTS]), {}),
        (load_encoder(run, random_init=True, device="cpu"), enc.text_sequences(TEXTS), {}),
        (load_encoder(run, device="cpu", dtype=torch.bfloat16), enc.text_sequences(TEXTS), {}),
        (TextEncoder(enc.encoder, enc.tokenizer, enc.max_length, causal=True), enc.text_sequences(TEXTS), {}),
    ]
    for count, (encoder, sequences, how) in enumerate(variants, start=2):
        files.get(encoder, sequences, [0], **how)
        assert keys() == count
    short = load_encoder(run, max_length=12, device="cpu")
    files.get(short, short.text_sequences(TEXTS), [0])
    assert keys() == len(variants) + 2
    files.get(load_encoder(run, device="cpu"), enc.text_sequences(TEXTS), [0])
    assert keys() == len(variants) + 2


def test_words_and_tokens_have_a_row_each(enc: TextEncoder, files: FeatureFiles) -> None:
    words = [text.split() for text in TEXTS]
    (found,) = files.get(enc, enc.word_sequences(words), [1])
    np.testing.assert_array_equal(found, enc.encode_words(words, layers=1)[0])
    sequences = enc.text_sequences(TEXTS)
    (tokens,) = files.get(enc, sequences.every_token(), [2])
    bounds = sequences.every_token().first_rows()
    assert bounds[-1] == sum(map(len, sequences.ids)) == len(tokens)
    means = [tokens[bounds[i] : bounds[i + 1]].mean(0) for i in range(len(TEXTS))]
    np.testing.assert_allclose(means, enc.encode(TEXTS), atol=1e-5)


def test_a_cut_or_partial_file_is_made_again(enc: TextEncoder, files: FeatureFiles) -> None:
    (expected,) = files.get(enc, enc.text_sequences(TEXTS), [1])
    expected = np.array(expected)
    (path,) = files.folder.glob("*/layer_01.npy")
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:50], b""):
        path.write_bytes(damaged)
        path.with_suffix(".partial").write_bytes(b"left by a killed process")
        np.testing.assert_array_equal(files.get(enc, enc.text_sequences(TEXTS), [1])[0], expected)
        assert path.read_bytes() == whole
        assert not path.with_suffix(".partial").exists()


def test_only_what_was_made_here_is_removed(enc: TextEncoder, files: FeatureFiles) -> None:
    files.get(enc, enc.text_sequences(TEXTS), [0])
    other = FeatureFiles(files.folder, files.world)
    other.get(enc, enc.text_sequences(TEXTS), [0, 1])
    other.get(enc, enc.text_sequences(TEXTS[:3]), [0])
    (files.folder / "mine.txt").write_text("not a feature")
    other.remove()
    assert [path.name for path in files.folder.glob("*/*")] == ["layer_00.npy"]
    files.remove()
    assert [path.name for path in files.folder.iterdir()] == ["mine.txt"]


def test_non_finite_features_are_refused_and_leave_no_file(enc: TextEncoder, files: FeatureFiles) -> None:
    with torch.no_grad():
        enc.encoder.layers[1].ffn.w2.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=f"features of layer 2: NaN or infinity in {len(TEXTS)} of {len(TEXTS)} rows"):
        files.get(enc, enc.text_sequences(TEXTS), [2])
    assert not list(files.folder.glob("*/*"))


def test_an_evaluation_waits_for_another_of_the_same_features(
    run: Path, enc: TextEncoder, files: FeatureFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = load_encoder(run, device="cpu")
    forbid(second, monkeypatch)
    sequences, found = second.text_sequences(TEXTS), []
    waiting = threading.Thread(target=lambda: found.extend(files.get(second, sequences, [0, 2])))
    states = enc.encoder.states

    def slow(*args: Any, **options: Any) -> Iterator[torch.Tensor]:
        if not waiting.ident:
            waiting.start()
            waiting.join(0.5)  # it would be over by then
            assert waiting.is_alive()
        return states(*args, **options)

    monkeypatch.setattr(enc.encoder, "states", slow)
    expected = FeatureFiles(files.folder, files.world).get(enc, enc.text_sequences(TEXTS), [0, 2])
    waiting.join(60)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[1], load_encoder(run, device="cpu").encode(TEXTS))
    assert sorted(path.name for path in files.folder.glob("*/*")) == ["layer_00.npy", "layer_02.npy"]


def test_a_full_disk_is_one_message(enc: TextEncoder, files: FeatureFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"layer_00.partial: no room for .* GB of features: No space left on device"):
        files.get(enc, enc.text_sequences(TEXTS), [0])
    assert not list(files.folder.glob("*/*"))


def test_truncation_is_counted_with_and_without_a_pass(run: Path, files: FeatureFiles) -> None:
    for _ in range(2):
        short = load_encoder(run, max_length=12, device="cpu")
        files.get(short, short.text_sequences(TEXTS), [0])
        assert short.truncated == sum(len(ids) == 12 for ids in short.text_sequences(TEXTS).ids) > 0


RANK = """
import json, sys
import numpy as np
from lingua.distributed import start
from lingua.evaluation.feature_files import FeatureFiles
from lingua.features import load_encoder
run, folder, texts = sys.argv[1:4]
world = start(60)
encoder = load_encoder(run, device="cpu")
files = FeatureFiles(__import__("pathlib").Path(folder), world)
found = files.get(encoder, encoder.text_sequences(json.loads(texts)), [0, 1, 2])
again = files.get(encoder, encoder.text_sequences(json.loads(texts)), [0, 1, 2])
assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
print(json.dumps([world.rank, world.size, encoder.tokens]), flush=True)
"""


def test_two_processes_share_the_pass(run: Path, enc: TextEncoder, files: FeatureFiles, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    words += [sys.executable, "-c", RANK, str(run), str(tmp_path / "shared"), json.dumps(TEXTS)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    # Both write to one pipe, where the ends of their lines may come later than the lines.
    told = sorted(json.loads(found) for found in re.findall(r"\[\d+, \d+, \d+\]", done.stdout))
    assert [(rank, size) for rank, size, _ in told] == [(0, 2), (1, 2)], done.stderr
    tokens = sum(map(len, enc.text_sequences(TEXTS).ids))
    assert [tokens for *_, tokens in told] != [tokens, tokens]
    assert sum(count for *_, count in told) == tokens  # each text by one of them, and once
    paths = sorted((tmp_path / "shared").glob("*/*.npy"))
    expected = enc.encode(TEXTS, layers=[0, 1, 2])
    np.testing.assert_allclose([np.load(path) for path in paths], expected, atol=1e-5)
