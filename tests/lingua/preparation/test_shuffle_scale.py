"""What a shuffle must keep to when the text is large: interruptions, several jobs, memory, disk, duplicates."""

import collections
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lingua.errors import UserError
from lingua.hashing import counter_hash, text_hash
from lingua.manifest import verify
from lingua.preparation import shuffle as shuffle_module
from lingua.preparation import sorting, stages, tokenizing
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shards import cut_into_shards
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import TokenizerArgs
from tests.corpora import write_jsonl
from tests.lingua.preparation.test_shuffle import PREPARE, ROOT, contents, stored_documents
from tests.real_text import real_lines

BYTES = TokenizerArgs("bytes")
BOS, EOS = 256, 258


def prepare(pattern, out, **fields):
    fields = {"tokenizer": BYTES, "valid_fraction": 0, **fields}
    return shuffle("web", ReaderArgs(path=str(pattern), on_error="skip"), ShuffleArgs(**fields), out)


def texts_of(manifest):
    return [bytes(document[1:-1]).decode() for document in stored_documents(manifest)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Five files of about 1.5 MB, so several blocks, with some unreadable and some empty lines."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = real_lines(4000)
    for i in range(5):
        write_jsonl(folder / f"{i}.jsonl", [f"{i} {j} " + line * 5 for j, line in enumerate(lines)] + [" "] * i)
        with (folder / f"{i}.jsonl").open("a") as file:
            file.write("{bad\n" * i)
    return folder


@pytest.fixture(scope="module")
def clean(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("clean")
    prepare(f"{corpus}/*.jsonl", out, valid_fraction=0.1, shard_tokens=300_000)
    return contents(out)


def test_several_jobs_share_a_folder(corpus, clean, tmp_path):
    def job(stage, i, n, **fields):
        return prepare(
            f"{corpus}/*.jsonl",
            tmp_path,
            valid_fraction=0.1,
            shard_tokens=300_000,
            memory_gb=0.002,
            stage=stage,
            part=f"{i}/{n}",
            **fields,
        )

    with pytest.raises(UserError, match=r"web\.partial: no work to go on with; run stage=tokenize first"):
        job("sort", 0, 3)
    for i in (2, 0):
        assert job("tokenize", i, 3) == {}
    with pytest.raises(UserError, match="stage tokenize is not done by job 1 of 3"):
        job("sort", 0, 3)
    with pytest.raises(UserError, match="an interrupted run was another one: jobs was 3, now 4"):
        job("tokenize", 1, 4)
    job("tokenize", 1, 3)
    job("sort", 0, 2)
    with pytest.raises(UserError, match=r"stage sort is not done: \d+ of \d+ buckets are missing"):
        job("pack", 0, 2)
    job("sort", 1, 2, workers=2)
    assert job("pack", 1, 2) == {}
    assert not (tmp_path / "web").exists()
    manifests = job("pack", 0, 2)
    assert set(manifests) == {"train", "valid"}
    assert contents(tmp_path) == clean
    assert not (tmp_path / "web.partial").exists()


def test_bad_jobs():
    for part in ("2/2", "1", "a/b", "-1/2"):
        with pytest.raises(UserError, match=f"part={part}: expected i/n"):
            ShuffleArgs(part=part)
    with pytest.raises(UserError, match="part=1/4: several jobs take one stage at a time"):
        ShuffleArgs(part="1/4")
    for field, value in (
        ("stage", "merge"),
        ("duplicates", "all"),
        ("max_document_tokens", 2),
        ("long_documents", "x"),
    ):
        with pytest.raises(UserError, match=f"{field}={value}: expected"):
            ShuffleArgs(**{field: value})


class KilledError(Exception):
    pass


def dies_after(monkeypatch, module, name, calls):
    """Let ``module.name`` raise at its ``calls``-th call; returns the list of its calls."""
    real, seen = getattr(module, name), []

    def function(*args, **fields):
        seen.append(args)
        if len(seen) == calls:
            raise KilledError
        return real(*args, **fields)

    monkeypatch.setattr(module, name, function)
    return seen


def test_interrupted_work_goes_on(corpus, clean, tmp_path, monkeypatch, capsys):
    fields = {"valid_fraction": 0.1, "shard_tokens": 300_000, "memory_gb": 0.01}

    def interrupted(module, name, calls):
        with monkeypatch.context() as patch:
            dies_after(patch, module, name, calls)
            with pytest.raises(KilledError):
                prepare(f"{corpus}/*.jsonl", tmp_path, **fields)

    with monkeypatch.context() as patch:
        blocks = dies_after(patch, tokenizing, "tokenize", -1)
        prepare(f"{corpus}/*.jsonl", tmp_path / "count", **fields)
        n_blocks = len(blocks)
    assert n_blocks > 8
    interrupted(tokenizing, "tokenize", n_blocks // 2)
    interrupted(tokenizing, "tokenize", 3)
    # what was written after the last note of progress is cut off again
    done = json.loads((tmp_path / "web.partial/work/part_00000/progress.json").read_text())
    bucket = next((tmp_path / "web.partial/work/part_00000").glob("*.tokens"))
    with bucket.open("ab") as file:
        file.write(b"written by a killed run")
    with monkeypatch.context() as patch:
        blocks = dies_after(patch, tokenizing, "tokenize", -1)
        dies_after(patch, sorting, "_sort", 2)
        with pytest.raises(KilledError):
            prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    assert done["counts"]["read"] > 0
    assert f"going on after {done['counts']['read']:,} documents" in capsys.readouterr().out
    assert 0 < len(blocks) < n_blocks - 3  # finished blocks are not tokenized again
    interrupted(sorting, "ShardFile", 3)
    with monkeypatch.context() as patch:
        sorts, shards = dies_after(patch, sorting, "_sort", -1), dies_after(patch, sorting, "ShardFile", -1)
        tokenized = dies_after(patch, tokenizing, "tokenize", -1)
        prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    assert (len(tokenized), len(sorts)) == (0, 0)
    assert len(shards) == sum(name.endswith(".docs") for name in clean) - 2
    assert contents(tmp_path / "web") == {name[4:]: value for name, value in clean.items()}


def test_what_lies_before_an_error_is_kept(corpus, clean, tmp_path, monkeypatch, capsys):
    """An unreadable line ends the work; with it mended or skipped, all blocks before it are not tokenized again."""
    fields = {"tokenizer": BYTES, "valid_fraction": 0.1, "shard_tokens": 300_000}
    reader = ReaderArgs(path=f"{corpus}/*.jsonl")  # the first unreadable line is the last of the second file
    with pytest.raises(UserError, match=r"1\.jsonl, line 4002: not valid JSON"):
        shuffle("web", reader, ShuffleArgs(**fields), tmp_path)
    blocks = dies_after(monkeypatch, tokenizing, "tokenize", -1)
    prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    assert re.search(r"going on after [4-7],\d{3} documents", capsys.readouterr().out)
    assert len(blocks) < 3 * 3
    assert contents(tmp_path) == clean


def test_progress_is_written_after_some_time(corpus, clean, tmp_path, monkeypatch):
    """However much memory there is for what waits."""
    for seconds, kept in ((1e9, False), (-1.0, True)):
        with monkeypatch.context() as patch:
            patch.setattr(tokenizing, "SAVE_SECONDS", seconds)
            dies_after(patch, tokenizing, "tokenize", 6)
            with pytest.raises(KilledError):
                prepare(f"{corpus}/*.jsonl", tmp_path / str(kept), valid_fraction=0.1, shard_tokens=300_000)
        assert (tmp_path / str(kept) / "web.partial/work/part_00000/progress.json").exists() == kept
    prepare(f"{corpus}/*.jsonl", tmp_path / "True", valid_fraction=0.1, shard_tokens=300_000)
    assert contents(tmp_path / "True") == clean


def test_an_interrupted_run_is_not_mixed_with_another(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "in")
    pattern, out = f"{tmp_path}/in/*.jsonl", tmp_path / "out"
    with monkeypatch.context() as patch:
        dies_after(patch, sorting, "_sort", 1)
        with pytest.raises(KilledError):
            prepare(pattern, out)
    for fields, message in (
        ({"seed": 1}, "seed was 0, now 1"),
        ({"duplicates": "drop"}, r"settings\.duplicates was keep, now drop"),
    ):
        with pytest.raises(UserError, match=f"an interrupted run was another one: {message}; repeat that one, or del"):
            prepare(pattern, out, **fields)
    os.utime(tmp_path / "in" / "3.jsonl", (1, 1))
    with pytest.raises(UserError, match=r"inputs\.3 .*3\.jsonl was .*, now .*mtime=1\.0"):
        prepare(pattern, out)


def test_two_processes_do_not_do_the_same_work(corpus, tmp_path, monkeypatch):
    seen = []

    def meanwhile(*args):
        with pytest.raises(UserError, match="another process is at work on part=0/1 here"):
            prepare(f"{corpus}/*.jsonl", tmp_path)
        seen.append(args)

    monkeypatch.setattr(stages, "fill_buckets", meanwhile)
    with pytest.raises(UserError, match="stage tokenize is not done by job 0 of 1"):
        prepare(f"{corpus}/*.jsonl", tmp_path)
    assert len(seen) == 1


def test_two_that_start_at_once(corpus, clean, tmp_path, monkeypatch, capsys):
    """Another process does all the work while this one still looks at the text: nothing is done twice or left over."""
    fields = {"valid_fraction": 0.1, "shard_tokens": 300_000}
    real, seen = shuffle_module.estimate, []

    def while_another_works(*args):
        seen.append(args)
        if len(seen) == 1:
            prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
        return real(*args)

    monkeypatch.setattr(shuffle_module, "estimate", while_another_works)
    manifests = prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    assert len(seen) == 2
    assert set(manifests) == {"train", "valid"}
    assert "web: already prepared, nothing to do" in capsys.readouterr().out
    assert contents(tmp_path) == clean


def at_once(commands):
    """(exit status, standard output and error) of commands that run side by side."""
    pipe = subprocess.PIPE
    running = [subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) for words in commands]
    said = ["".join(process.communicate()) for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


@pytest.mark.slow
def test_processes_that_really_start_at_once(corpus, clean, tmp_path):
    words = [*PREPARE, f"sources.web.path={corpus}/*.jsonl", "sources.web.on_error=skip", "tokenizer.name=bytes"]
    words += ["valid_fraction=0.1", "shard_tokens=300000"]
    for number in range(3):
        results = at_once([[*words, f"out={tmp_path}/{number}"]] * 2)
        assert any(status == 0 for status, _ in results)
        for status, text in results:
            assert status == 0 or (status == 2 and "another process is at work on part=0/1 here" in text), text
        assert contents(tmp_path / str(number)) == clean
    for stage in ("tokenize", "sort", "pack"):
        jobs = [[*words, f"out={tmp_path}/jobs", f"stage={stage}", f"part={i}/2"] for i in range(2)]
        for status, text in at_once(jobs):
            assert status == 0, text
    assert contents(tmp_path / "jobs") == clean


def test_a_bucket_file_lost_in_a_crash_is_made_again(corpus, clean, tmp_path, monkeypatch, capsys):
    fields = {"valid_fraction": 0.1, "shard_tokens": 300_000, "memory_gb": 0.01}
    with monkeypatch.context() as patch:
        dies_after(patch, tokenizing, "tokenize", 8)
        with pytest.raises(KilledError):
            prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    bucket = next((tmp_path / "web.partial/work/part_00000").glob("*.records"))
    os.truncate(bucket, bucket.stat().st_size - 1)
    prepare(f"{corpus}/*.jsonl", tmp_path, **fields)
    assert "files of an interrupted run are incomplete, tokenizing again" in capsys.readouterr().out
    assert contents(tmp_path) == clean


def test_no_document_is_lost(corpus, clean, tmp_path):
    manifests = prepare(
        f"{corpus}/*.jsonl", tmp_path, valid_fraction=0.1, max_document_tokens=200, long_documents="split"
    )
    counts = manifests["train"].counts
    read = sum(len(path.read_text().splitlines()) for path in corpus.glob("*.jsonl"))
    assert counts["read"] == read
    assert (counts["empty"], counts["unreadable"]) == (10, 10)
    assert counts["stored"] == sum(manifest.documents for manifest in manifests.values())
    assert read + counts["pieces"] == counts["stored"] + 20
    skipped = [json.loads(line) for line in (tmp_path / "web" / "skipped.jsonl").read_text().splitlines()]
    assert [(Path(bad["path"]).name, bad["line"]) for bad in skipped[:3]] == [
        ("1.jsonl", 4002), ("2.jsonl", 4003), ("2.jsonl", 4004)
    ]  # fmt: skip
    assert len(skipped) == 10


def test_documents_that_do_not_add_up_are_an_error(corpus, tmp_path):
    """As if one had been lost between the stages."""
    for stage in ("tokenize", "sort"):
        prepare(f"{corpus}/0.jsonl", tmp_path, stage=stage)
    state = tmp_path / "web.partial/work/part_00000/progress.json"
    values = json.loads(state.read_text())
    values["counts"]["read"] += 1
    state.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"work: documents are missing \(.*'read': 4001, .*'stored': 4000\}\): delete"):
        prepare(f"{corpus}/0.jsonl", tmp_path, stage="pack")
    assert not (tmp_path / "web").exists()


def test_duplicates_are_dropped_wherever_they_are(tmp_path):
    """Whatever the files, memory and order, one copy of each text stays; the order is that of a hash of the text."""
    texts = [f"text {i % 700}" for i in range(3000)] + ["solo"]
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i::3])
    expected = sorted(set(texts), key=lambda text: counter_hash(5, text_hash(text)) % 2**64)
    other = tmp_path / "other"
    other.mkdir()
    write_jsonl(other / "a.jsonl", texts[::-1])
    results = []
    for number, (pattern, fields) in enumerate(
        [(f"{tmp_path}/*.jsonl", {}), (f"{tmp_path}/*.jsonl", {"memory_gb": 2e-5}), (f"{other}/*.jsonl", {})]
    ):
        manifest = prepare(pattern, tmp_path / f"out{number}", seed=5, duplicates="drop", **fields)["train"]
        assert texts_of(manifest) == expected
        assert manifest.counts["duplicates"] == 3001 - 701
        results.append(manifest.shards)
    assert results[0] == results[1] == results[2]
    assert prepare(f"{tmp_path}/*.jsonl", tmp_path / "keep", seed=5)["train"].documents == 3001


def test_many_copies_of_one_text_fit_into_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sorting, "CHUNK_RECORDS", 10)
    held = []
    real = sorting._in_order
    monkeypatch.setattr(sorting, "_in_order", lambda records: (held.append(len(records)), real(records))[1])
    write_jsonl(tmp_path / "a.jsonl", ["the same"] * 2000 + ["another"])
    manifest = prepare(tmp_path / "a.jsonl", tmp_path, duplicates="drop")["train"]
    assert (manifest.documents, manifest.counts["duplicates"]) == (2, 1999)
    assert max(held) < 50


def test_long_documents_are_split_or_cut(tmp_path):
    texts = ["abcdefgh" * 5, "short", "x" * 8, "y" * 9, "abcdefgh" * 5]
    write_jsonl(tmp_path / "a.jsonl", texts)
    split = prepare(tmp_path / "a.jsonl", tmp_path / "split", max_document_tokens=10)["train"]
    expected = collections.Counter(["abcdefgh"] * 10 + ["short", "x" * 8, "y" * 8, "y"])
    assert collections.Counter(texts_of(split)) == expected
    assert (split.counts["pieces"], split.counts["cut"], split.documents) == (9, 0, 14)
    assert split.bytes_of_text == sum(map(len, texts))
    assert split.lengths["longest"] == 10
    cut = prepare(tmp_path / "a.jsonl", tmp_path / "cut", max_document_tokens=10, long_documents="cut")["train"]
    assert sorted(texts_of(cut)) == ["abcdefgh", "abcdefgh", "short", "x" * 8, "y" * 8]
    assert (cut.counts["cut"], cut.counts["pieces"], cut.bytes_of_text) == (3, 0, 37)
    both = prepare(tmp_path / "a.jsonl", tmp_path / "both", max_document_tokens=10, duplicates="drop")["train"]
    assert collections.Counter(texts_of(both)) == expected - collections.Counter(["abcdefgh"] * 5)
    assert (both.counts["duplicates"], both.counts["pieces"]) == (1, 5)


def test_pieces_of_a_document_lie_apart_and_on_one_side(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"{i:04d}" * 10 for i in range(300)])
    manifests = prepare(tmp_path / "a.jsonl", tmp_path, max_document_tokens=6, valid_fraction=0.2)
    train, valid = (texts_of(manifests[name]) for name in ("train", "valid"))
    assert not set(train) & set(valid)
    neighbours = sum(a == b for a, b in itertools.pairwise(train))
    assert neighbours < 40  # 9 in expectation; 2,000 if pieces stayed together


def test_length_statistics(tmp_path):
    lengths = [1, 2, 3, 6, 7, 14, 15, 100]  # of the texts; two more in tokens
    write_jsonl(tmp_path / "a.jsonl", ["x" * n for n in lengths])
    manifest = prepare(tmp_path / "a.jsonl", tmp_path)["train"]
    assert manifest.lengths == {
        "mean": (sum(lengths) + 16) / 8,
        "longest": 102,
        "at_most": {"4": 2, "8": 2, "16": 2, "32": 1, "128": 1},
    }


def test_the_order_is_uniform(tmp_path):
    """Marked documents (the first, the last, neighbours, one file of three) fall into any tenth of the order."""
    from scipy.stats import chisquare

    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", [f"{i},{j}" for j in range(200)])
    marked = {f"{i},{j}" for i, j in [(0, 0), (0, 1), (0, 2), (1, 99), (2, 198), (2, 199)]}
    tenths, of_one_file, followers = np.zeros(10), np.zeros(10), 0
    for seed in range(100):
        out = tmp_path / str(seed)
        order = texts_of(prepare(f"{tmp_path}/*.jsonl", out, seed=seed, memory_gb=5e-5)["train"])
        assert len(order) == 600
        for place, text in enumerate(order):
            tenths[place // 60] += text in marked
            of_one_file[place // 60] += text.startswith("1,")
        followers += sum(a == "0,0" and b == "0,1" for a, b in itertools.pairwise(order))
        shutil.rmtree(out)
    assert chisquare(tenths).pvalue > 1e-4
    assert chisquare(of_one_file).pvalue > 1e-4
    assert followers <= 3  # 1 in 600 shuffles


def test_shards_are_cut_alike_however_lengths_come():
    random = np.random.default_rng(0)
    lengths = random.integers(2, 60, 500)
    whole = cut_into_shards([lengths], 100)
    assert cut_into_shards(np.array_split(lengths, 37), 100) == whole
    ends = np.cumsum(lengths)
    plain, begin = [], 0
    while begin < len(lengths):
        end = begin + 1
        while end < len(lengths) and ends[end] - (ends[begin - 1] if begin else 0) <= 100:
            end += 1
        plain.append((end - begin, int(lengths[begin:end].sum())))
        begin = end
    assert whole == plain
    assert cut_into_shards([np.array([500, 3, 500])], 100) == [(1, 500), (1, 3), (1, 500)]
    assert cut_into_shards([], 100) == []


def test_the_disk_needed_is_said_and_checked(corpus, tmp_path, monkeypatch, capsys):
    manifests = prepare(f"{corpus}/*.jsonl", tmp_path / "a")
    said = re.search(r"needs about ([\d.]+) GB of disk at most, of which ([\d.]+) GB stay", capsys.readouterr().out)
    stored = manifests["train"].tokens * 2 / 1e9
    assert stored * 0.8 < float(said[2]) < stored * 1.4 + 0.01
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shuffle_module.shutil, "disk_usage", lambda path: type(usage)(10**12, 10**12, 1000))
    with pytest.raises(UserError, match=r"web\.partial: about 0\.\d+ GB of disk are needed, 0\.00 GB are free"):
        prepare(f"{corpus}/*.jsonl", tmp_path / "b")
    prepare(f"{corpus}/*.jsonl", tmp_path / "b", check_disk=False)


def test_a_bucket_larger_than_the_memory_is_sorted_in_rounds(corpus, clean, tmp_path, monkeypatch):
    """As if the estimate had been far too low: one bucket for everything."""
    monkeypatch.setattr(shuffle_module, "bucket_count", lambda *args: 1)
    rounds = dies_after(monkeypatch, sorting, "_load_records", -1)
    prepare(f"{corpus}/*.jsonl", tmp_path, valid_fraction=0.1, shard_tokens=300_000, memory_gb=0.002)
    assert len(rounds) > 10
    assert contents(tmp_path) == clean


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_killed_three_times_and_for_any_workers(tmp_path):
    """SIGKILL in each stage: nothing looks finished, no worker stays, and the same bytes come out in the end."""
    lines = real_lines(5000)
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", [f"{i} {j} " + " ".join(lines[j : j + 60]) for j in range(2500)])
    common = [f"sources.web.path={tmp_path}/*.jsonl", "valid_fraction=0.05", "shard_tokens=500000", "memory_gb=0.02"]
    for workers in (1, 2, 4):
        words = [*PREPARE, *common, f"out={tmp_path}/{workers}", f"workers={workers}"]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "4")
    out = tmp_path / "killed"
    work = out / "web.partial" / "work"
    for moment in ("part_00000/progress.json", "sorted/00003.json", "sorted/train_00002.shard.json"):
        process = subprocess.Popen(
            [*PREPARE, *common, f"out={out}", "workers=2"],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and not (work / moment).exists():
            time.sleep(0.002)
        workers = children_of(process.pid)
        process.kill()
        process.wait()
        assert not (out / "web").exists(), f"finished before {moment}"
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    done = subprocess.run(
        [*PREPARE, *common, f"out={out}", "workers=2"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert contents(out) == contents(tmp_path / "1")
    assert "needs about" not in done.stdout
    for split in ("train", "valid"):
        verify(out / "web" / split)


def peak_bytes(words):
    """The most memory that a command and its children held at one time, watched from outside: the largest sum, over
    the processes that live at a moment, of each one's peak so far."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        now = 0
        for pid in (process.pid, *children_of(process.pid)):
            try:
                now += int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
            except (OSError, TypeError):
                continue  # it has just ended
        peak = max(peak, now)
        time.sleep(0.01)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_is_bounded(tmp_path, workers):
    """20 times ``memory_gb`` of tokens: the peak is below 1.3 times it, beside what the same command takes for
    4 MB of text (Python, its libraries, and the tokenizer, in every process)."""
    memory = 0.1e9
    text = "".join(real_lines(1000))
    lengths = np.random.default_rng(0).integers(20, 6000, 340_000)
    with (tmp_path / "a.jsonl").open("w") as file:
        for i, n in enumerate(lengths.tolist()):
            file.write(json.dumps({"text": f"{i} {text[i % 1000 : i % 1000 + n]}"}) + "\n")
    write_jsonl(tmp_path / "tiny.jsonl", ["hello " * 100] * 7000)
    words = [*PREPARE, "valid_fraction=0", f"memory_gb={memory / 1e9}", "tokenizer.name=bytes", f"workers={workers}"]
    words += ["languages=0"]  # their model is loaded at the end: it would make the base larger and the test weaker
    base = peak_bytes([*words, f"sources.web.path={tmp_path}/tiny.jsonl", f"out={tmp_path}/base"])
    peak = peak_bytes([*words, f"sources.web.path={tmp_path}/a.jsonl", f"out={tmp_path}/out"])
    manifest = verify(tmp_path / "out" / "web" / "train")
    assert manifest.tokens * 2 > 20 * memory
    assert peak - base < 1.3 * memory, f"{(peak - base) / 1e6:.0f} MB above {base / 1e6:.0f} MB"
    print(f"{workers} workers: {(peak - base) / memory:.2f} of memory_gb above {base / 1e6:.0f} MB", file=sys.stderr)
