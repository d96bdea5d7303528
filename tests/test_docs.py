"""The READMEs name commands, folders and scripts that exist, and the first one stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from edgeft.cli import app

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
DOCS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "edgeft/README.md",
    "edgeft/arch/README.md",
    "scripts/bench/README.md",
]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1500


def test_every_command_that_readme_shows_exists_and_none_is_missing() -> None:
    shown = set(re.findall(r"(?:`|^    )edgeft ([a-z]+)\b", README, re.MULTILINE))
    assert shown == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_annotated_tree_names_the_folders_of_the_package() -> None:
    tree = README[README.index("## The package") :]
    named = {name for line in re.findall(r"^      (\S.*)$", tree, re.MULTILINE) for name in re.findall(r"(\w+)/", line)}
    folders = {path.parent.name for path in (TOP / "edgeft").glob("*/__init__.py")} - {"demo"}
    assert named == folders


@pytest.mark.parametrize("name", DOCS)
def test_every_file_that_is_named_exists(name: str) -> None:
    text = (TOP / name).read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:scripts|tests|recipes|edgeft)/[\w./-]+\.(?:py|sh|md|yaml)\b", text):
        assert (TOP / path).is_file(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((TOP / name).parent / path).is_file(), path


def test_the_code_that_is_shown_is_that_of_the_file() -> None:
    """Of the walk through a new architecture."""
    text = (TOP / "edgeft/arch/README.md").read_text(encoding="utf-8")
    code = {line.strip() for line in (TOP / "edgeft/arch/exaone.py").read_text(encoding="utf-8").splitlines()}
    shown = [line.strip() for line in re.findall(r"^    (.+)$", text, re.MULTILINE) if "scripts/" not in line]
    assert len(shown) > 5
    assert [line for line in shown if line not in code] == []
