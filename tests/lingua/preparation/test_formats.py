"""Columns, compression and hub folders: the same documents out of each, and what damage does."""

import os
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lingua import files as files_module
from lingua.errors import UserError
from lingua.manifest import verify
from lingua.preparation import readers
from lingua.preparation.readers import BadLine, Document, ReaderArgs, blocks, documents, list_files
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import TokenizerArgs
from tests.corpora import WRITERS, write_formats, write_hub, write_jsonl, write_parquet, write_zstd
from tests.real_text import real_lines
from tests.support import run_offline

# the first two of equal length, because save_to_disk cuts evenly
FILES = [["one", "two\nlines", "", "  "], ["漢字 😀", "a\u0301", "x" * 3000, "last"]]


def read(path, **fields):
    return list(documents(ReaderArgs(path=str(path), **fields)))


def test_every_format_gives_the_same_documents(tmp_path):
    expected = [(text, file, row) for file, texts in enumerate(FILES) for row, text in enumerate(texts, 1)]
    for name, path in write_formats(tmp_path, FILES).items():
        assert [(d.text, d.file, d.row) for d in read(path)] == expected, name


def test_every_format_gives_the_same_shards(tmp_path):
    files = [real_lines(400)[:200], real_lines(400)[200:]]
    shards = {}
    for name, path in write_formats(tmp_path, files).items():
        args = ShuffleArgs(tokenizer=TokenizerArgs(), valid_fraction=0.1, seed=5)
        manifests = shuffle(name, ReaderArgs(path=path), args, tmp_path / "out")
        shards[name] = {split: verify(manifest.folder).shards for split, manifest in manifests.items()}
        assert sum(manifest.documents for manifest in manifests.values()) == 400
    assert len(shards) == 10
    assert all(value == shards["jsonl"] for value in shards.values())


def test_rows_of_plain_text_are_numbered_as_rows(tmp_path):
    (tmp_path / "a.txt").write_text("\n\nfirst\n\n\nsecond\nline\n\nthird")
    found = read(tmp_path / "a.txt", document="paragraph")
    assert [(d.text, d.line, d.row) for d in found] == [("first", 3, 1), ("second\nline", 6, 2), ("third", 9, 3)]


def test_blocks_count_rows_on(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 50)
    texts = [f"document {i}" for i in range(100)]
    for name, path in write_formats(tmp_path, [texts]).items():
        args = ReaderArgs(path=path)
        (file,) = list_files(path)
        assert len(list(blocks(file, args))) > 10, name
        assert [(d.text, d.row) for d in documents(args)] == [(text, i) for i, text in enumerate(texts, 1)]


def test_a_column_of_another_name_and_kind(tmp_path):
    column = pyarrow.array(["a", None, "b"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"body": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text', found body; name it with text=COLUMN"):
        read(tmp_path / "a.parquet", on_error="skip")
    with pytest.raises(UserError, match=r"a\.parquet, line 2: column 'body' is null"):
        read(tmp_path / "a.parquet", text="body")
    found = read(tmp_path / "a.parquet", text="body", on_error="skip")
    assert sorted((d.line, getattr(d, "text", None)) for d in found) == [(1, "a"), (2, None), (3, "b")]
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: column 'text': expected strings, found int64"):
        read(tmp_path / "b.parquet")


def test_invalid_utf8_in_a_column_is_one_bad_row(tmp_path):
    raw = pyarrow.array([b"good", b"caf\xe9", b"fine"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, line 2: not valid UTF-8: byte 0xe9 at byte 3"):
        read(tmp_path / "a.parquet")
    assert [d.line for d in read(tmp_path / "a.parquet", on_error="skip") if isinstance(d, BadLine)] == [2]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "jsonl"])
def test_a_file_cut_anywhere_is_an_error(tmp_path, name):
    ending, write = WRITERS[name]
    path = tmp_path / f"a{ending}"
    write(path, [f"text {i * i}" for i in range(200)])
    whole = path.read_bytes()
    assert len(read(path)) == 200
    # 8 bytes are the end marker of an Arrow stream, without which its reader sees nothing missing
    for size in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rf"a{ending}: cannot be read after line \d+: .*damaged or incomplete"):
            read(path, on_error="skip")


def test_a_damaged_zstd_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    text = os.urandom(300_000).hex()
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(f'{{"text": "{text}"}}\n'.encode()))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: cannot be read after line 0: .*damaged or incomplete"):
        read(path)
    write_zstd(path, ["x"] * 5)
    path.write_bytes(path.read_bytes() + b"rubbish")
    with pytest.raises(UserError, match="damaged or incomplete"):
        read(path)


def test_a_line_too_long_for_memory_is_named_or_skipped(tmp_path):
    """50 MB in one line: never held whole, and the lines around it are read."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["before"])
    with path.open("ab") as stream:
        stream.write(b'{"text": "' + b"x" * 50_000_000 + b'"}\n{"text": "after"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: longer than max_document_mb=32: raise it if"):
        read(path)
    found = read(path, on_error="skip")
    assert [(type(d), d.line) for d in found] == [(Document, 1), (Document, 3), (BadLine, 2)]
    assert len(read(path, max_document_mb=60)) == 3
    for document, bad_line, good in (("paragraph", 3, [1, 6]), ("file", 1, [])):
        path = tmp_path / f"{document}.txt"
        path.write_bytes(
            b"short\n\n" + b"long " * 1000 + b"\nstill it\n\nend" if document == "paragraph" else b"x" * 2000
        )
        found = read(path, document=document, max_document_mb=0.001, on_error="skip")
        assert [d.line for d in found if isinstance(d, BadLine)] == [bad_line]
        assert [d.line for d in found if isinstance(d, Document)] == good
    write_parquet(tmp_path / "a.parquet", ["short", "x" * 2000])
    with pytest.raises(UserError, match=r"a\.parquet, line 2: longer than max_document_mb=0\.001"):
        read(tmp_path / "a.parquet", max_document_mb=0.001)


@pytest.mark.parametrize("name", ["jsonl", "gzip"])
def test_a_file_that_changes_while_being_read(tmp_path, name):
    ending, write = WRITERS[name]
    path = tmp_path / f"a{ending}"
    write(path, ["text"] * 5)
    (file,) = list_files(str(path))
    write(path, ["text"] * 6)
    with pytest.raises(UserError, match=rf"a{ending}: changed while being read \(was size=\d+ mtime=.*, now size="):
        list(blocks(file, ReaderArgs(path=str(path))))
    path.unlink()
    with pytest.raises(UserError, match=f"a{ending}: changed while being read"):
        list(blocks(file, ReaderArgs(path=str(path))))


def test_a_folder_with_several_splits_asks_which(tmp_path):
    hub = write_hub(tmp_path / "hub", FILES)
    with pytest.raises(
        UserError, match=rf"hub: holds several splits \(test, train\.\.\.\); name one with hf:{hub}::train"
    ):
        read(hub)
    assert [d.text for d in read(f"hf:{hub}:plain:test")] == ["held out"]
    assert [d.text for d in read(f"{hub}/data/test*")] == ["held out"]
    with pytest.raises(UserError, match=r"hub:plain:dev: cannot be opened: .*check the name"):
        read(f"hf:{hub}:plain:dev")
    with pytest.raises(UserError, match=r"train.*no column 'body', found id, text|no column 'body', found id, text"):
        read(f"hf:{hub}", text="body")


def test_offline_the_hub_is_named_as_the_reason(tmp_path):
    code = "from lingua.preparation.readers import *; list_files('hf:someone/something')"
    done = run_offline(code, tmp_path)
    assert "hf:someone/something: cannot be opened" in done.stderr
    assert "HF_HUB_OFFLINE is set, so only local folders can be read" in done.stderr


def test_a_missing_package_names_the_line_that_installs_it(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"reading parquet files needs the package pyarrow .*requirements-data\.txt"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", list(WRITERS)[:4])
def test_a_web_server(tmp_path, name):
    """One without range requests, as plain ones are."""
    ending, write = WRITERS[name]
    write(tmp_path / f"a{ending}", FILES[1])

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a{ending}"
        assert [d.text for d in read(url)] == FILES[1]
        with pytest.raises(UserError, match=r"no file matches http.*missing\.jsonl"):
            read(url.replace(f"a{ending}", "missing.jsonl"))
        server.shutdown()


class Flaky:
    """A remote file system that drops the connection at every ``every``-th read after ``first``, ``times`` in all."""

    protocol = "flaky"

    def __init__(self, data, every, times, first=0):
        self.data, self.every, self.times, self.reads = data, every, times, -first

    def size(self, path):
        return len(self.data)

    def open(self, path, mode):
        return FlakyStream(self)


class FlakyStream:
    def __init__(self, system):
        self.system, self.at = system, 0

    def seek(self, at):
        self.at = at

    def read(self, size):
        self.system.reads += 1
        if self.system.reads > 0 and self.system.reads % self.system.every == 0 and self.system.times:
            self.system.times -= 1
            if self.system.times % 2:
                return b""  # a connection that closes looks like the end of the file
            raise ConnectionResetError("dropped")
        data = self.system.data[self.at : self.at + min(size, 1000)]
        self.at += len(data)
        return data


def test_a_dropped_connection_is_read_on_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "FIRST_WAIT", 0.001)
    path = tmp_path / "a.jsonl.gz"
    WRITERS["gzip"][1](path, [os.urandom(30).hex() for i in range(2000)])
    data = path.read_bytes()
    expected = [d.text for d in read(path)]

    def through(system):
        monkeypatch.setattr(files_module.fsspec.core, "url_to_fs", lambda path: (system, path))
        file = readers.InputFile(0, "flaky://a.jsonl.gz", len(data))
        parsed = [readers.parse(block, ReaderArgs(path="x")) for block in blocks(file, ReaderArgs(path="x"))]
        return [d.text for p in parsed for d in p.documents]

    system = Flaky(data, every=4, times=12)
    assert through(system) == expected
    assert system.times == 0
    with pytest.raises(UserError, match=r"flaky://a\.jsonl\.gz: the connection was lost at byte \d{4,} and 5 tries"):
        through(Flaky(data, every=1, times=10**9, first=20))


def test_a_store_that_is_gone_at_the_end_of_a_file_is_named(tmp_path, monkeypatch):
    """What botocore and aiohttp raise is no OSError."""

    class GoneError(Exception):
        pass

    class Gone:
        tries = 0

        def invalidate_cache(self):
            pass

        def info(self, path):
            self.tries += 1
            raise GoneError("no route")

    monkeypatch.setattr(files_module, "FIRST_WAIT", 0.001)
    system = Gone()
    monkeypatch.setattr(files_module.fsspec.core, "url_to_fs", lambda path: (system, path))
    file = readers.InputFile(0, "s3://bucket/a.jsonl", 77, "size=77 ETag=x")
    with pytest.raises(
        UserError, match=r"s3://bucket/a\.jsonl: the connection was lost at byte 77 .*GoneError: no route"
    ):
        files_module.check_unchanged(file)
    assert system.tries == 5
