"""Configuration: dataclass defaults <- YAML file (``config=``) <- ``key=value`` on the command line.

The dataclass beside the code it configures is the schema. An unknown key is an error that names the
nearest known one, a wrong type says what was expected, and ``--help`` prints every field with its
type, its default and the comments that stand beside and above it in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import os
import re
import select
import signal
import sys
import tokenize
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lingua.errors import UserError

T = TypeVar("T")


def parse(cls: type[T], argv: list[str]) -> T:
    """Build ``cls`` from command-line words.

    Args:
        cls: a dataclass; nested dataclasses are nested sections.
        argv: ``key.sub=value`` words; ``config=FILE.yaml`` is read first, the others override it.

    Raises:
        UserError: unknown key, wrong type, unreadable file, or a check in a ``__post_init__``.
    """
    words, path = [], None
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"argument {word!r} is not of the form key=value (see --help)")
        if key == "config":
            path = value
        elif value.startswith(("*", "&", "%", "@", "`")):  # a glob, say: YAML would take it for something else
            words.append(f"{key}='{value.replace(chr(39), 2 * chr(39))}'")
        else:
            words.append(word)
    layers = [] if path is None else [(path, read_yaml(path))]
    try:
        layers.append(("the command line", OmegaConf.to_container(OmegaConf.from_dotlist(words))))
    except Exception as error:  # OmegaConf lets its parser's exceptions through
        raise UserError(f"cannot read the arguments {' '.join(words)!r}: {_first_line(error)}") from None
    return build(cls, *layers)


def build(cls: type[T], *layers: tuple[str, dict[str, Any]]) -> T:
    """Build ``cls`` from ``(origin, nested dict)`` layers, later ones winning. Raises UserError."""
    config = OmegaConf.structured(cls)
    for origin, values in layers:
        check_keys(cls, values, origin)
        try:
            config = OmegaConf.merge(config, values)
        except OmegaConfBaseException as error:
            reason = _first_line(error)
            if "to string: '{" in reason:  # `query: ` is a mapping to YAML
                reason += "; a text with a colon or blanks at its ends needs quotes of its own: 'key=\"query: \"'"
            raise UserError(f"{origin}: {error.full_key or 'config'}: {reason}") from None
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"no value for {', '.join(missing)}: give it in the YAML file or as {missing[0]}=...")
    return OmegaConf.to_object(config)  # type: ignore[return-value]


def check_keys(cls: type, values: dict[str, Any], origin: str, prefix: str = "", whole: type | None = None) -> None:
    """Raise UserError at the first key of ``values`` that the dataclass ``cls`` does not have, or that wants a list.

    Args:
        prefix, whole: where ``cls`` stands, and the dataclass that it is a section of.
    """
    whole = whole or cls
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in known:
            same = _paths_to(str(key), whole)
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            meant = " or ".join(same[:3]) or (f"{prefix}{near[0]}" if near else "")
            hint = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
            raise UserError(f"{origin}: unknown key {prefix}{key}: {hint}")
        _check_list(hints[key], value, f"{prefix}{key}", origin)
        inner = _dataclass_of(hints[key])
        if not inner:
            continue
        if isinstance(value, list) and typing.get_origin(hints[key]) is list:
            for number, item in enumerate(value):
                check_keys(inner, item if isinstance(item, dict) else {}, origin, f"{prefix}{key}.{number}.", whole)
            continue
        if not isinstance(value, dict):
            raise UserError(f"{origin}: {prefix}{key} is a section with keys of its own, found {value!r}")
        if typing.get_origin(hints[key]) is dict:  # sections under names the user chooses
            for name, section in value.items():
                if not isinstance(section, dict):
                    raise UserError(f"{origin}: {prefix}{key}.{name} is a section, found {section!r}")
                check_keys(inner, section, origin, f"{prefix}{key}.{name}.", whole)
        else:
            check_keys(inner, value, origin, f"{prefix}{key}.", whole)


def _check_list(hint: Any, value: Any, path: str, origin: str) -> None:
    """Raise UserError where ``hint`` wants a list and ``value`` is none."""
    options = () if typing.get_origin(hint) is dict else (hint, *typing.get_args(hint))
    is_reference = isinstance(value, str) and value.startswith("${")  # to another key, which OmegaConf looks up
    if list not in map(typing.get_origin, options) or value is None or isinstance(value, list) or is_reference:
        return
    shown = str(value)
    example = shown if re.fullmatch(r"[\w./+,-]{1,80}", shown) else "a,b"
    raise UserError(f"{origin}: {path}={shown[:80]}: expected a list, which is written {path}=[{example}]")


def _paths_to(name: str, cls: type, prefix: str = "") -> list[str]:
    """Full names of the fields called ``name`` in ``cls`` and its sections, the least deep ones first."""
    found = []
    for field, hint in typing.get_type_hints(cls).items():
        if field == name:
            found.append(f"{prefix}{field}")
        inner = _dataclass_of(hint)
        if inner and typing.get_origin(hint) is not list:
            found += _paths_to(name, inner, f"{prefix}{field}{_any_name(hint)}.")
    return sorted(found, key=lambda path: path.count("."))


def _any_name(hint: Any) -> str:
    """What stands for the name of a section in full names, where the user chooses it."""
    return ".NAME" if typing.get_origin(hint) is dict else ""


def to_yaml(args: Any) -> str:
    """The resolved config as YAML; ``config=`` reads it back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(args))


def to_dict(args: Any) -> dict[str, Any]:
    """The resolved config as nested plain dicts."""
    return dataclasses.asdict(args)


def defaults(cls: type) -> dict[str, Any]:
    """The config of ``cls`` where nothing is given, as nested plain dicts."""
    return typing.cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(cls)))


def help_text(cls: type, usage: str) -> str:
    """Every field of ``cls`` with type, default and its comments in the source: beside it, and above it as lines."""
    lines = [f"usage: {usage} [config=FILE.yaml] [key=value ...]", ""]
    doc = inspect.getdoc(cls)
    if doc and not doc.startswith(cls.__name__ + "("):
        lines += [doc, ""]
    return "\n".join(lines + list(_help_lines(cls, "")))


def cli(cls: type[T], run: Callable[[T], Any], usage: str, argv: list[str] | None = None) -> None:
    """The whole command-line entry of a module: parse, run, and turn a UserError into one message.

    Exit status: 0 done, 2 user error, 130 interrupted, 141 where what reads the output, such as head, has gone.
    """
    is_program = argv is None
    argv = sys.argv[1:] if is_program else argv
    signal.signal(signal.SIGINT, signal.default_int_handler)  # apps/__init__.py
    try:
        status = _status(cls, run, usage, argv)
        sys.stdout.flush()
    except BrokenPipeError as error:
        status = reader_has_gone(error)
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_initialized()
    if has_group or (is_program and "lingua.saving" in sys.modules):
        # The threads behind a process group, and those of a checkpoint written beside the training, now and then abort
        # while Python shuts down, after the work is done.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    if status:
        raise SystemExit(status)


def _status(cls: type[T], run: Callable[[T], Any], usage: str, argv: list[str]) -> Any:
    """Do what ``argv`` says, and what the command ends with."""
    if any(word in ("-h", "--help", "help") for word in argv):
        print(help_text(cls, usage))
        return 0
    try:
        run(parse(cls, argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code or 0
    return 0


def reader_has_gone(error: BrokenPipeError) -> int:
    """Be silent after a BrokenPipeError, as Python writes once more at its end. Gives the exit status.

    Raises:
        BrokenPipeError: ``error``, if it is of another pipe than this command's output.
    """
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream.fileno())]
    if not gone:
        raise error
    for stream in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 128 + signal.SIGPIPE


def _has_no_reader(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as nested dicts. Raises UserError if it is missing, empty, not YAML, or not a mapping."""
    path = Path(path) if isinstance(path, str) else path
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a YAML config")
    try:
        with path.open() as file:
            top = yaml.compose(file)
            file.seek(0)
            values = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # yaml's own errors and OmegaConf's
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if isinstance(top, yaml.ScalarNode):  # text without any key, which OmegaConf takes for one
        values = top.value
    if not isinstance(values, dict) or not values:
        text = f"only {' '.join(values.split())[:80]!r}" if isinstance(values, str) else f"a {type(values).__name__}"
        found = text if values else "an empty file"
        raise UserError(f"{path}: expected a YAML mapping of keys to values, found {found}")
    return typing.cast("dict[str, Any]", values)


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in ``X``, ``X | None`` or ``dict[str, X]``."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def _help_lines(cls: type, prefix: str) -> typing.Iterator[str]:
    hints, comments = typing.get_type_hints(cls), field_comments(cls)
    for field in dataclasses.fields(cls):
        inner = _dataclass_of(hints[field.name])
        above, beside = comments[field.name]
        yield from (f"  # {line}" for line in above)
        comment = f"  # {beside}" if beside else ""
        if inner:
            yield f"{prefix}{field.name}:{comment}"
            yield from _help_lines(inner, f"{prefix}{field.name}{_any_name(hints[field.name])}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING or default == "???"
        hint = hints[field.name]
        kind = hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")
        shown = "required" if required else repr(default)
        yield f"  {prefix}{field.name}: {kind} = {shown}{comment}"


def field_comments(cls: type) -> dict[str, tuple[list[str], str]]:
    """By field name: the lines of comment straight above it, and the comment at the end of its line."""
    comments: dict[str, tuple[list[str], str]] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        source = inspect.cleandoc("\n" + inspect.getsource(base))
        found = {
            token.start[0]: (token.line.strip().startswith("#"), token.string.lstrip("# ").strip())
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            above, line = [], node.lineno - 1
            while line in found and found[line][0]:
                above.insert(0, found[line][1])
                line -= 1
            beside = found[node.end_lineno][1] if node.end_lineno in found else ""
            comments[node.target.id] = (above, beside)
    return comments


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
