"""Tables that lose nothing: in a pipe they are as wide as their content, in a narrow terminal cells are folded."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

UNLIMITED = 10_000


class WideTable(Table):
    """A table that is never cut off.

    Where there is no terminal, rich assumes 80 columns and would shorten every name. The console is widened then, since
    it crops what is printed to its width.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            needed = Measurement.get(console, options.update(max_width=UNLIMITED), self).maximum
            if needed > options.max_width:
                console.width = max(console.width, needed)
                options = options.update(width=needed, max_width=needed)
        yield from super().__rich_console__(console, options)
