"""The code blocks of a page, and what the tests and ``make transcripts`` do with them.

A comment before a block says it; several are joined by semicolons. All blocks of a page run in one directory.

- ``<!-- run -->``: the tests run this Python block; ``<!-- run: 2 -->`` on two ranks, ``<!-- run: 2 long -->`` only in
  ``make test-long``.
- ``<!-- file: run.py -->``: the block is this file for the commands that follow.
- ``<!-- transcript -->``: a console block; ``make transcripts`` pastes what its commands print (transcripts.py).
- ``<!-- setup ... -->``: Python that runs and is not shown; ``<!-- setup: 2 ... -->`` on two ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from .page import Page

SHELL = ("console", "sh", "bash", "shell")
_INDENTED = re.compile(r"(paraxis|make|pip|python3?|torchrun) ")
"""How an indented block of commands begins."""
_COMMENT = re.compile(r"<!--\s*((?:run|file|transcript)\b.*?)\s*-->\s*$", re.S)
_SETUP = re.compile(r"<!--\s*setup(?::\s*(\d+))?\s*\n(.*?)-->\s*$", re.S)


@dataclass
class Block:
    """A code block; ``line`` is the number of its first line in the file, ``directives`` the comment before it."""

    page: str
    line: int
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int | None:
        """The number of ranks that run it; None if it is not run."""
        if "run" not in self.directives:
            return None
        return int((self.directives["run"] or "1").split()[0])

    @property
    def takes_long(self) -> bool:
        """Whether it runs in ``make test-long`` only."""
        return self.directives.get("run", "").endswith("long")

    @property
    def where(self) -> str:
        """The page and the line, for messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The command lines of a shell block, without their output."""
        prompts = self.language == "console"
        lines = iter(self.text.splitlines())
        for line in lines:
            if prompts and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
            while line.endswith("\\"):
                line = line[:-1] + next(lines, "").removeprefix("> ")
            if line.strip() and not line.startswith("#"):
                yield line


def blocks_of(page: Page) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    directives: dict[str, str] = {}
    for token in page.tokens:
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            setup, comment = _SETUP.match(token.content), _COMMENT.match(token.content)
            if setup:
                found.append(Block(page.path, line + 1, "python", setup[2], {"run": setup[1] or "1"}))
            elif comment:
                pairs = (part.partition(":") for part in comment[1].split(";"))
                directives = {key.strip(): value.strip() for key, _, value in pairs}
            continue
        if token.type == "fence":
            found.append(Block(page.path, line + 1, token.info.strip(), token.content, directives))
        elif token.type == "code_block":
            language = "sh" if _INDENTED.match(token.content) else "text"
            found.append(Block(page.path, line, language, token.content, directives))
        directives = {}
    return found


def words_of(command: str) -> list[list[str]]:
    """The words of every program in a command line, without environment variables and redirections."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    programs: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set("|&;"):
            programs.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        elif programs[-1] or not re.match(r"^\w+=", word):
            programs[-1].append(word)
    return [words for words in programs if words]
