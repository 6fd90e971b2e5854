import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lingua.manifest import load_manifest
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import TokenizerArgs
from tests.corpora import write_parquet, write_zstd
from tests.hub_server import COMMIT, HubServer
from tests.real_text import real_lines
from tests.support import ROOT, environment

FINEWEB = "HuggingFaceFW/fineweb-edu"


def run(script, *words, **variables):
    variables = environment() | {"HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    command = [sys.executable, f"setup/{script}.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Repositories as the hub lays them out, little in them."""
    root = tmp_path_factory.mktemp("hub")
    lines = real_lines(400)
    fineweb = root / FINEWEB
    for folder in ("sample/10BT", "data/CC-MAIN-2024-10"):
        (fineweb / folder).mkdir(parents=True)
        for i in range(4):
            write_parquet(fineweb / folder / f"{i:03d}_00000.parquet", lines[i * 50 : i * 50 + 50])
    (fineweb / "README.md").write_text("a dataset")
    shards = root / "mlfoundations/dclm-baseline-1.0/global-shard_01_of_10/local-shard_0_of_10"
    shards.mkdir(parents=True)
    for i in range(2):
        write_zstd(shards / f"shard_{i:08d}_processed.jsonl.zst", lines[200 + i * 50 : 250 + i * 50])
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "[MASK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[UNK]", "[MASK]"])
    (root / "someone/words").mkdir(parents=True)
    library.save(str(root / "someone/words/tokenizer.json"))
    (root / "someone/words/special_tokens_map.json").write_text('{"mask_token": "[MASK]"}')
    return root


def test_fetches_goes_on_and_prepares(hub, tmp_path):
    words = ("fineweb_edu_10bt", f"out={tmp_path}/shards", "tokenizer.name=bytes", "valid_fraction=0.1", "fraction=0.5")
    with HubServer(hub, drops=1) as server:
        done = run("download_prepare_hf_data", *words, HF_ENDPOINT=server.url, HF_HOME=f"{tmp_path}/home")
        assert done.returncode == 0, done.stderr
        assert len({file for file, _ in server.asked}) == 2
        assert len(server.asked) == 3  # one of them twice, because the connection was dropped
        half = load_manifest(tmp_path / "shards/fineweb_edu_10bt/train")
        assert [Path(file["path"]).parts[-3:-1] for file in half.inputs] == [("sample", "10BT")] * 2
        before = len(server.asked)
        done = run("download_prepare_hf_data", *words, HF_ENDPOINT=server.url, HF_HOME=f"{tmp_path}/home")
        assert "already prepared, nothing to do" in done.stdout
        assert len(server.asked) == before
        whole = (*words[:-1], f"out={tmp_path}/whole")
        done = run("download_prepare_hf_data", *whole, HF_ENDPOINT=server.url, HF_HOME=f"{tmp_path}/home")
        assert done.returncode == 0, done.stderr
        assert len({file for file, _ in server.asked[before:]}) == 2  # the other half
    expected = shuffle(
        "x",
        ReaderArgs(path=f"{hub}/{FINEWEB}/sample/10BT"),
        ShuffleArgs(TokenizerArgs("bytes"), valid_fraction=0.1),
        tmp_path / "expected",
    )
    found = load_manifest(tmp_path / "whole/fineweb_edu_10bt/train")
    assert found.shards == expected["train"].shards
    smaller, larger = ({Path(file["path"]).name for file in m.inputs} for m in (half, found))
    assert smaller < larger


def test_a_large_file_is_read_on_from_where_it_broke(tmp_path):
    (tmp_path / "hub/someone/large").mkdir(parents=True)
    data = os.urandom(1 << 20) * 40
    (tmp_path / "hub/someone/large/a.bin").write_bytes(data)
    code = "from pathlib import Path; from lingua.download import *;"
    code += f"fetch('someone/large', 'dataset', '{COMMIT}', 'a.bin', Path('{tmp_path}/out'))"
    with HubServer(tmp_path / "hub", drops=2) as server:
        variables = environment() | {"HF_ENDPOINT": server.url, "HF_HOME": f"{tmp_path}/home"}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, check=True, capture_output=True)
    assert (tmp_path / "out/a.bin").read_bytes() == data
    assert [first > 0 for _, first in server.asked] == [False, True, True]


def test_a_download_goes_on_with_the_commit_it_began_with(tmp_path):
    """Although the repository has changed since."""
    repo = tmp_path / "hub/someone/moves"
    repo.mkdir(parents=True)
    for i in range(3):
        write_parquet(repo / f"{i}.parquet", [f"text {i}"] * 9)
    words = ("mine", "repo=someone/moves", "files=*.parquet", "tokenizer.name=bytes", "valid_fraction=0")
    with HubServer(tmp_path / "hub") as server:
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": f"{tmp_path}/home"}
        done = run("download_prepare_hf_data", *words, f"out={tmp_path}/a", "fraction=0.3", **variables)
        assert done.returncode == 0, done.stderr
        server.commit = "f" * 40
        write_parquet(repo / "3.parquet", ["new"] * 9)
        done = run("download_prepare_hf_data", *words, f"out={tmp_path}/b", **variables)
        assert done.returncode == 0, done.stderr
        assert server.revisions == {COMMIT}
        assert len({file for file, _ in server.asked}) == 3
    assert load_manifest(tmp_path / "b/mine/train").documents == 27


@pytest.mark.parametrize(("name", "files"), [("fineweb_edu", 4), ("dclm_baseline_1.0", 2)])
def test_a_local_folder_in_place_of_the_hub(hub, tmp_path, name, files):
    repo = hub / ("mlfoundations/dclm-baseline-1.0" if "dclm" in name else FINEWEB)
    done = run(
        "download_prepare_hf_data", name, f"repo={repo}", f"out={tmp_path}", "tokenizer.name=bytes", "valid_fraction=0"
    )
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(tmp_path / name / "train")
    assert len(manifest.inputs) == files
    assert manifest.documents == files * 50


def test_offline_and_unreachable(hub, tmp_path):
    home = f"{tmp_path}/home"
    words = ("fineweb_edu", f"out={tmp_path}/x", "tokenizer.name=bytes")
    done = run("download_prepare_hf_data", *words, HF_HUB_OFFLINE="1", HF_HOME=home)
    assert done.returncode == 2
    assert f"error: {FINEWEB}: the hub does not answer for it" in done.stderr
    assert "HF_HUB_OFFLINE is set: unset it, or copy the files" in done.stderr
    done = run("download_tokenizer", "repo=a/b", f"out={tmp_path}/t", HF_HUB_OFFLINE="1", HF_HOME=home)
    assert "HF_HUB_OFFLINE is set" in done.stderr
    with HubServer(hub) as server:
        done = run("download_tokenizer", "repo=no/such", f"out={tmp_path}/t", HF_ENDPOINT=server.url, HF_HOME=home)
        assert done.returncode == 2
        assert "error: no/such: the hub does not answer for it" in done.stderr
        assert not (tmp_path / "t").exists()


def test_bad_words(tmp_path):
    for words, message in (
        (("c4", f"out={tmp_path}"), "name=c4: known: fineweb_edu, fineweb_edu_10bt, dclm_baseline_1.0; for another"),
        (("fineweb_edu", f"out={tmp_path}", "fraction=0"), "fraction=0.0: expected above 0"),
        (("mine", f"out={tmp_path}", f"repo={tmp_path}", "files=data/*.parquet"), "none of its 0 files matches"),
    ):
        done = run("download_prepare_hf_data", *words)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_tokenizer_is_fetched_and_tried(hub, tmp_path):
    variables = {"HF_HOME": f"{tmp_path}/home"}
    with HubServer(hub) as server:
        words = ("repo=someone/words", f"out={tmp_path}/words")
        done = run("download_tokenizer", *words, HF_ENDPOINT=server.url, **variables)
        assert done.returncode == 0, done.stderr
        assert "someone/words at 0123456789ab: 6 ids, <s> <pad> </s> appended" in done.stdout
        assert f"tokenizer.name=hf tokenizer.path={tmp_path}/words" in done.stdout
        assert (tmp_path / "words/special_tokens_map.json").is_file()
        done = run("download_tokenizer", *words, "file=spm.model", HF_ENDPOINT=server.url, **variables)
        assert "has no spm.model; it has special_tokens_map.json, tokenizer.json: name one with file=" in done.stderr
        done = run("download_tokenizer", "repo=someone/other", words[1], HF_ENDPOINT=server.url, **variables)
        assert "holds files of {'repo': 'someone/words'" in done.stderr


FAKE_UV = """#!/usr/bin/env bash
echo "$@" >>"$UV_LOG"
if [ "$1" = venv ]; then
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho %s\\n' "$FAKE_TORCH" >.venv/bin/python
    chmod +x .venv/bin/python
fi
"""


@pytest.mark.parametrize("want", ["", "cpu", "cuda"])
def test_create_env_with_uv(tmp_path, want):
    """uv itself is not run: a stand-in writes down what it is asked for."""
    (tmp_path / "setup").mkdir()
    for name in ("create_env.sh", "env.sh"):
        shutil.copy(ROOT / "setup" / name, tmp_path / "setup")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(FAKE_UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "UV_LOG": f"{tmp_path}/log",
        "FAKE_TORCH": "cpu",
    }
    command = ["bash", str(tmp_path / "setup" / "create_env.sh"), *([want] if want else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    asked = (tmp_path / "log").read_text().splitlines()
    backend = "cpu" if want == "cpu" else "auto"
    assert asked[0].startswith("venv --python 3.11")
    assert asked[1].endswith(f".venv/bin/python --torch-backend={backend} -r requirements-dev.txt")
    if want == "cuda":
        assert done.returncode == 2
        assert "the PyTorch that was installed has no CUDA" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "ready: source .venv/bin/activate" in done.stdout


def test_create_env_refuses_what_it_does_not_know():
    done = subprocess.run(["bash", "setup/create_env.sh", "tpu"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: unknown argument 'tpu': give cpu, cuda or nothing\n")
