"""What must be the same for a run to go on: folder, config, tokenizer, data, and the bytes of the checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.checkpoint import complete_checkpoints
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.metrics import read_metrics
from lingua.resume import lock
from lingua.tokenizer import TrainArgs, train
from tests.support import ROOT, environment, made_up_documents, prepare, run_app, run_command, tiny_words


def test_a_folder_is_one_process_at_a_time(corpus: Path, tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(UserError, match=r"another process \(pid \d+ on .*\) is training in this folder"):
        run_app("bert", tiny_words("bert", corpus, tmp_path, steps=1))
    held.close()
    run_app("bert", tiny_words("bert", corpus, tmp_path, steps=1))
    # and a lock is gone with its process, however that ends
    code = (
        "from lingua.resume import lock; from pathlib import Path;"
        f"f = lock(Path({str(tmp_path)!r})); print(1, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    with pytest.raises(UserError, match=f"pid {process.pid} on"):
        lock(tmp_path)
    process.kill()
    process.wait()
    lock(tmp_path).close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on a sentencepiece vocabulary, and another vocabulary and corpus to confuse it with."""
    folder = tmp_path_factory.mktemp("small")
    paths = {"run": folder / "run"}
    for name, seed in {"a": 0, "b": 1}.items():
        (folder / name).mkdir()
        text = folder / name / "text.txt"
        text.write_text("\n".join(made_up_documents(200, seed)))
        paths[f"model_{name}"] = folder / name / "m.model"
        kind = "unigram" if name == "a" else "bpe"
        train(TrainArgs(input=str(text), out=str(paths[f"model_{name}"]), vocab_size=80, kind=kind))
    from lingua.tokenizer import TokenizerArgs

    shutil.copy(paths["model_a"], folder / "used.model")
    tokenizer = TokenizerArgs(name="sentencepiece", path=str(folder / "used.model"))
    paths["data_a"] = prepare(folder / "a", made_up_documents(200, 0), tokenizer=tokenizer)
    paths["data_b"] = prepare(folder / "b", made_up_documents(200, 1), tokenizer=tokenizer)
    paths["used"] = folder / "used.model"
    run_app("bert", words(paths, steps=4))
    return paths


def words(paths: dict[str, Path], data: str = "data_a", **changes: object) -> list[str]:
    tokenizer = {"data__tokenizer__name": "sentencepiece", "data__tokenizer__path": paths["used"]}
    return tiny_words("bert", paths[data], paths["run"], **{"checkpoint__dump__every": 2, **tokenizer, **changes})


def test_another_vocabulary_under_the_same_path_is_refused(small: dict[str, Path]) -> None:
    before = load_encoder(small["run"]).encode(["the old captain sees the sea"])
    shutil.copy(small["model_b"], small["used"])
    try:
        with pytest.raises(UserError, match=r"trained with another tokenizer \(sentencepiece, 80 ids, sha256 \w{8}\)"):
            run_app("bert", words(small, steps=6, resume__allow="[steps]"))
        # The run folder holds its own copy, so the encoder goes on meaning what it meant.
        assert (load_encoder(small["run"]).encode(["the old captain sees the sea"]) == before).all()
    finally:
        shutil.copy(small["model_a"], small["used"])


def test_an_encoder_is_usable_without_the_rest_of_the_disk(small: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(small["run"], tmp_path / "elsewhere")
    hidden = small["used"].rename(small["used"].with_suffix(".hidden"))
    try:
        assert load_encoder(tmp_path / "elsewhere").encode(["some text"]).shape == (1, 32)
    finally:
        hidden.rename(small["used"])


def test_other_text_under_the_same_name_is_refused_unless_allowed(small: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="data, made_up: the files hold other text than when"):
        run_app("bert", words(small, "data_b", steps=6, resume__allow="[steps]"))
    run_app("bert", words(small, "data_b", steps=6, resume__allow="[steps,data]"))
    assert read_metrics(small["run"] / "metrics.jsonl")[-1]["step"] == 6


def test_an_unknown_key_in_allow_is_named(small: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"resume\.allow names stpes, which is no key of this config"):
        run_app("bert", words(small, resume__allow="[stpes]"))


@pytest.fixture
def copied(small: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The run again, to damage: checkpoints of steps 2, 4 and perhaps 6."""
    shutil.copytree(small["run"], tmp_path / "run")
    for folder in complete_checkpoints(tmp_path / "run" / "checkpoints")[2:]:
        shutil.rmtree(folder)
    return {**small, "run": tmp_path / "run"}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json", "config.yaml"])
def test_a_flipped_byte_anywhere_is_noticed_and_the_checkpoint_before_is_used(
    copied: dict[str, Path], file: str, capsys: pytest.CaptureFixture
) -> None:
    path = copied["run"] / "checkpoints/0000000004" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"0000000004 is damaged: {file} has changed"):
        load_encoder(copied["run"] / "checkpoints/0000000004")
    run_app("bert", words(copied, steps=4))
    out = capsys.readouterr().out
    assert f"0000000004 is not used: {file} has changed since it was written" in out
    assert "0000000002 at step 2" in out


@pytest.mark.parametrize("listing", ["[]", "{}", "not json", '{"state.json": 3}'])
def test_a_listing_that_is_none_makes_no_checkpoint(copied: dict[str, Path], listing: str) -> None:
    (copied["run"] / "checkpoints/0000000004/COMPLETE").write_text(listing)
    assert [folder.name[-1] for folder in complete_checkpoints(copied["run"] / "checkpoints")] == ["2"]


def test_a_checkpoint_of_another_format_is_named(copied: dict[str, Path]) -> None:
    import hashlib

    folder = copied["run"] / "checkpoints/0000000004"
    state = json.dumps(json.loads((folder / "state.json").read_text()) | {"version": 99}).encode()
    (folder / "state.json").write_bytes(state)
    listing = json.loads((folder / "COMPLETE").read_text())
    listing["state.json"] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    (folder / "COMPLETE").write_text(json.dumps(listing))
    with pytest.raises(UserError, match=r"state\.json: format 99, this code reads 1"):
        run_app("bert", words(copied, steps=4))


def test_a_config_of_the_run_that_was_cut_off_does_not_matter(copied: dict[str, Path]) -> None:
    (copied["run"] / "config.yaml").write_text("")
    run_app("bert", words(copied, steps=4))
    with pytest.raises(UserError, match=r"seed=0, this command says seed=1"):
        run_app("bert", words(copied, steps=4, seed=1))


def test_fewer_steps_than_were_done_are_refused(copied: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="has 4 steps done already, this config asks for 3"):
        run_app("bert", words(copied, steps=3, resume__allow="[steps]"))


def test_ctrl_c_while_starting_prints_no_traceback(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, threading; threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start();"
        "sys.argv[0] = '-m'; import apps, torch, time; time.sleep(20)"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == -2
    assert done.stderr == ""


def test_a_run_keeps_a_copy_of_any_kind_of_tokenizer(tmp_path: Path) -> None:
    """A Hugging Face folder: what its tokenizer_config.json says of special tokens comes along."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from lingua.tokenizer import TokenizerArgs, build_tokenizer, prefer_copy, save_copy

    folder = tmp_path / "hub"
    folder.mkdir()
    vocabulary = {name: i for i, name in enumerate(["[BEGIN]", "<pad>", "</s>", "<unk>", "<mask>", "some", "text"])}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[BEGIN]"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "[BEGIN]"}')
    args = TokenizerArgs(name="hf", path=str(folder))
    original = build_tokenizer(args)
    save_copy(original, tmp_path / "copy")
    shutil.rmtree(folder)
    copy = build_tokenizer(prefer_copy(args, tmp_path / "copy"))
    assert copy.identity() == original.identity()
    assert copy.bos_id == 0
    assert prefer_copy(TokenizerArgs(), tmp_path / "nowhere") == TokenizerArgs()
