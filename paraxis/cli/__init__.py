"""The command line, `paraxis`.

One module per command, each with a function `command`. To add a command, add it to `COMMANDS`.
No module here imports torch before a command runs, so that `--help` prints at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from . import bench, calibrate, code, demo, diff, doctor, explain, export, generate, plan, serve, verify
from ._errors import signals_raise

COMMANDS: dict[str, Callable[..., Any]] = {
    "plan": plan.command,
    "explain": explain.command,
    "diff": diff.command,
    "code": code.command,
    "export": export.command,
    "verify": verify.command,
    "generate": generate.command,
    "serve": serve.command,
    "bench": bench.command,
    "doctor": doctor.command,
    "calibrate": calibrate.command,
    "demo": demo.command,
}

app = typer.Typer(
    name="paraxis",
    help="Tensor parallelism for any PyTorch model, without a hand-written plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"paraxis {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Tensor parallelism for any PyTorch model, without a hand-written plan."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run the command line: the entry point of the console script."""
    with signals_raise():
        app()
