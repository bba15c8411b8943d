"""A Markdown file of the repository: its headings, its links, and where they lead."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Link:
    """A link or an image: its address, and the text shown for it if that is ``code``."""

    href: str
    code: str = ""
    image: bool = False


@dataclass
class Page:
    """One Markdown file; ``path`` is its path in the repository."""

    path: str
    text: str
    tokens: list[Token] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = MarkdownIt("commonmark", {"html": True}).enable(["table"]).parse(self.text)

    @cached_property
    def anchors(self) -> set[str]:
        """What a link can name after ``#``: the anchors that code hosts, and the site, give to headings."""
        found: set[str] = set()
        for opening, inline in zip(self.tokens, self.tokens[1:]):
            if opening.type == "heading_open":
                anchor = re.sub(r"[^\w\- ]", "", plain_text(inline.children or []).lower()).replace(" ", "-")
                number = 1
                unique = anchor
                while unique in found:
                    unique, number = f"{anchor}-{number}", number + 1
                found.add(unique)
        return found

    def links(self) -> Iterator[Link]:
        """Every link and image of the page."""
        for token in self.tokens:
            children = token.children or []
            for i, child in enumerate(children):
                if child.type == "link_open":
                    end = next(j for j in range(i, len(children)) if children[j].type == "link_close")
                    shown = children[i + 1 : end]
                    code = shown[0].content if [c.type for c in shown] == ["code_inline"] else ""
                    yield Link(str(child.attrs["href"]), code)
                elif child.type == "image":
                    yield Link(str(child.attrs["src"]), image=True)

    def target(self, href: str) -> tuple[str, str]:
        """The path in the repository, and the anchor, that a link of this page leads to."""
        path, _, anchor = href.partition("#")
        folder = posixpath.dirname(self.path)
        return (posixpath.normpath(posixpath.join(folder, path)) if path else self.path), anchor


def plain_text(tokens: list[Token]) -> str:
    """Inline tokens without their markup."""
    return "".join(token.content for token in tokens if token.type in ("text", "code_inline"))


def load(root: Path = ROOT) -> dict[str, Page]:
    """All pages by their path: those in docs/ and the Markdown files beside it."""
    paths = [*sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*.md"))]
    names = [path.relative_to(root).as_posix() for path in paths]
    return {name: Page(name, path.read_text(encoding="utf-8")) for name, path in zip(names, paths)}
