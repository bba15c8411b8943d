"""Run the Python blocks of a page: in this process, or on a rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

_names: dict[str, dict[str, Any]] = {}
"""What the blocks of a page have defined so far, by the directory they run in."""


def run_block(page: str, where: str, text: str, folder: str) -> str:
    """Run a block with what the page's earlier blocks defined; returns what it printed."""
    import io

    import torch

    line = int(where.rpartition(":")[2])
    names = _names.setdefault(folder, {"__name__": "__main__"})
    printed = io.StringIO()
    with _inside(folder), contextlib.redirect_stdout(printed), mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        exec(compile("\n" * (line - 1) + text, page, "exec"), names)
    torch._dynamo.reset()
    return printed.getvalue()


def run_on_rank(page: str, where: str, text: str, folder: str) -> str:
    """The same on a rank whose process group exists already and outlives the page."""
    import torch.distributed as dist

    with (
        mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
        mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
    ):
        return run_block(page, where, text, folder)


def forget(folder: str) -> None:
    """Drop what the blocks of a page have defined, models among it."""
    _names.pop(folder, None)


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
