"""The map of modules in CONTRIBUTING.md, from the first sentence of every module's docstring."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from .page import ROOT

BEGIN, END = "<!-- module map: begin (make reference) -->", "<!-- module map: end -->"
ORDER = [
    "api",
    "config",
    "context",
    "errors",
    "plan",
    "passes",
    "optimize",
    "runtime",
    "capture",
    "solver",
    "rules",
    "placement",
    "graph",
    "tensor",
    "distributed",
    "layers",
    "kernels",
    "data_parallel",
    "weights",
    "export",
    "report",
    "integrations",
    "serving",
    "cli",
    "compat",
    "utils",
]
"""From what a reader looks for first to what it stands on. What is not named here comes last."""
COLUMN, WIDTH = 34, 120


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, without markup and full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.][.!?]) (?=[A-Z`])", first)[0]
    return re.sub(r":\w+:`~?([^`]+)`|`+([^`]+)`+", lambda found: found[1] or found[2], sentence).rstrip(".")


def lines(folder: Path, depth: int = 1) -> list[str]:
    """The modules of a package and, below them, its subpackages."""
    found = []
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    packages = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    for path in sorted([*modules, *packages], key=lambda path: _position(path, depth)):
        package = path.is_dir()
        name = f"{'  ' * depth}{path.name}{'/' if package else ''}"
        text = summary(path / "__init__.py" if package else path)
        wrapped = textwrap.wrap(text, WIDTH - COLUMN) or [""]
        found.append(f"{name:<{COLUMN - 1}} {wrapped[0]}".rstrip())
        found += [" " * COLUMN + line for line in wrapped[1:]]
        if package:
            found += lines(path, depth + 1)
    return found


def _position(path: Path, depth: int) -> tuple[int, bool, str]:
    order = ORDER.index(path.stem) if depth == 1 and path.stem in ORDER else len(ORDER)
    return order, path.is_dir(), path.name


def module_map(root: Path = ROOT) -> str:
    """The map as a Markdown code block."""
    return "\n".join(["```text", "paraxis/", *lines(root / "paraxis"), "```"])


def insert(text: str, generated: str) -> str:
    """A page with what stands between the markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def write(root: Path = ROOT) -> None:
    """Update CONTRIBUTING.md."""
    path = root / "CONTRIBUTING.md"
    path.write_text(insert(path.read_text(encoding="utf-8"), module_map(root)), encoding="utf-8")
