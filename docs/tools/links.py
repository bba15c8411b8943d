"""Whether every link of every page leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from .pages import ROOT, Page, navigation

OUTSIDE = re.compile(r"^(https?|mailto):")


def problems(pages: dict[str, Page], root: Path = ROOT) -> list[str]:
    """A line for every link, anchor or image that is not there, and for pages that cannot be reached."""
    found = []
    for page in pages.values():
        for href, image in page.links():
            if OUTSIDE.match(href):
                continue
            path, anchor = page.target(href)
            where = f"{page.path}: {'image' if image else 'link'} {href!r}"
            if path not in pages and not (root / path).is_file():
                found.append(f"{where}: there is no file {path!r}")
            elif anchor and path in pages and anchor not in {a for _, _, a in pages[path].headings}:
                found.append(f"{where}: {path!r} has no heading with this anchor")
            elif anchor and path not in pages:
                found.append(f"{where}: only pages have anchors")
    shown = [path for paths in navigation(pages).values() for path in paths]
    found += [f"the navigation names {path!r}, which is not there" for path in shown if path not in pages]
    lost = [path for path in pages if path.startswith("docs/") and path not in shown]
    found += [f"{path!r} is not in the navigation (docs/maker/pages.py)" for path in lost]
    return found
