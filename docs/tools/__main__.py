"""Run in docs/: ``python -m tools COMMAND``.

- ``reference``: write the generated pages and the module map of CONTRIBUTING.md (``make reference``).
- ``transcripts [PAGE[=TEXT] ...]``: run the commands shown in the pages again and paste what they print.
- ``screenshots [MODEL ...]``: pictures of the report.
"""

from __future__ import annotations

import sys

from . import module_map, reference, screenshots, transcripts
from .page import load


def main(arguments: list[str]) -> int:
    """Run one command."""
    match arguments:
        case ["reference"]:
            reference.write()
            module_map.write()
        case ["transcripts", *wanted]:
            for each in wanted or [""]:
                name, _, only = each.partition("=")
                for path, page in load().items():
                    if "<!-- transcript" in page.text and name in path:
                        transcripts.write(path, only=only)
        case ["screenshots", *wanted]:
            screenshots.renew(wanted)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
