"""Run in docs/: `python -m maker build OUT`, `... transcripts [PAGE[=COMMAND] ...]`, `... screenshots [MODEL ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from . import screenshots
from .links import problems
from .pages import load
from .site import build
from .transcripts import write


def main(arguments: list[str]) -> int:
    match arguments:
        case ["build", out]:
            pages = load()
            found = problems(pages)
            if found:
                print("\n".join(found), file=sys.stderr)
                return 1
            print(f"{build(pages, Path(out))} pages in {out}")
        case ["transcripts", *wanted]:
            for each in wanted or [""]:
                name, _, only = each.partition("=")
                for path, page in load().items():
                    if "<!-- transcript" in page.text and name in path:
                        write(path, only=only)
        case ["screenshots", *wanted]:
            screenshots.renew(wanted)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
