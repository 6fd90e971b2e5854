import os

import pytest

from lingua.files import write_atomically


def test_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "one")
    write_atomically(path, b"two\xff")
    assert path.read_bytes() == b"two\xff"

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "three")
    assert path.read_bytes() == b"two\xff"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("links", [True, False])
def test_what_another_process_wrote_first_stays(tmp_path, monkeypatch, links):
    """Two machines plan the same work at once; where the file system has hard links one of them is the first."""

    def none(*args):
        raise PermissionError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", none)
    path = tmp_path / "plan.json"
    write_atomically(path, "first", keep=True)
    assert path.read_text() == "first"
    if links:
        write_atomically(path, "second", keep=True)
        assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["plan.json"]
