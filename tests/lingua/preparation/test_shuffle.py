import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.files import list_files
from lingua.hashing import counter_hash, text_hash
from lingua.manifest import load_manifest, token_dtype, verify
from lingua.preparation import shuffle as shuffle_module
from lingua.preparation import stages
from lingua.preparation.estimate import Estimate, bucket_count
from lingua.preparation.readers import ReaderArgs, blocks
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.preparation.tokenizing import tokenize_all
from lingua.tokenizer import RobertaTokenizer, TokenizerArgs, TrainArgs, build_tokenizer, train
from tests.real_text import ODD_TEXTS, real_lines

ROOT = Path(__file__).parents[3]
PREPARE = [sys.executable, "setup/prepare_data.py"]


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three files, about 3 MB, so several blocks."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = real_lines(6000) + ODD_TEXTS
    write_jsonl(folder / "a.jsonl", texts[:1000])
    write_jsonl(folder / "b.jsonl", [" ".join(texts[i : i + 400]) for i in range(0, 6000, 50)])
    write_jsonl(folder / "c.jsonl", texts[1000:])
    return folder


def prepare(corpus, out, **fields):
    return shuffle("web", ReaderArgs(path=f"{corpus}/*.jsonl"), ShuffleArgs(**fields), out)


def contents(folder):
    """Checksum of every file below ``folder``."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stored_documents(manifest):
    documents = []
    for i in range(len(manifest.shards)):
        documents += np.split(np.array(manifest.open_tokens(i)), manifest.open_docs(i)[:-1].astype(int))
    return [tuple(document.tolist()) for document in documents]


def reference(corpus, seed, valid_fraction):
    """The documents of each split in order, by plain loops."""
    tokenizer = build_tokenizer(TokenizerArgs())
    splits = {"train": [], "valid": []}
    for file, path in enumerate(sorted(corpus.glob("*.jsonl"))):
        for line, row in enumerate(path.read_text().splitlines(), 1):
            text = json.loads(row)["text"]
            if not text.strip():
                continue
            split = "valid" if text_hash(text) % 2**64 < int(valid_fraction * 2**64) else "train"
            key = counter_hash(seed, file, line) % 2**64
            ids = (0, *tokenizer.encode_batch([text])[0].tolist(), 2)
            splits[split].append(((key, file, line), ids))
    return {split: [ids for _, ids in sorted(documents)] for split, documents in splits.items()}


def test_shards_equal_a_plain_loop(corpus, tmp_path):
    manifests = prepare(corpus, tmp_path, seed=7, valid_fraction=0.1, shard_tokens=50_000)
    expected = reference(corpus, 7, 0.1)
    for split, manifest in manifests.items():
        assert stored_documents(manifest) == expected[split]
        assert manifest.documents == len(expected[split]) > 100
        assert manifest.tokens == sum(map(len, expected[split]))
        assert manifest == verify(tmp_path / "web" / split) == load_manifest(tmp_path / "web" / split)
    texts = [json.loads(row)["text"] for path in corpus.glob("*.jsonl") for row in path.read_text().splitlines()]
    assert sum(m.bytes_of_text for m in manifests.values()) == sum(len(t.encode()) for t in texts if t.strip())
    assert manifests["train"].empty_documents == 3
    assert manifests["train"].dtype == "<u2"
    assert not (tmp_path / "web.partial").exists()


def test_shards_hold_whole_documents_up_to_their_size(corpus, tmp_path):
    manifest = prepare(corpus, tmp_path, valid_fraction=0, shard_tokens=5_000)["train"]
    sizes = [shard.tokens for shard in manifest.shards]
    assert [shard.name for shard in manifest.shards[:2]] == ["shard_00000", "shard_00001"]
    for i, shard in enumerate(manifest.shards):
        assert shard.tokens <= 5_000 or shard.documents == 1
        tokens, ends = manifest.open_tokens(i), manifest.open_docs(i).astype(int)
        assert (tokens[ends - 1] == 2).all()
        assert (tokens[np.concatenate([[0], ends[:-1]])] == 0).all()
        if i + 1 < len(sizes):  # the next document would not have fitted
            assert shard.tokens + int(manifest.open_docs(i + 1)[0]) > 5_000
    assert max(sizes) > 5_000, "the corpus has documents longer than a shard"
    assert not (tmp_path / "web" / "valid").exists()


def test_same_bytes_for_any_workers_and_memory(corpus, tmp_path):
    prepare(corpus, tmp_path / "one", valid_fraction=0.05)
    prepare(corpus, tmp_path / "two", valid_fraction=0.05, workers=2, memory_gb=1e-4)
    assert bucket_count(Estimate(500_000, 6000), 2, ShuffleArgs(memory_gb=1e-4)) > 50
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_another_seed_is_another_order_of_the_same_documents(corpus, tmp_path):
    first = prepare(corpus, tmp_path / "0", seed=0, valid_fraction=0.1)
    second = prepare(corpus, tmp_path / "1", seed=1, valid_fraction=0.1)
    for split in ("train", "valid"):
        one, two = stored_documents(first[split]), stored_documents(second[split])
        assert one != two
        assert sorted(one) == sorted(two)


def test_identical_documents_fall_on_one_side(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"document {i % 500}" for i in range(2000)])
    manifests = prepare(tmp_path, tmp_path / "out", valid_fraction=0.2)
    train_set, valid_set = (set(stored_documents(manifests[split])) for split in ("train", "valid"))
    assert not train_set & valid_set
    assert len(train_set | valid_set) == 500
    assert 70 <= len(valid_set) <= 130  # 100 expected, standard deviation 9


def test_large_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    class LargeTokenizer(RobertaTokenizer):
        vocab_size = 70_000

        def encode_batch(self, texts):
            return [ids + 19_000 for ids in super().encode_batch(texts)]

    monkeypatch.setattr(shuffle_module, "build_tokenizer", lambda args: LargeTokenizer())
    write_jsonl(tmp_path / "a.jsonl", ["rare \x00\x01 bytes"] * 3)
    manifest = prepare(tmp_path, tmp_path / "out", valid_fraction=0, languages=0)["train"]
    assert manifest.dtype == "<u4"
    assert 50_108 + 19_000 in manifest.open_tokens(0)
    verify(manifest.folder)
    assert [token_dtype(size) for size in (1 << 16, (1 << 16) + 1)] == ["<u2", "<u4"]


def test_skipped_lines_are_counted_and_listed(tmp_path, monkeypatch):
    rows = [json.dumps({"text": f"good {i}"}) if i % 3 else "{bad" for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = ReaderArgs(path=f"{tmp_path}/a.jsonl", on_error="skip")
    monkeypatch.setattr(stages, "MAX_LISTED", 4)
    manifest = shuffle("x", source, ShuffleArgs(valid_fraction=0), tmp_path)["train"]
    assert (manifest.documents, manifest.skipped_count) == (20, 10)
    assert [bad["line"] for bad in manifest.skipped] == [1, 4, 7, 10]
    assert manifest.skipped[0]["path"] == f"{tmp_path}/a.jsonl"
    assert "not valid JSON" in manifest.skipped[0]["reason"]
    source.on_error = "fail"
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl, line 1: not valid JSON"):
            shuffle("y", source, ShuffleArgs(workers=workers), tmp_path)
    assert not (tmp_path / "y").exists()


def test_finished_work_is_recognised(corpus, tmp_path, capsys):
    prepare(corpus, tmp_path / "out", valid_fraction=0.05)
    before = contents(tmp_path / "out")
    times = [path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")]
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    again = prepare(moved, tmp_path / "out", valid_fraction=0.05, workers=2, memory_gb=9)
    said = capsys.readouterr().out
    assert "already prepared, nothing to do: same settings, tokenizer, and names and sizes of inputs" in said
    assert "another time" not in said
    os.utime(moved / "b.jsonl", (1, 1))
    prepare(moved, tmp_path / "out", valid_fraction=0.05)
    said = capsys.readouterr().out
    assert re.search(r"note: 1 of 3 inputs have the same size but another time .* such as .*moved/b\.jsonl; if", said)
    assert again["valid"] == load_manifest(tmp_path / "out" / "web" / "valid")
    for fields, message in (
        ({"seed": 1}, "seed was 0, now 1"),
        ({"valid_fraction": 0.1}, r"settings\.valid_fraction was 0\.05, now 0\.1"),
        ({"valid_fraction": 0.05, "shard_tokens": 9}, r"settings\.shard_tokens was 100000000, now 9"),
    ):
        with pytest.raises(UserError, match=f"already prepared otherwise: {message}; choose another out"):
            prepare(corpus, tmp_path / "out", **fields)
    with (moved / "c.jsonl").open("a") as stream:
        stream.write('{"text": "more"}\n')
    with pytest.raises(UserError, match=r"inputs\.2 c\.jsonl was \d+, now \d+"):
        prepare(moved, tmp_path / "out", valid_fraction=0.05)
    assert contents(tmp_path / "out") == before
    assert times == [path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")]


def test_a_run_that_died_before_it_had_a_plan_starts_again(corpus, tmp_path):
    (tmp_path / "web.partial" / "work").mkdir(parents=True)
    (tmp_path / "web.partial" / "work" / "plan.json.partial").write_bytes(b"half")
    prepare(corpus, tmp_path)
    prepare(corpus, tmp_path / "clean")
    assert contents(tmp_path / "web") == contents(tmp_path / "clean" / "web")
    assert not (tmp_path / "web.partial").exists()


def test_a_foreign_folder_is_left_alone(corpus, tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="web: exists, but was not written by this command"):
        prepare(corpus, tmp_path)
    assert (tmp_path / "web" / "thesis.txt").read_text() == "precious"


def test_nothing_to_train_on(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["", "  "])
    with pytest.raises(UserError, match=r"web: no document for the train split \(2 empty, 0 unreadable, in 1 files\)"):
        prepare(tmp_path, tmp_path / "out")
    write_jsonl(tmp_path / "a.jsonl", ["only one document"])
    with pytest.raises(UserError, match=r"no document for the valid split .*set valid_fraction higher, or 0"):
        prepare(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="no file matches"):
        prepare(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out" / "web").exists()
    for field, value in (("valid_fraction", 1.0), ("shard_tokens", 0), ("workers", 0), ("memory_gb", 0.0)):
        with pytest.raises(UserError, match=f"{field}={value}: expected"):
            ShuffleArgs(**{field: value})


def test_what_was_unreadable_and_what_is_empty_is_said(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3)
    (tmp_path / "b.jsonl").write_text("")
    reader = ReaderArgs(path=f"{tmp_path}/*.jsonl", on_error="skip")
    message = r"\(0 empty, 3 unreadable, in 2 files; the first: .*/a\.jsonl, line 1: no column 'text', found body"
    with pytest.raises(UserError, match=message):
        shuffle("x", reader, ShuffleArgs(), tmp_path / "out")
    assert f"x: note: 1 of 2 files have 0 bytes, such as {tmp_path}/b.jsonl" in capsys.readouterr().out
    (tmp_path / "b.arrow").write_text("")
    with pytest.raises(UserError, match=r"b\.arrow: cannot be read after line 0: the file has 0 bytes"):
        shuffle("x", ReaderArgs(path=f"{tmp_path}/b.arrow"), ShuffleArgs(), tmp_path / "out")


def damage(folder, change):
    copy = folder.with_name(f"damaged_{change.__name__}")
    shutil.copytree(folder, copy)
    change(copy)
    return copy


def test_damaged_folders_are_named(corpus, tmp_path):
    prepare(corpus, tmp_path, valid_fraction=0)
    good = tmp_path / "web" / "train"

    def cut_tokens(folder):
        os.truncate(folder / "shard_00000.tokens", 1000)

    def cut_docs(folder):
        os.truncate(folder / "shard_00000.docs", 8)

    def lose_shard(folder):
        (folder / "shard_00000.tokens").unlink()

    def lose_manifest(folder):
        (folder / "manifest.json").unlink()

    def half_manifest(folder):
        os.truncate(folder / "manifest.json", 300)

    def edit(folder, **values):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | values))

    def newer(folder):
        edit(folder, version=2)

    def emptied(folder):
        edit(folder, tokens=0)

    def other_dtype(folder):
        edit(folder, dtype="<u4")

    def strange_dtype(folder):
        edit(folder, dtype="<f4")

    size = (good / "shard_00000.tokens").stat().st_size
    for change, message in (
        (cut_tokens, rf"shard_00000\.tokens: truncated: found 1000 bytes, expected {size}; run setup/prepare_data"),
        (cut_docs, r"shard_00000\.docs: truncated: found 8 bytes"),
        (lose_shard, rf"shard_00000\.tokens: missing, expected {size} bytes"),
        (lose_manifest, r"no manifest\.json here, so this is not a finished folder"),
        (half_manifest, r"manifest\.json: not a readable manifest"),
        (newer, "format version 2, this code reads 1"),
        (emptied, "no tokens in this folder"),
        (other_dtype, rf"the manifest gives {size} bytes for content of {2 * size} bytes"),
        (strange_dtype, "dtype '<f4', expected <u2 or <u4"),
    ):
        with pytest.raises(UserError, match=message):
            load_manifest(damage(good, change))
    with pytest.raises(UserError, match=r"nowhere: no such folder; make it with setup/prepare_data\.py"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"did you mean .*web/train"):
        load_manifest(tmp_path / "web")

    def flip_token(folder):
        with (folder / "shard_00000.tokens").open("r+b") as stream:
            stream.write(b"\x09")

    flipped = damage(good, flip_token)
    load_manifest(flipped)  # sizes are right
    with pytest.raises(UserError, match=r"shard_00000\.tokens: corrupt: sha256 .* expected"):
        verify(flipped)


def test_shards_of_another_tokenizer_are_refused(corpus, tmp_path):
    manifest = prepare(corpus, tmp_path, valid_fraction=0)["train"]
    manifest.check_tokenizer(build_tokenizer(TokenizerArgs()))
    train(TrainArgs(input=f"{corpus}/a.jsonl", out=f"{tmp_path}/v.model", vocab_size=300, character_coverage=0.98))
    other = build_tokenizer(TokenizerArgs("sentencepiece", f"{tmp_path}/v.model"))
    with pytest.raises(UserError, match="another tokenizer: kind of the shards roberta, of the config sentencepiece"):
        manifest.check_tokenizer(other)


def test_a_dead_worker_is_an_error(corpus):
    reader = ReaderArgs(path=f"{corpus}/b.jsonl")
    (block,) = list(blocks(list_files(reader.path)[0], reader))[:1]

    def work():
        for i in range(40):
            if i == 8:  # the first results are back by now, so the workers run
                multiprocessing.active_children()[0].kill()
            yield (0, i), block

    args = ShuffleArgs(workers=2)
    with pytest.raises(UserError, match="a worker process died"):
        list(tokenize_all(work(), reader, args, build_tokenizer(args.tokenizer)))


def test_a_full_disk_is_one_message(corpus, tmp_path):
    """A limit on the size of files fails the write as a full disk does."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [*PREPARE, f"sources.web.path='{corpus}/*.jsonl'", f"out={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2
    assert "web.partial: cannot write:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "web").exists()


def test_the_command(corpus, tmp_path):
    (tmp_path / "poem.txt").write_text("Tyger tyger\nburning bright\n\nIn the forests\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"out: {tmp_path}/out\nvalid_fraction: 0\nsources:\n"
        f"  web: {{path: '{corpus}/*.jsonl'}}\n"
        f"  poems: {{path: {tmp_path}/poem.txt, document: paragraph}}\n"
    )
    command = [*PREPARE, f"config={config}", "workers=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_manifest(tmp_path / "out" / "poems" / "train").documents == 2
    assert "web: 3 empty documents left out" in done.stdout
    assert "tokens/s" in done.stderr
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.count("nothing to do") == 2
    for words, message in (
        ([f"out={tmp_path}/x"], "error: no source"),
        ([f"out={tmp_path}/x", "sources.a.pth=b"], "unknown key sources.a.pth: did you mean sources.a.path?"),
        ([f"out={tmp_path}/x", "sources.a.path=missing"], "error: no file matches missing"),
        ([f"out={tmp_path}/x", "sources.a/b.path=c"], "error: source 'a/b'"),
    ):
        done = subprocess.run([*PREPARE, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()
