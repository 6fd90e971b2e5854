import fsspec
import pytest

from lingua.errors import UserError
from lingua.manifest import NAME
from lingua.upload import MARK, upload
from tests.support import made_up_documents, prepare


@pytest.fixture
def prepared(tmp_path):
    return prepare(tmp_path, made_up_documents(60), shard_tokens=1000) / "made_up"


def test_manifests_come_last(prepared, monkeypatch):
    """So that a reader who comes in between finds no finished folder; the mark of an unfinished upload goes."""
    system = fsspec.filesystem("memory")
    sent = []
    real = type(system).put_file
    monkeypatch.setattr(
        type(system), "put_file", lambda self, local, remote, **k: (sent.append(remote), real(self, local, remote, **k))
    )
    upload(prepared, "memory://upload/last")
    names = [path.rpartition("/")[2] for path in sent]
    assert len(names) > 8
    assert [name == NAME for name in names] == [False] * (len(names) - 2) + [True] * 2
    there = {path.removeprefix("/upload/last/") for path in system.find("/upload/last")}
    assert there == {str(path.relative_to(prepared)) for path in prepared.rglob("*") if path.is_file()}
    assert not system.exists(f"/upload/last/{MARK}")
    sent.clear()
    upload(prepared, "memory://upload/last")
    assert sent == []


def test_a_store_that_refuses_is_named(prepared, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError("read only")

    monkeypatch.setattr("lingua.files.FIRST_WAIT", 0.001)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    with pytest.raises(
        UserError, match=r"memory://upload/refused: cannot be written after 5 tries \(PermissionError: rea"
    ):
        upload(prepared, "memory://upload/refused")
    assert fsspec.filesystem("memory").exists(f"/upload/refused/{MARK}")
