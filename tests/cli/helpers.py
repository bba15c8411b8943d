"""Calling commands as a user does."""

from __future__ import annotations

from typing import Any

import torch
from typer.testing import CliRunner

from paraxis.cli import app


def call(*args: str) -> Any:
    """Run a command in this process: exit code, stdout and stderr."""
    result = CliRunner().invoke(app, list(args))
    torch._dynamo.reset()
    return result
