"""The README's links, tree and commands are those of the repository."""

from __future__ import annotations

import re

from tests.support import ROOT

TEXT = (ROOT / "README.md").read_text()


def test_every_linked_file_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("http")]
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_tree_names_every_module_and_no_other() -> None:
    tree = TEXT.split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"(\w+\.py)\b", tree.split("apps/bert/")[0]))
    top = {path.name for path in (ROOT / "lingua").glob("*.py")} - {"__init__.py"}
    assert top - named == set()
    assert named - {path.name for path in (ROOT / "lingua").rglob("*.py")} == set()
    folders = {path.parent.name for path in (ROOT / "lingua").glob("*/__init__.py")}
    assert folders == set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE))


def test_every_module_and_script_it_runs_exists() -> None:
    modules = re.findall(r"python -m ([\w.]+)", TEXT)
    scripts = re.findall(r"(?:bash|python) (setup/\S+)", TEXT)
    assert {"apps.crossbert.train", "apps.crossbert.eval", "lingua.tokenizer"} <= set(modules)
    assert {"setup/quickstart.sh", "setup/test.sh", "setup/prepare_data.py"} <= set(scripts)
    known = [m for m in modules if m.startswith(("apps.", "lingua."))]
    paths = [ROOT / m.replace(".", "/") for m in known]
    assert [p for p in paths if not p.with_suffix(".py").exists() and not (p / "__main__.py").exists()] == []
    assert [s for s in scripts if not (ROOT / s).exists()] == []


def test_no_placeholder_is_left() -> None:
    assert (
        re.findall(r"\b[A-Z]+_[A-Z_]+\b", re.sub(r"```.*?```|`[^`]*`", "", TEXT, flags=re.DOTALL))
        == ["THIRD_PARTY_NOTICES"] * 2
    )
