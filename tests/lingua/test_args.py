from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lingua.args import build, cli, help_text, parse, to_yaml
from lingua.errors import UserError
from lingua.tokenizer import TokenizerArgs
from tests.support import ROOT


@dataclass
class Inner:
    width: int = 8  # how wide
    names: dict[str, float] = field(default_factory=dict)


@dataclass
class Outer:
    """An example."""

    path: str = "???"  # where it lies
    rate: float = 0.5
    # Length: one of these,
    # not both.
    steps: int | None = None  # how many
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise UserError(f"rate={self.rate}: expected 0 or more")


@dataclass
class Listed:
    tasks: list[str] | None = None
    lengths: list[int] = field(default_factory=list)


@dataclass
class Sections:
    one: Listed = field(default_factory=Listed)
    many: list[Listed] = field(default_factory=list)
    named: dict[str, Listed] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("key", "value", "example"),
    [
        ("one.tasks", "BIOSSES", "BIOSSES"),
        ("one.lengths", "3", "3"),
        ("one.lengths", "8,16", "8,16"),
        ("one.tasks", "*.jsonl", "a,b"),
        ("named.x.tasks", "some words", "a,b"),
        ("many", "3", "3"),
    ],
)
def test_one_value_where_a_list_is_wanted_is_told_how_lists_look(
    tmp_path: Path, key: str, value: str, example: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml_lines(key, value))
    for origin, word in (("the command line", f"{key}={value}"), (str(file), f"config={file}")):
        with pytest.raises(UserError) as error:
            parse(Sections, [word])
        assert str(error.value) == f"{origin}: {key}={value}: expected a list, which is written {key}=[{example}]"


def to_yaml_lines(key: str, value: str) -> str:
    names = key.split(".")
    return "".join(f"{'  ' * i}{name}:\n" for i, name in enumerate(names))[:-1] + f" '{value}'\n"


def test_a_list_may_be_none_or_another_keys() -> None:
    assert parse(Listed, ["tasks=null", "lengths=[3]"]) == Listed(None, [3])
    assert parse(Sections, ["one.tasks=[a]", "named.x.tasks=${one.tasks}"]).named["x"].tasks == ["a"]


def test_command_line_over_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("path: a\nrate: 1.5\ninner: {width: 16}\n")
    args = parse(Outer, ["inner.width=32", f"config={file}", "inner.names.x=2"])
    assert args == Outer(path="a", rate=1.5, steps=None, inner=Inner(width=32, names={"x": 2.0}))


@pytest.mark.parametrize("value", ["*.jsonl", "*/a'b.txt", "&x", "%41", "@all", "`x`"])
def test_a_glob_is_text(value: str) -> None:
    assert parse(TokenizerArgs, ["name=hf", f"path={value}"]).path == value


def test_resolved_yaml_gives_the_same_args(tmp_path: Path) -> None:
    args = parse(Outer, ["path=a b", "steps=3", "rate=1e-3"])
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(args))
    assert parse(Outer, [f"config={file}"]) == args


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["path=a", "inner.widht=3"], r"the command line: unknown key inner\.widht: did you mean inner\.width\?"),
        (["path=a", "width=3"], r"unknown key width: did you mean inner\.width\?"),
        (["path=a", "inner.steps=3"], r"unknown key inner\.steps: did you mean steps\?"),
        (["path=a", "zzz=3"], "unknown key zzz: known here: path, rate, steps, inner"),
        (["path=a", "steps=many"], "the command line: steps: .*many.*Integer"),
        ([], "no value for path"),
        (["path=query: "], r"""path: .*'key="query: "'"""),
        (["path=a", "rate=-1"], "rate=-1.0: expected 0 or more"),
        (["path"], "'path' is not of the form key=value"),
        (["config=nowhere.yaml"], r"nowhere\.yaml: no such file"),
        (["path=a", "inner=3"], "the command line: inner is a section with keys of its own, found 3"),
        (["path=a", "inner.names={a"], "cannot read the arguments"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(Outer, words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"- 1", "expected a YAML mapping of keys to values, found a list"),
        (
            b"rate=1 path=a\n" * 500,
            r"expected a YAML mapping of keys to values, found only 'rate=1 path=a rate.{0,80}'$",
        ),
        (b"a: *" + b"x" * 3000, "not valid YAML: .{0,300}$"),
        (b"", "found an empty file"),
        (b"# only this\n", "found an empty file"),
        (b"\xff\xfe\x00", "not valid YAML"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        parse(Outer, [f"config={file}"])
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


def test_help_lists_every_field_with_type_default_and_comment() -> None:
    text = help_text(Outer, "prog")
    assert "path: str = required  # where it lies" in text
    assert "rate: float = 0.5" in text
    assert "\n  # Length: one of these,\n  # not both.\n  steps: int | None = None  # how many\n" in text
    assert "inner.width: int = 8  # how wide" in text
    assert "An example." in text


def test_cli_prints_one_line_for_a_user_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli(Outer, lambda args: None, "prog", ["path=a", "rate=-1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: rate=-1.0: expected 0 or more\n"


def test_build_from_dicts() -> None:
    assert build(Outer, ("here", {"path": "x"})).path == "x"


@pytest.mark.parametrize(
    "call",
    [
        "args.help_text = lambda *_: 'many words\\n' * 100_000\nargs.cli(object, print, 'prog', ['--help'])",
        "args.cli(Given, lambda _: print('many words\\n' * 100_000), 'prog', [])",  # more than a pipe holds
        "args.cli(Given, lambda _: [print('many words') or time.sleep(0.1) for _ in range(9)], 'prog', [])",
    ],
    ids=["help", "at once", "left over at the end"],
)
def test_a_command_is_silent_where_its_reader_has_gone(call: str) -> None:
    program = (
        "import dataclasses, sys, time\n"
        "from lingua import args\n"
        "@dataclasses.dataclass\n"
        "class Given: pass\n"
        "print('many words', flush=True)\n" + call
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "many words\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141  # as the shell says of a command that SIGPIPE ended


def test_another_broken_pipe_is_not_taken_for_that_of_the_reader(capfd: pytest.CaptureFixture) -> None:
    def run(_: Outer) -> None:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        cli(Outer, run, "prog", ["path=a"])
