import gzip
import json

import fsspec
import pytest
import zstandard

from lingua.errors import UserError
from lingua.preparation import readers
from lingua.preparation.readers import BadLine, Document, ReaderArgs, documents, list_files


def read(path, **fields):
    return list(documents(ReaderArgs(path=str(path), **fields)))


def jsonl(rows, column="text"):
    return "".join(json.dumps({column: row, "other": 1}) + "\n" for row in rows).encode()


def test_jsonl_plain_and_gzipped(tmp_path):
    rows = ["one", "two\nlines", "", "漢字 😀"]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(rows, "body")))
    expected = [(row, i) for i, row in enumerate(rows, 1)]
    plain = read(tmp_path / "a.jsonl")
    assert [(d.text, d.line) for d in plain] == expected
    assert plain[0] == Document("one", 0, str(tmp_path / "a.jsonl"), 1, 1)
    assert [(d.text, d.line) for d in read(tmp_path / "b.jsonl.gz", text="body")] == expected
    (tmp_path / "c.dat").write_bytes(jsonl(rows).removesuffix(b"\n").replace(b"\n", b"\r\n"))
    assert [(d.text, d.line) for d in read(tmp_path / "c.dat", format="jsonl")] == expected


def test_documents_of_plain_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\nfirst line\nsecond line\n \n\t\nnext paragraph\r\n\r\nlast")
    assert [(d.text, d.line) for d in read(path)] == [(path.read_bytes().decode(), 1)]
    assert [(d.text, d.line) for d in read(path, document="paragraph")] == [
        ("first line\nsecond line", 3),
        ("next paragraph", 7),
        ("last", 9),
    ]
    lines = read(path, document="line")
    assert [d.text for d in lines] == [
        "", "", "first line", "second line", " ", "\t", "next paragraph", "", "last"
    ]  # fmt: skip
    assert [d.line for d in lines] == list(range(1, 10))
    (tmp_path / "empty.txt").write_bytes(b"")
    assert read(tmp_path / "empty.txt") == []


@pytest.mark.parametrize("document", readers.DOCUMENTS)
def test_blocks_do_not_change_documents(tmp_path, monkeypatch, document):
    text = "".join(f"line {i}\n" + "\n" * (i % 3) for i in range(50))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(jsonl([f"row {i}" for i in range(50)]))
    whole = read(tmp_path / "*", document=document)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 20)
    args = ReaderArgs(path=str(tmp_path / "*"), document=document)
    files = list_files(args.path)
    assert len(list(readers.blocks(files[1], args))) > 20
    assert (len(list(readers.blocks(files[0], args))) == 1) == (document == "file")
    assert read(tmp_path / "*", document=document) == whole


def test_files_are_sorted_and_globs_joined(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "folder.txt").mkdir()
    assert [d.text for d in read(f"{tmp_path}/*/*.txt")] == ["a/3.txt", "b/10.txt", "b/2.txt"]
    joined = f"{tmp_path}/b/2.txt, {tmp_path}/a/*.txt,{tmp_path}/b/2.txt"
    files = list_files(joined)
    assert [(f.index, f.path, f.size) for f in files] == [
        (0, f"{tmp_path}/a/3.txt", 7),
        (1, f"{tmp_path}/b/2.txt", 7),
    ]


def test_other_file_systems():
    with fsspec.open("memory://corpus/a.jsonl", "wb") as stream:
        stream.write(jsonl(["far away"]))
    assert [d.text for d in read("memory://corpus/*.jsonl")] == ["far away"]


BAD_ROWS = {
    "not JSON": (b'{"text": "x"', "line 2: not valid JSON: .* at column 13"),
    "not an object": (b'["x"]', "line 2: expected a JSON object, found list"),
    "no column": (b'{"body": "x", "id": 1}', "line 2: no column 'text', found body, id"),
    "wrong type": (b'{"text": null}', "line 2: column 'text': expected a string, found NoneType"),
    "empty line": (b"", "line 2: empty line, expected a JSON object"),
    "bad UTF-8": (b'{"text": "\xff"}', "line 2: not valid UTF-8: byte 0xff at byte 10"),
    "huge number": (b'{"text": ' + b"9" * 5000 + b"}", "line 2: "),
    "deep nesting": (b"[" * 100_000, "line 2: "),
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_lines_of_jsonl(tmp_path, row):
    raw, message = BAD_ROWS[row]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["first"]) + raw + b"\n" + jsonl(["third"]))
    with pytest.raises(UserError, match=rf"a\.jsonl, {message}.*on_error=skip"):
        read(path)
    good_and_bad = read(path, on_error="skip")
    assert [(d.text, d.line) for d in good_and_bad if isinstance(d, Document)] == [("first", 1), ("third", 3)]
    (bad,) = [d for d in good_and_bad if isinstance(d, BadLine)]
    assert (bad.path, bad.line) == (str(path), 2)


def test_bad_plain_text(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\n\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.txt, line 3: not valid UTF-8: byte 0xe9 at byte 3"):
        read(path, document="paragraph")
    assert [type(d) for d in read(path, document="paragraph", on_error="skip")] == [Document, BadLine]


def test_a_damaged_gzip_is_an_error_even_when_skipping(tmp_path):
    whole = gzip.compress(jsonl([f"some text {i * i}" for i in range(5000)]))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for name, data in (
        ("cut.jsonl.gz", whole[: len(whole) // 2]),
        ("damaged.jsonl.gz", damaged),
        ("not.jsonl.gz", jsonl(["x"])),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}: cannot be read after line \d+: .*damaged or incomplete"):
            read(tmp_path / name, on_error="skip")


def test_nothing_to_read(tmp_path):
    for pattern in (f"{tmp_path}/*.jsonl", f"{tmp_path}/missing/a.txt"):
        with pytest.raises(UserError, match=f"no file matches {pattern}".replace("*", r"\*")):
            read(pattern)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"no file matches .*b\.txt"):
        read(f"{tmp_path}/a.txt,{tmp_path}/b.txt")
    with pytest.raises(UserError, match="path of a source is empty"):
        read(" , ")
    with pytest.raises(UserError, match="cannot list nosuch://bucket"):
        read("nosuch://bucket/*")


def test_bad_settings():
    with pytest.raises(UserError, match="on_error=ignore: expected one of fail, skip"):
        ReaderArgs(path="x", on_error="ignore")
    with pytest.raises(UserError, match="document=page: expected one of file, paragraph, line"):
        ReaderArgs(path="x", document="page")
    with pytest.raises(UserError, match="format=csv: expected one of auto, jsonl, text, parquet, arrow"):
        ReaderArgs(path="x", format="csv")


def test_what_is_there_instead_is_said(tmp_path):
    with pytest.raises(UserError, match=rf"no file in {tmp_path} ends in \.jsonl, .*: it is empty"):
        list_files(str(tmp_path))
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(UserError, match=r"ends in .*: there are notes\.md: give a glob, and format= if they are text"):
        list_files(str(tmp_path))
    assert [d.text for d in read(tmp_path / "notes.md")] == ["text"]
    with pytest.raises(UserError, match=r"no file matches http://127\.0\.0\.1:9/a\.jsonl \(.*Connect call failed"):
        list_files("http://127.0.0.1:9/a.jsonl")


def test_a_byte_order_mark_is_not_text(tmp_path):
    """Windows programs write one; only the first in a file is one."""
    row = json.dumps({"text": "\ufeffa"}, ensure_ascii=False).encode() + b"\n"
    for name, data, texts in (
        ("a.jsonl", row * 2, ["\ufeffa"] * 2),
        ("a.txt", b"a\xef\xbb\xbfb", ["a\ufeffb"]),
        ("empty.txt", b"", []),
    ):
        for ending, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)):
            path = tmp_path / f"{name}{ending}"
            path.write_bytes(pack(b"\xef\xbb\xbf" + data))
            assert [d.text for d in read(path)] == texts


def test_a_compressed_file_without_the_ending_is_named(tmp_path):
    for ending, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        path = tmp_path / "a.jsonl"
        path.write_bytes(pack(b'{"text": "a"}\n'))
        with pytest.raises(UserError, match=rf"a\.jsonl: compressed, but .* not end in \{ending}: rename it"):
            read(path)
