"""The code blocks of a page, and what is to be done with them.

A comment before a block says it: `<!-- run -->` (a Python block that is run alone), `<!-- run: 2 -->` (on two ranks;
`<!-- run: 2 long -->` with `PARAXIS_LONG=1` alone), `<!-- file: run.py -->` (the block is this file for the commands
that follow), `<!-- transcript -->` (a console block whose output is what its commands give: transcripts.py). Several
are joined by semicolons. `<!-- setup ... -->` holds Python that is run and not shown, `<!-- setup: 2 ... -->` on two
ranks. All blocks of a page run in one directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from .pages import Page

SHELL = ("console", "sh", "bash", "shell")
_INDENTED = re.compile(r"(paraxis|make|pip|python3?|torchrun) ")
"""How an indented block begins that holds commands."""
_COMMENT = re.compile(r"<!--\s*((?:run|file|transcript)\b.*?)\s*-->\s*$", re.S)
_SETUP = re.compile(r"<!--\s*setup(?::\s*(\d+))?\s*\n(.*?)-->\s*$", re.S)


@dataclass
class Block:
    """A code block. ``line`` is where its first line is in the file, counted from 1."""

    page: str
    line: int
    language: str
    text: str
    wanted: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int | None:
        """On how many ranks it is run; None if it is not."""
        return int(self.wanted["run"].split()[0] if self.wanted["run"] else 1) if "run" in self.wanted else None

    @property
    def takes_long(self) -> bool:
        return self.wanted.get("run", "").endswith("long")

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The command lines of a shell block, without what they print."""
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
    """The blocks of a page in their order."""
    found: list[Block] = []
    wanted: dict[str, str] = {}
    for token in page.tokens:
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            setup, comment = _SETUP.match(token.content), _COMMENT.match(token.content)
            if setup:
                found.append(Block(page.path, line + 1, "python", setup[2], {"run": setup[1] or "1"}))
            elif comment:
                pairs = (part.partition(":") for part in comment[1].split(";"))
                wanted = {key.strip(): value.strip() for key, _, value in pairs}
            continue
        if token.type == "fence":
            found.append(Block(page.path, line + 1, token.info.strip(), token.content, wanted))
        elif token.type == "code_block":
            language = "sh" if _INDENTED.match(token.content) else "text"
            found.append(Block(page.path, line, language, token.content, wanted))
        wanted = {}
    return found


def words_of(command: str) -> list[list[str]]:
    """The words of every program that a command line runs, without variables set before and files it writes to."""
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
