"""What the commands of a page print, put into the page.

The blocks of a page run in their order in one empty directory: Python blocks that are to be run, each by itself, files,
and the console blocks marked `<!-- transcript -->`, whose lines that begin with `$ ` are run by a shell. Their output
takes the place of what stood below them. `<!-- transcript: lines=20 -->` keeps the first 20 lines of each output,
`grep=TEXT` the lines that contain a text, `copy=FILE` puts a file of the repository into the directory first. A command
that ends in `&` goes on until the page is done; what it prints up to `until=TEXT` is shown. `fails` says that commands
end with an error. Nothing of the machine stays in the transcripts but its versions.
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
from .pages import ROOT, Page

TIMEOUT = 600
WIDTH = "100"
CUT = "..."


def renew(text: str, path: str, root: Path = ROOT, only: str = "") -> list[tuple[str, str]]:
    """For each transcript of a page what it was and what it is now; ``only`` those whose commands contain a text."""
    changed = []
    with tempfile.TemporaryDirectory(prefix="transcript-") as folder, ExitStack() as running:
        for block in blocks_of(Page(path, text)):
            if "file" in block.wanted:
                (Path(folder) / block.wanted["file"]).write_text(block.text, encoding="utf-8")
            elif block.ranks == 1:
                _run([sys.executable, "-c", block.text], folder, block)
            if "transcript" in block.wanted and any(only in command for command in block.commands()):
                changed.append((block.text, transcript(block, folder, root, running)))
    return changed


def write(path: str, root: Path = ROOT, only: str = "") -> None:
    """Put new transcripts into a page, which may have been worked on meanwhile."""
    file = root / path
    for before, after in renew(file.read_text(encoding="utf-8"), path, root, only):
        file.write_text(file.read_text(encoding="utf-8").replace(before, after, 1), encoding="utf-8")


def transcript(block: Block, folder: str, root: Path, running: ExitStack) -> str:
    """A console block with what its commands print."""
    pairs = (part.partition("=") for part in block.wanted["transcript"].split(","))
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
    if done.returncode and "fails" not in block.wanted:
        raise RuntimeError(f"{block.where}: {command[-1]!r} ended with {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


def _start(command: str, folder: str, until: str, running: ExitStack) -> str:
    """What a server prints until it is ready. It is ended with the page."""
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
    """Without places of this machine, colours and progress that was written over."""
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
    most = int(options.get("lines", len(lines)))
    kept = lines[:most] + ([CUT] if len(lines) > most else [])
    return "".join(f"{line}\n" for line in kept)
