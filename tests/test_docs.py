"""The documentation: links lead somewhere, code compiles and runs, commands exist with these options."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from maker import blocks, links, pages, site, transcripts
from marks import long

from doc_blocks import forget, run_block, run_on_rank

ALL = pages.load()
BLOCKS = {path: blocks.blocks_of(page) for path, page in ALL.items()}
SLOW = {"docs/guides/training.md", "docs/guides/lora.md"}
RUN = [
    pytest.param(path, marks=long if path in SLOW else ())
    for path, found in BLOCKS.items()
    if any(block.ranks for block in found)
]


def test_links_lead_somewhere() -> None:
    assert not links.problems(ALL)


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    text = "# A\n[a](b.md) [c](#a) [d](#b) ![e](f.png) [g](there.py#h) [i](there.py) [j](https://example.org)"
    found = links.problems({"a.md": pages.Page("a.md", text)}, tmp_path)
    assert [line.split("'")[1] for line in found if line.startswith("a.md")] == ["b.md", "#b", "f.png", "there.py#h"]


def test_python_compiles() -> None:
    count = 0
    for block in (block for found in BLOCKS.values() for block in found):
        if block.language == "python" and not block.page.startswith("docs/reference"):
            compile(textwrap.dedent(block.text), block.where, "exec")
            count += 1
    assert count > 20


def command_lines() -> list[tuple[str, list[str]]]:
    """Every program that a shell block runs, with where it is."""
    return [
        (block.where, words)
        for found in BLOCKS.values()
        for block in found
        if block.language in blocks.SHELL
        for line in block.commands()
        for words in blocks.words_of(line)
    ]


def test_commands_exist() -> None:
    """The options of `paraxis` commands are real ones; so are the targets of make."""
    from typer.main import get_command

    from paraxis.cli import app

    group: Any = get_command(app)
    targets = set(re.findall(r"^([\w-]+):", (pages.ROOT / "Makefile").read_text(), re.M))
    count = 0
    for where, words in command_lines():
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, where
        if "paraxis" not in words or words[0] in ("pip", "python", "git", "cd"):
            continue
        _, *arguments = words[words.index("paraxis") :]
        if not arguments or arguments[0].startswith("-"):
            continue
        assert arguments[0] in group.commands, f"{where}: there is no command {arguments[0]!r}"
        if "--help" not in arguments:
            try:
                group.commands[arguments[0]].make_context(arguments[0], arguments[1:])
            except Exception as error:
                pytest.fail(f"{where}: paraxis {' '.join(arguments)}: {error}")
        count += 1
    assert count > 20


@pytest.mark.parametrize("path", RUN)
def test_blocks_run(path: str, ranks: Any, tmp_path: Path) -> None:
    """In their order, in one directory; on ranks they print the same or, but for the first, nothing."""
    folder = str(tmp_path)
    for block in BLOCKS[path]:
        if block.takes_long and not os.environ.get("PARAXIS_LONG"):
            continue
        if block.ranks == 1:
            run_block(path, block.where, block.text, folder)
        elif block.ranks:
            ranks(block.ranks).run(run_on_rank, path, block.where, block.text, folder)
    forget(folder)
    for world in {block.ranks for block in BLOCKS[path] if block.ranks and block.ranks > 1}:
        ranks(world).run(forget, folder)


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_block("page.md", "page.md:3", "1 / 0", str(tmp_path))


def test_the_site(tmp_path: Path) -> None:
    """Every page is there, links lead to files of the site, and nothing comes from elsewhere."""
    out = tmp_path / "site"
    assert site.build(ALL, out) == len(ALL)
    assert "parallelize_model(" in re.sub(r"<[^>]+>", "", (out / "reference/api.html").read_text())
    assert "--memory-limit" in (out / "reference/cli.html").read_text()
    for file in out.rglob("*.html"):
        text = file.read_text()
        assert "%%" not in text and not re.search(r'(?:src|<link[^>]*href)="https?:', text), file
        for href in re.findall(r'(?:href|src)="([^"#]+)', text):
            assert href.startswith(("https:", "http:")) or (file.parent / href).is_file(), f"{file.name}: {href}"


def test_transcripts_say_nothing_of_the_machine() -> None:
    here = [str(pages.ROOT), str(Path.home()), "/tmp/", "site-packages"]
    for path, found in BLOCKS.items():
        for block in found:
            assert "transcript" not in block.wanted or not any(place in block.text for place in here), path
            assert "transcript" not in block.wanted or "\n" in block.text.strip(), f"{block.where}: make transcripts"


def test_a_transcript(tmp_path: Path) -> None:
    text = "<!-- transcript: lines=2 -->\n```console\n$ seq 3\nold\n$ pwd\n```\n"
    (tmp_path / "a.md").write_text(text)
    transcripts.write("a.md", tmp_path)
    assert (tmp_path / "a.md").read_text() == text.replace("old", "1\n2\n...").replace("$ pwd\n", "$ pwd\n.\n")
    with pytest.raises(RuntimeError, match=r"a\.md:3: 'false' ended with 1"):
        transcripts.renew("<!-- transcript -->\n```console\n$ false\n```\n", "a.md")
