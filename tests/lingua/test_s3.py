"""Preparing from and to a server of the S3 protocol on loopback."""

import hashlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from lingua.manifest import verify
from lingua.metrics import read_metrics
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import TokenizerArgs
from tests.corpora import WRITERS, write_formats
from tests.real_text import real_lines
from tests.support import ROOT, deterministic, environment, run_app, tiny_words

FILES = [real_lines(600)[:300], real_lines(600)[300:]]


class Proxy:
    """Passes bytes on to a server, and drops the first ``drops`` connections that have brought 2,000 bytes back."""

    def __init__(self, port, drops):
        self.target, self.drops, self.dropped = port, drops, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source, target, may_drop):
        passed = 0
        try:
            while data := source.recv(1500):
                passed += len(data)
                if may_drop and passed > 2000 and self.drops > self.dropped:
                    self.dropped += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(port, keys) of a server with a bucket ``corpus`` that holds the same documents in every format."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    folder = tmp_path_factory.mktemp("files")
    write_formats(folder, FILES)
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    client.create_bucket(Bucket="corpus")
    client.create_bucket(Bucket="out")
    for path in folder.rglob("part-*"):
        client.upload_file(str(path), "corpus", str(path.relative_to(folder)))
    yield port, client
    moto.stop()


def run_code(url, code, words):
    """Run ``code`` with a client of the server at ``url``, whose second tries come at once."""
    variables = environment() | {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    code = f"from lingua import files; files.FIRST_WAIT = 0.01; from lingua.args import cli; {code}"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def run(url, *words):
    code = "import sys; sys.path.insert(0, 'setup'); import prepare_data as p; cli(p.PrepareArgs, p.prepare, 'prepare')"
    return run_code(url, code, ["tokenizer.name=bytes", "valid_fraction=0.1", *words])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    paths = write_formats(folder / "in", FILES)
    args = ShuffleArgs(TokenizerArgs("bytes"), valid_fraction=0.1)
    return shuffle("x", ReaderArgs(path=paths["jsonl"]), args, folder)["train"].shards


def test_prepared_from_s3(server, expected, tmp_path):
    url = f"http://127.0.0.1:{server[0]}"
    words = [f"sources.{name}.path=s3://corpus/{name}" for name in WRITERS]
    words += ["sources.globbed.path='s3://corpus/zstd/*.jsonl.zst'"]
    done = run(url, f"out={tmp_path}", *words)
    assert done.returncode == 0, done.stderr
    for name in (*WRITERS, "globbed"):
        assert verify(tmp_path / name / "train").shards == expected, name
    done = run(url, f"out={tmp_path}", *words)
    assert done.stdout.count("already prepared, nothing to do") == len(words)


def test_dropped_connections(server, expected, tmp_path):
    proxy = Proxy(server[0], drops=3)
    done = run(proxy.url, f"out={tmp_path}", "sources.web.path=s3://corpus/jsonl")
    assert done.returncode == 0, done.stderr
    assert proxy.dropped == 3
    assert verify(tmp_path / "web" / "train").shards == expected
    proxy = Proxy(server[0], drops=10**9)
    done = run(proxy.url, f"out={tmp_path}/never", "sources.web.path=s3://corpus/jsonl/part-00000.jsonl")
    assert done.returncode == 2
    assert re.search(r"error: s3://corpus/jsonl/part-00000\.jsonl: the connection was lost at byte 0", done.stderr)
    assert done.stderr.count("\n") == 1


def test_what_is_not_there_is_named(server, tmp_path):
    url = f"http://127.0.0.1:{server[0]}"
    for path, message in (
        ("s3://corpus/none/*.jsonl", r"error: no file matches s3://corpus/none/\*\.jsonl"),
        ("s3://nobucket/a.jsonl", "error: (no file matches|cannot list) s3://nobucket/a.jsonl"),
    ):
        done = run(url, f"out={tmp_path}", f"sources.web.path='{path}'")
        assert done.returncode == 2
        assert re.search(message, done.stderr), done.stderr


def test_prepared_to_s3(server, expected, tmp_path):
    port, client = server
    url = f"http://127.0.0.1:{port}"
    words = ["out=s3://out/shards", f"work={tmp_path}/work", "sources.web.path=s3://corpus/parquet"]

    def keys():
        return {item["Key"]: item["LastModified"] for item in client.list_objects_v2(Bucket="out").get("Contents", [])}

    done = run(url, *words)
    assert done.returncode == 0, done.stderr
    first = keys()
    local = {str(path.relative_to(tmp_path / "work")) for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert {f"shards/{name}" for name in local} == set(first)
    for key in first:
        client.download_file("out", key, str(_made(tmp_path / "back" / key)))
    assert verify(tmp_path / "back/shards/web/train").shards == expected
    # as if the upload had been killed: what is there of the same folder stays, what may be another's does not
    manifests = b"".join((tmp_path / f"work/web/{split}/manifest.json").read_bytes() for split in ("train", "valid"))
    for mark, sent in ((hashlib.sha256(manifests).hexdigest(), 2), ("another", len(local))):
        client.put_object(Bucket="out", Key="shards/web/upload.partial", Body=mark.encode())
        client.delete_object(Bucket="out", Key="shards/web/valid/manifest.json")
        client.delete_object(Bucket="out", Key="shards/web/train/shard_00000.docs")
        before = keys()
        time.sleep(1.1)  # the server tells times in seconds
        done = run(url, *words)
        assert done.returncode == 0, done.stderr
        again = keys()
        assert set(again) == set(first)
        assert sum(before.get(key) != changed for key, changed in again.items()) == sent
    done = run(url, *words[:1], f"work={tmp_path}/other", "seed=1", *words[2:])
    assert done.returncode == 2
    assert "error: s3://out/shards/web: holds another preparation" in done.stderr
    assert keys() == again
    done = run(url, "out=s3://nobucket/x", *words[1:])
    assert done.returncode == 2
    assert "error: s3://nobucket/x/web: cannot be written: The specified bucket does not exist" in done.stderr
    for bad in (["out=s3://out/x"], [f"out={tmp_path}/x", f"work={tmp_path}/y"]):
        done = run(url, *bad, words[2])
        assert "work is for an out that is a URL, and such an out needs it" in done.stderr


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_trained_from_s3_over_a_connection_that_drops(server, corpus, tmp_path):
    """The same losses as from the disk; with a connection that never holds, one message."""
    server[1].create_bucket(Bucket="shards")
    for path in corpus.rglob("*.*"):
        server[1].upload_file(str(path), "shards", f"data/{path.relative_to(corpus)}")
    words = {"steps": 4, "validation__every": 2}
    run_app("bert", tiny_words("bert", corpus, tmp_path / "local", **words))

    def train(url, name):
        changed = tiny_words("bert", corpus, tmp_path / name, data__cache_dir=tmp_path / "cache", **words)
        code = "import apps.bert.train as t; cli(t.BertTrainArgs, t.train, 'train')"
        return run_code(url, code, [word.replace(f"={corpus}", "=s3://shards/data") for word in changed])

    proxy = Proxy(server[0], drops=3)
    done = train(proxy.url, "remote")
    assert done.returncode == 0, done.stderr
    assert proxy.dropped == 3
    figures = [deterministic(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("local", "remote")]
    assert figures[0] == figures[1]
    done = train(Proxy(server[0], drops=10**9).url, "never")
    assert done.returncode == 2
    assert re.search(r"error: .*s3://shards/data", done.stderr)
