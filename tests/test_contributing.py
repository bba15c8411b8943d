"""CONTRIBUTING.md: its map of modules is complete and up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools import module_map
from tools.page import ROOT


def test_the_map_is_up_to_date() -> None:
    """What the docstrings say now is between the markers."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text == module_map.insert(text, module_map.module_map()), "run: make reference"


def test_every_module_is_on_the_map() -> None:
    """With a sentence about it."""
    lines = module_map.lines(ROOT / "paraxis")
    modules = [p for p in (ROOT / "paraxis").rglob("*.py") if p.name != "__init__.py"]
    packages = [p.parent for p in (ROOT / "paraxis").rglob("__init__.py") if p.parent != ROOT / "paraxis"]
    named = [line for line in lines if re.match(r" {2,8}\S+(\.py|/)( |$)", line)]
    assert len(named) == len(modules) + len(packages)
    assert not [line for line in named if len(line.split()) < 2], "a module without a docstring"


def test_summary_is_the_first_sentence(tmp_path: Path) -> None:
    """The first sentence, over several lines, without markup."""
    path = tmp_path / "module.py"
    path.write_text('"""Reads ``a.b`` from\n:class:`~x.Y`. More of it.\n\nAnd more."""\n')
    assert module_map.summary(path) == "Reads a.b from x.Y"


def test_markers_are_required() -> None:
    """A page without them is an error, not silently unchanged."""
    with pytest.raises(ValueError, match="module map"):
        module_map.insert("# No map", "map")
