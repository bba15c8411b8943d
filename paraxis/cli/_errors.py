"""How the commands fail: one paragraph on stderr and an exit code, or the traceback for those who ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

FAILED, INTERRUPTED = 1, 130

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def told(debug: bool) -> Iterator[None]:
    """Say what went wrong in one paragraph and exit."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        _say(text if len(text) < 1200 else f"{text[:1200]} ... (`--debug` shows all of it)")
        raise typer.Exit(FAILED) from None


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"paraxis: {text}", style="red", markup=False, highlight=False)
