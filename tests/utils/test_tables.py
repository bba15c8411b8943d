"""Tables in pipes and in narrow terminals: no character is lost."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from paraxis.utils.tables import WideTable

NAME = "model.layers.*.a_module_with_a_very_long_name.that_80_columns_do_not_hold.not_by_far.q_proj.weight"


def printed(console: Console) -> str:
    table = WideTable("name", "size", caption="A caption.")
    table.columns[0].overflow = "fold"
    table.add_row(NAME, "64×64")
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_shows_names_on_one_line() -> None:
    text = printed(Console(file=io.StringIO(), width=80))
    assert NAME in text and "64×64" in text


def test_a_narrow_terminal_folds_names() -> None:
    text = printed(Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 40 and "…" not in text
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == NAME


def test_rich_print_in_a_pipe() -> None:
    """As a user does it: `rich.print(plan.table())`."""
    code = f"""
import rich
from paraxis.plan import LayerPlan, Plan
layer = LayerPlan({NAME!r}, "linear", "row", True, True, False, (64, 64), (64, 32))
rich.print(Plan(2, [layer]).table())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert NAME in found.stdout and "all-reduce" in found.stdout and "local shape" in found.stdout


@pytest.mark.parametrize("width", [80, 200])
def test_a_console_is_widened_only_as_far_as_needed(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    printed(console)
    assert console.width == max(width, len(NAME) + 12)
