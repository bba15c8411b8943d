"""The pages: Markdown files of the repository, what is in them, and where each of them is on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
GENERATED = re.compile(r"<!-- generated: (\w+) -->")
"""Stands on a page that `reference.py` writes; in the repository there is only a word about that."""
NAVIGATION: dict[str, list[str]] = {
    "Start": ["docs/index.md", "docs/tutorial.md", "docs/report.md", "docs/how-it-works.md"],
    "Guides": [
        "docs/guides/plans.md",
        "docs/guides/saved-plans.md",
        "docs/guides/modules.md",
        "docs/guides/rules.md",
        "docs/guides/training.md",
        "docs/guides/data-parallel.md",
        "docs/guides/lora.md",
        "docs/guides/compiled.md",
        "docs/guides/multi-node.md",
        "docs/guides/export.md",
        "docs/guides/troubleshooting.md",
    ],
    "Reference": ["docs/reference/api.md", "docs/reference/cli.md", "docs/coming-from.md", "docs/limits.md"],
    "Measured": [f"docs/results/{name}.md" for name in ("zoo", "generation", "weights", "plans", "bench", "loading")],
    "Project": ["CONTRIBUTING.md"],
}


FOLDERS = {"docs/guides/": "Guides", "docs/results/": "Measured"}
"""Pages in these are in the navigation also if it does not name them."""


def navigation(pages: Iterable[str]) -> dict[str, list[str]]:
    """The sections with the paths of their pages."""
    found = {section: list(paths) for section, paths in NAVIGATION.items()}
    for path in sorted(pages):
        section = next((s for folder, s in FOLDERS.items() if path.startswith(folder)), None)
        if section is not None and path not in found[section]:
            found[section].append(path)
    return found


def parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


@dataclass
class Page:
    """One Markdown file; ``path`` is its path in the repository."""

    path: str
    text: str
    tokens: list[Token] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = parser().parse(self.text)

    @cached_property
    def headings(self) -> list[tuple[int, str, str]]:
        """(level, text, anchor) of every heading; anchors are those that code hosts make."""
        found: list[tuple[int, str, str]] = []
        seen: dict[str, int] = {}
        for opening, inline in zip(self.tokens, self.tokens[1:]):
            if opening.type == "heading_open":
                text = plain(inline)
                anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
                count = seen[anchor] = seen.get(anchor, -1) + 1
                found.append((int(opening.tag[1]), text, f"{anchor}-{count}" if count else anchor))
        return found

    @property
    def title(self) -> str:
        return next((text for level, text, _ in self.headings if level == 1), self.path)

    @property
    def url(self) -> str:
        return url_of(self.path)

    def links(self) -> Iterator[tuple[str, bool]]:
        """Every link and, with True, every image."""
        for token in self.tokens:
            for child in token.children or ():
                if child.type == "link_open":
                    yield str(child.attrs["href"]), False
                elif child.type == "image":
                    yield str(child.attrs["src"]), True

    def target(self, href: str) -> tuple[str, str]:
        """The path in the repository, and the anchor, that a link of this page leads to."""
        path, _, anchor = href.partition("#")
        folder = posixpath.dirname(self.path)
        return (posixpath.normpath(posixpath.join(folder, path)) if path else self.path), anchor


def plain(inline: Token) -> str:
    """The text of a heading without its markup."""
    return "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))


def url_of(path: str) -> str:
    """Where a file of the repository is on the site; program files have a page that shows them."""
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside.removesuffix('.md')}.html" if inside.endswith(".md") else inside
    if path.endswith(".md"):
        return f"{path.removesuffix('.md').lower()}.html"
    return f"source/{path}.html"


def load(root: Path = ROOT) -> dict[str, Page]:
    """All pages by their path: those in docs/ and the Markdown files beside it. Generated ones are complete."""
    from . import reference

    pages = {}
    for path in [*sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*.md"))]:
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        wanted = GENERATED.search(text)
        pages[name] = Page(name, reference.PAGES[wanted[1]]() if wanted else text)
    return pages
