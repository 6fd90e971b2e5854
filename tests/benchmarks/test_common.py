"""What all benchmarks share: an output that cannot be written is found out before anything is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common import command, environment, write_result
from lingua.errors import UserError


@dataclass
class Args:
    out: str = "???"
    plot: str | None = None


def run(*words: str) -> list[Args]:
    """Which arguments reached the program."""
    called: list[Args] = []
    command(Args, called.append, "python -m x", list(words))
    return called


@pytest.mark.parametrize(
    "bad", ["out={0}", "out={0}/file/x.json", "out=/proc/nope/x.json", "out={0}/x plot={0}/file/y"]
)
def test_nothing_is_measured_for_an_output_that_cannot_be_written(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SystemExit) as ended:
        run(*bad.format(tmp_path).split())
    assert ended.value.code == 2
    assert "cannot be written (" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_an_output_that_can_be_written_stays_as_it_is_until_then(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder/new.json"
    old.write_text("of the last time")
    assert run(f"out={old}", f"plot={tmp_path}/plots/p") == [Args(str(old), f"{tmp_path}/plots/p")]
    assert old.read_text() == "of the last time"
    run(f"out={new}")
    assert not new.exists()
    write_result(str(new), {"a": 1})
    assert json.loads(new.read_text()) == {"a": 1}


def test_figures_are_printed_even_if_the_file_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="directory"):
        write_result(str(tmp_path), {"speed": 12.5})
    assert "12.5" in capsys.readouterr().out


def test_the_version_of_a_package_that_is_not_there_is_none() -> None:
    versions = environment("torch", "no-such-package")["versions"]
    assert versions["torch"].startswith("2.13.0")
    assert versions["no-such-package"] is None


def test_a_user_error_of_the_program_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(args: Args) -> None:
        raise UserError("parts failed")

    with pytest.raises(SystemExit):
        command(Args, fails, "python -m x", [f"out={tmp_path}/x.json"])
    assert capsys.readouterr().err.strip() == "error: parts failed"
