"""Paste what the commands of a page print into the page.

The blocks of a page run in order in one empty directory: Python blocks marked ``<!-- run -->``, files, and the console
blocks marked ``<!-- transcript -->``, whose lines that begin with ``$ `` are run by a shell. Their output replaces what
stood below them. Options, separated by commas:

- ``<!-- transcript: lines=20 -->`` shows the first 20 lines of each output, ``grep=TEXT`` the lines with a text.
- ``copy=FILE`` copies a file of the repository into the directory first.
- ``until=TEXT`` is for a server, a command that ends in ``&``: shows its output up to a text. It ends with the page.
- ``<!-- transcript; fails -->``: the commands end with an error.

Transcripts hold no paths of the machine they were made on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .blocks import Block, blocks_of
from .page import ROOT, Page

TIMEOUT = 600
WIDTH = "100"
ELLIPSIS = "..."


def renew(text: str, path: str, root: Path = ROOT, only: str = "") -> list[tuple[str, str]]:
    """(old text, new text) of each transcript of a page; with ``only``, of those whose commands contain that text."""
    changed = []
    with tempfile.TemporaryDirectory(prefix="transcript-") as folder, ExitStack() as running:
        for block in blocks_of(Page(path, text)):
            if "file" in block.directives:
                (Path(folder) / block.directives["file"]).write_text(block.text, encoding="utf-8")
            elif block.ranks == 1:
                _run([sys.executable, "-c", block.text], folder, block)
            if "transcript" in block.directives and any(only in command for command in block.commands()):
                changed.append((block.text, transcript(block, folder, root, running)))
    return changed


def write(path: str, root: Path = ROOT, only: str = "") -> None:
    """Paste new transcripts into a page. Its other text may have been edited while the commands ran."""
    file = root / path
    for before, after in renew(file.read_text(encoding="utf-8"), path, root, only):
        file.write_text(file.read_text(encoding="utf-8").replace(before, after, 1), encoding="utf-8")


def transcript(block: Block, folder: str, root: Path, running: ExitStack) -> str:
    """A console block with the output of its commands."""
    pairs = (part.partition("=") for part in block.directives["transcript"].split(","))
    options = {key.strip(): value for key, _, value in pairs if key.strip()}
    if "copy" in options:
        shutil.copy(root / options["copy"], folder)
    parts = []
    for command in block.commands():
        print(f"{block.where}: $ {command}", flush=True)
        if command.endswith("&"):
            printed = _start(command.removesuffix("&"), folder, options["until"], running)
        else:
            printed = _run(["bash", "-c", command], folder, block)
        parts.append(f"$ {command}\n{_shortened(cleaned(printed, folder, root), options)}")
    return "".join(parts)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": WIDTH,
        "NO_COLOR": "1",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PARAXIS_CACHE": "",
        "PYTHONWARNINGS": "ignore",
    }


def _run(command: list[str], folder: str, block: Block) -> str:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=_environment(), timeout=TIMEOUT, **streams)
    if done.returncode and "fails" not in block.directives:
        raise RuntimeError(f"{block.where}: {command[-1]!r} ended with {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


def _start(command: str, folder: str, until: str, running: ExitStack) -> str:
    """The output of a server until it is ready."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=_environment(), **streams)
    running.callback(server.wait, timeout=60)
    running.callback(server.terminate)
    printed = ""
    for line in server.stdout or ():
        printed += line
        if until in line:
            return printed
    raise RuntimeError(f"{command!r} ended before {until!r}:\n{printed}")


def cleaned(text: str, folder: str, root: Path) -> str:
    """Output without paths of this machine, colours and progress bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    text = "\n".join(line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    for place, name in (
        (folder, "."),
        (str(root), "paraxis"),
        (sys.prefix, ".venv"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(place, name)
    return text


def _shortened(text: str, options: dict[str, str]) -> str:
    lines = text.strip("\n").splitlines()
    if "grep" in options:
        lines = [line for line in lines if options["grep"] in line]
    limit = int(options.get("lines", len(lines)))
    shown = lines[:limit] + ([ELLIPSIS] if len(lines) > limit else [])
    return "".join(f"{line}\n" for line in shown)
