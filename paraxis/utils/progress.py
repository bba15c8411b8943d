"""A progress line on the terminal: the current stage and the time it has taken so far."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm


@contextmanager
def stage(text: str, shown: bool = True) -> Iterator[None]:
    """Show ``text`` and a running clock while the body runs; nothing if standard error is not a terminal.

    The line disappears at the end. Stages may be nested, and may contain progress bars.
    """
    if not shown or not sys.stderr.isatty():
        yield
        return
    done = Event()
    with tqdm(total=0, desc=text, bar_format="{desc} {elapsed}", leave=False, file=sys.stderr) as line:

        def tick() -> None:
            while not done.wait(0.5):
                line.refresh()

        clock = Thread(target=tick, name="paraxis-progress", daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()
