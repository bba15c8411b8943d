"""The file of ``--report``: what was run, on what, and the figures, for others to read or to compare with.

It names no user, host or network address; the command and the model are in it as they were typed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from ._errors import UsageError, check_output

ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="Write what was run, on what, and the figures: FILE.json or FILE.md."),
]
SUFFIXES = (".json", ".md")
PACKAGES = ("paraxis", "torch", "transformers", "safetensors", "triton")


def check_report(path: Path | None) -> None:
    """Raise before the work starts if the file has another suffix, or cannot be written."""
    if path is not None and path.suffix not in SUFFIXES:
        raise UsageError(f"--report {str(path)!r}: name it .json or .md, which selects the format")
    check_output("--report", path)


def environment() -> dict[str, Any]:
    """When, by which command, with which versions and on which machine this runs."""
    import torch

    from ._fits import available_memory

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    versions["torch"] = str(torch.__version__)
    memory = available_memory()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["paraxis", *sys.argv[1:]]),
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "processor": processor(),
            "cores": os.cpu_count(),
            "available memory": None if memory is None else f"{memory / 1e9:.1f} GB",
        },
        "gpus": gpus(),
    }


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def gpus() -> list[str] | str:
    """Every GPU with what connects them; a sentence if there is none."""
    import torch

    from .doctor import gpu_findings

    if not torch.cuda.is_available():
        return "none available to torch"
    return [f"{each.what}: {each.found}" for each in gpu_findings()]


def write_report(path: Path, title: str, figures: dict[str, Any]) -> None:
    """Write the environment and the figures, in the format of the suffix."""
    data = {"title": title, **environment(), "figures": figures}
    text = json.dumps(data, indent=1) + "\n" if path.suffix == ".json" else markdown(data)
    path.write_text(text, encoding="utf-8")


def markdown(data: dict[str, Any]) -> str:
    """The report as Markdown: a table of the environment, then one of each group of figures."""
    rows = {name: value for name, value in data.items() if name not in ("title", "figures", "command")}
    lines = [f"# {data['title']}", "", f"    {data['command']}", "", *_table(rows)]
    plain = {name: value for name, value in data["figures"].items() if not _is_rows(value)}
    lines += ["", "## Figures", "", *_table(plain)]
    for name, value in data["figures"].items():
        if _is_rows(value):
            columns = list(value[0])
            lines += ["", f"### {name}", "", *_row(columns), *_row(["---"] * len(columns))]
            lines += [line for each in value for line in _row([each[column] for column in columns])]
    return "\n".join([*lines, ""])


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _table(rows: dict[str, Any]) -> list[str]:
    lines = [*_row(["", ""]), *_row(["---", "---"])]
    for name, value in rows.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        lines += [line for key, each in inner for line in _row([f"{name} {key}".strip(), each])]
    return lines


def _row(cells: list[Any]) -> list[str]:
    texts = [", ".join(map(str, cell)) if isinstance(cell, list) else _text(cell) for cell in cells]
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
