"""The documentation: links lead somewhere, code compiles and runs, commands and options exist, the site builds."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tools import blocks, links, page, reference, transcripts

from doc_blocks import forget, run_block, run_on_rank

ALL = page.load()
BLOCKS = {path: blocks.blocks_of(found) for path, found in ALL.items()}
SLOW = {"docs/guides/training.md", "docs/guides/lora.md"}
RUN = [
    pytest.param(path, marks=pytest.mark.long if path in SLOW else ())
    for path, found in BLOCKS.items()
    if any(block.ranks for block in found)
]


def test_links_lead_somewhere() -> None:
    """Files, anchors, images, and names in source files."""
    assert not links.problems(ALL)


def test_broken_links_are_found(tmp_path: Path) -> None:
    """A line for each link that leads nowhere, and none for the others."""
    (tmp_path / "there.py").write_text("def known(): ...")
    text = (
        "# A\n[a](b.md) [c](#a) [d](#b) ![e](f.png) [g](there.py#h) [i](there.py) [j](https://example.org) "
        "[`known`](there.py) [`there.known()`](there.py) [`unknown`](there.py) [`there.py`](there.py)"
    )
    found = links.problems({"a.md": page.Page("a.md", text)}, tmp_path)
    assert [line.split("'")[1] for line in found] == ["b.md", "#b", "f.png", "there.py#h", "there.py"]
    assert "does not define 'unknown'" in found[-1]


def test_python_compiles() -> None:
    """Every Python block, run or not."""
    count = 0
    for block in (block for found in BLOCKS.values() for block in found):
        if block.language == "python" and not block.page.startswith("docs/reference"):
            compile(textwrap.dedent(block.text), block.where, "exec")
            count += 1
    assert count > 20


def command_lines() -> list[tuple[str, list[str]]]:
    """(page and line, words) of every program in a shell block."""
    return [
        (block.where, words)
        for found in BLOCKS.values()
        for block in found
        if block.language in blocks.SHELL
        for line in block.commands()
        for words in blocks.words_of(line)
    ]


def test_commands_exist() -> None:
    """Commands of `paraxis` and their options, and targets of make."""
    from typer.main import get_command

    from paraxis.cli import app

    group: Any = get_command(app)
    targets = set(re.findall(r"^([\w-]+):", (page.ROOT / "Makefile").read_text(), re.M))
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
        hidden = {name for p in group.commands[arguments[0]].params if getattr(p, "hidden", False) for name in p.opts}
        assert not hidden & set(arguments), f"{where}: {hidden & set(arguments)} is deprecated"
        count += 1
    assert count > 20


@pytest.mark.parametrize("path", RUN)
def test_blocks_run(path: str, ranks: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In order, in one directory, in this process or on ranks."""
    folder = str(tmp_path)
    for block in BLOCKS[path]:
        if block.takes_long and not request.config.getoption("--long"):
            continue
        if block.ranks == 1:
            run_block(path, block.where, block.text, folder)
        elif block.ranks:
            ranks(block.ranks).run(run_on_rank, path, block.where, block.text, folder)
    forget(folder)
    for world in {block.ranks for block in BLOCKS[path] if block.ranks and block.ranks > 1}:
        ranks(world).run(forget, folder)


def test_a_failing_block_raises(tmp_path: Path) -> None:
    """With the block's own error."""
    with pytest.raises(ZeroDivisionError):
        run_block("page.md", "page.md:3", "1 / 0", str(tmp_path))


@pytest.mark.parametrize("path", reference.PAGES)
def test_generated_pages_are_up_to_date(path: str) -> None:
    """docs/reference is what the docstrings and the commands say now."""
    assert (page.ROOT / path).read_text(encoding="utf-8") == reference.PAGES[path](), "run: make reference"


def test_the_site_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without warnings: pages are in the navigation, links lead somewhere. It loads nothing from elsewhere."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_config(str(page.ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    text = (tmp_path / "reference/packages.html").read_text()
    assert "ParallelAxisSolverPass" in text and "ColumnParallelLinear" in text
    assert (tmp_path / "source/examples/trainer.py.html").is_file()
    for file in tmp_path.rglob("*.html"):
        assert not re.search(r'(?:src|<link[^>]*href)="https?:', file.read_text()), file


def test_quoted_messages_exist() -> None:
    """The messages that the troubleshooting guide explains are those of the source."""
    guide = ALL["docs/guides/troubleshooting.md"].text
    rows = guide.partition("| message | what it means |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    quoted = [row.split("|")[1].strip().replace("`", "") for row in rows]
    assert len(quoted) > 8
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (page.ROOT / "paraxis").rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    said = "\n".join(value for value in constants if isinstance(value, str))
    assert not [message for message in quoted if message not in said]


def test_transcripts_hold_no_paths_of_the_machine() -> None:
    """And each of them has output."""
    here = [str(page.ROOT), str(Path.home()), "/tmp/", "site-packages"]
    for block in (block for found in BLOCKS.values() for block in found if "transcript" in block.directives):
        assert not any(place in block.text for place in here), block.where
        assert "\n" in block.text.strip(), f"{block.where}: run make transcripts"


def test_a_transcript_is_pasted(tmp_path: Path) -> None:
    """The output replaces the old one; a command that fails is an error."""
    text = "<!-- transcript: lines=2 -->\n```console\n$ seq 3\nold\n$ pwd\n```\n"
    (tmp_path / "a.md").write_text(text)
    transcripts.write("a.md", tmp_path)
    assert (tmp_path / "a.md").read_text() == text.replace("old", "1\n2\n...").replace("$ pwd\n", "$ pwd\n.\n")
    with pytest.raises(RuntimeError, match=r"a\.md:3: 'false' ended with 1"):
        transcripts.renew("<!-- transcript -->\n```console\n$ false\n```\n", "a.md")
