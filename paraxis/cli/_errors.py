"""How commands fail: one paragraph on stderr and an exit code; ``--debug`` shows the traceback instead.

Exit codes follow the usual conventions: 1 for a failure, 2 for wrong usage, and 128 plus the number of the signal that
ended the command.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED, USAGE = 1, 2
MAX_MESSAGE = 1200
"""Characters of an error message that are shown without ``--debug``."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


class UsageError(ValueError):
    """The options make no sense; nothing has been done yet."""


class Terminated(KeyboardInterrupt):
    """A signal asked this process to end. It cleans up first, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """Print an error as one paragraph and exit with its code."""
    try:
        yield
        sys.stdout.flush()  # otherwise a closed pipe is noticed too late
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        print_error("interrupted" if number == signal.SIGINT else f"terminated by {signal.Signals(number).name}")
        raise typer.Exit(128 + number) from None
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if debug:
            raise
        text = _message(error)
        print_error(text if len(text) < MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ... (use --debug to see all of it)")
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILED) from None


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM and SIGHUP, so that temporary files and ranks are cleaned up.

    Not in a rank that a launcher has started: an exception cannot interrupt a collective, and the launcher cleans up.
    """

    def terminate(number: int, _: Any) -> None:
        raise Terminated(number)

    names = () if "TORCHELASTIC_RUN_ID" in os.environ else ("SIGTERM", "SIGHUP")
    previous: dict[int, Any] = {}
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            previous[number] = signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def check_output(option: str, path: Path | None) -> None:
    """Raise before the work starts if a file cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a directory: give a file name")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {str(path)!r}: the directory {str(folder)!r} does not exist")
    new = not path.exists()
    try:
        with open(path, "a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def renamed_option(old: str, new: str) -> None:
    """Warn that an option has a new name, also on stderr: Python hides deprecation warnings of libraries."""
    text = f"{old} is deprecated and will be removed in the next version: use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    typer.echo(f"paraxis: warning: {text}", err=True)


def print_error(text: str) -> None:
    """One paragraph on stderr, red on a terminal."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"paraxis: {text}", style="red", markup=False, highlight=False)


def _message(error: Exception) -> str:
    """The message of an error on one line."""
    text = " ".join(str(getattr(error, "summary", error)).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    kind = type(error).__name__
    if not text:
        return f"{kind} without a message (use --debug to see where)"
    return text if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{kind}: {text}"
