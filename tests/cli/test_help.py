"""--help: fast, complete, and in words that a user can act on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from paraxis import __version__
from paraxis.cli import COMMANDS, app
from paraxis.cli import _options as options
from paraxis.config import OBJECTIVES

PARAXIS = [sys.executable, "-c", "from paraxis.cli import main; main()"]


def test_help_imports_no_torch() -> None:
    code = "import sys, paraxis.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(name in text for name in COMMANDS)


def test_help_is_fast() -> None:
    """By CPU time, the best of three: other processes may be running."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([*PARAXIS, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.5


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_every_option_a_help_text(name: str) -> None:
    text = CliRunner().invoke(app, [name, "--help"]).output
    assert f"paraxis {name}" in text.partition("Example")[2]
    assert "--debug" in text
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    for option in command.params:
        assert getattr(option, "hidden", False) or option.name == "help" or option.help, option.name


WITH_JSON = ["plan", "explain", "diff", "export", "verify", "bench", "doctor", "calibrate", "demo"]


@pytest.mark.parametrize("name", WITH_JSON)
def test_commands_print_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(app, [name, "--help"]).output


def test_objectives_are_those_of_the_library() -> None:
    """The command line has its own list, because it must not import torch for --help."""
    assert options.OBJECTIVES == OBJECTIVES


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"paraxis {__version__}"
