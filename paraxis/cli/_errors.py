"""How the commands fail: one paragraph on stderr and an exit code, or the traceback for those who ask for it.

Exit codes are those of other programs: 1 for what failed, 2 for a command that makes no sense as it was given, and 128
and the number of the signal for one that was ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED, USAGE = 1, 2
LONGEST = 1200
"""Characters of a message; more are for those who ask for the traceback."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class UsageError(ValueError):
    """The command makes no sense as it was given; nothing has been done yet."""


class Ended(KeyboardInterrupt):
    """A signal asks this process to end. What it has begun is cleaned up, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def told(debug: bool) -> Iterator[None]:
    """Say what went wrong in one paragraph and exit."""
    try:
        yield
        sys.stdout.flush()  # or a reader that has gone is noticed too late
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Ended) else signal.SIGINT
        say("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
        raise typer.Exit(128 + number) from None
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if debug:
            raise
        text = _text(error)
        say(text if len(text) < LONGEST else f"{text[:LONGEST]} ... (`--debug` shows all of it)")
        raise typer.Exit(USAGE if isinstance(error, UsageError) else FAILED) from None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let the signals that end a process do so by way of an exception, so that files and ranks are cleaned up.

    Not in a rank that a launcher has started: it may wait for others, which no exception ends, and its launcher cleans
    up after it.
    """

    def end(number: int, _: Any) -> None:
        raise Ended(number)

    names = () if "TORCHELASTIC_RUN_ID" in os.environ else ("SIGTERM", "SIGHUP")
    before: dict[int, Any] = {}
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores one of them
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_output(option: str, path: Path | None) -> None:
    """Say that a file cannot be written before the work is done."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a directory: give the name of a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {str(path)!r}: there is no directory {str(folder)!r}; make it, or name another")
    new = not path.exists()
    try:
        with open(path, "a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be written ({error.strerror}): name another file") from error


def say(text: str) -> None:
    """One paragraph on stderr, red on a terminal."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"paraxis: {text}", style="red", markup=False, highlight=False)


def _text(error: Exception) -> str:
    """What an error says, in one line; of a bare one its name."""
    text = " ".join(str(getattr(error, "in_short", error)).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    plain = type(error).__name__
    if not text:
        return f"{plain}, of which nothing more is known (`--debug` shows where)"
    return text if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{plain}: {text}"
