"""The command line, `paraxis`.

One module per command, each with a function `command`; a new one is added to `COMMANDS` and nowhere else.
Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from . import bench, calibrate, code, demo, diff, doctor, explain, export, generate, plan, verify
from ._errors import ended_by_signals

COMMANDS: dict[str, Callable[..., Any]] = {
    "plan": plan.command,
    "explain": explain.command,
    "diff": diff.command,
    "code": code.command,
    "export": export.command,
    "verify": verify.command,
    "generate": generate.command,
    "bench": bench.command,
    "doctor": doctor.command,
    "calibrate": calibrate.command,
    "demo": demo.command,
}

app = typer.Typer(
    name="paraxis",
    help="Makes any PyTorch model tensor-parallel by itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paraxis {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Makes any PyTorch model tensor-parallel by itself."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """The entry point of the console script."""
    with ended_by_signals():
        app()
