"""Whether every link leads somewhere, in the repository: pages, anchors, images, source files and names in them.

The site's own check (``mkdocs build --strict``) sees neither README.md nor the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .page import ROOT, Page

EXTERNAL = re.compile(r"^(https?|mailto):")
NAME = re.compile(r"^(?!.*\.py$)(\w+\.)*(\w+)(\(\))?$")
"""The text of a link to a Python file that names something defined there, as in ``[`plan_model()`](paraxis/x.py)``."""


def problems(pages: dict[str, Page], root: Path = ROOT) -> list[str]:
    """A line for every link that leads nowhere."""
    found = []
    for page in pages.values():
        for link in page.links():
            if EXTERNAL.match(link.href):
                continue
            path, anchor = page.target(link.href)
            where = f"{page.path}: {'image' if link.image else 'link'} {link.href!r}"
            name = NAME.match(link.code)
            if path not in pages and not (root / path).exists():
                found.append(f"{where}: there is no file {path!r}")
            elif anchor and path in pages and anchor not in pages[path].anchors:
                found.append(f"{where}: {path!r} has no heading with this anchor")
            elif anchor and path not in pages:
                found.append(f"{where}: only pages have anchors")
            elif path.endswith(".py") and name and name[2] not in set(_defined(root / path)):
                found.append(f"{where}: {path!r} does not define {name[2]!r}")
    return found


def _defined(path: Path) -> Iterator[str]:
    """The module's own name, and every class, function, method and constant in it."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
