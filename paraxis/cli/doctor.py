"""`paraxis doctor`: check versions, devices and communication on this machine, and say what to fix."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from ._errors import FAILED, Debug, report_errors
from ._launch import console, launch
from ._options import JsonOption, quiet

PACKAGES = ("paraxis", "torch", "transformers", "safetensors", "huggingface_hub", "triton", "accelerate", "peft")
REQUIRED = PACKAGES[:5]
MIN_SHARED_MEMORY = 64 * 2**20
"""Bytes of shared memory below which all-reduces between ranks of one machine go through sockets."""
GOOD, WARNING, BAD = "good", "warning", "bad"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    verdict: str = GOOD
    advice: str = ""


def command(as_json: JsonOption = False, debug: Debug = False) -> None:
    """Check this machine: package versions, GPUs, shared memory, timeouts, and communication between two ranks.

    Exits with 1 if something required does not work.

    Example: paraxis doctor
    """
    with report_errors(debug):
        quiet()
        findings = [*packages(), *devices(), shared_memory(), timeout(), communication()]
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        else:
            from rich.table import Table

            table = Table("", "check", "result", "what to do")
            signs = {GOOD: "[green]ok[/green]", WARNING: "[yellow]note[/yellow]", BAD: "[red]error[/red]"}
            for finding in findings:
                table.add_row(signs[finding.verdict], finding.what, finding.found, finding.advice)
            console().print(table)
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(FAILED)


def packages() -> list[Finding]:
    """Python and the packages that paraxis uses; optional ones are listed if installed."""
    found = [Finding("Python", sys.version.split()[0])]
    for name in PACKAGES:
        try:
            found.append(Finding(name, version(name)))
        except PackageNotFoundError:
            if name == "paraxis":
                found.append(Finding(name, "not installed, running from source", WARNING, "pip install ."))
            elif name in REQUIRED:
                found.append(Finding(name, "missing", BAD, f"pip install {name}"))
    try:
        from ..weights.hub import check_transformers_version

        check_transformers_version()
    except ImportError as error:
        found.append(Finding("transformers", "too old", BAD, str(error)))
    return found


def devices() -> list[Finding]:
    """CPU cores, GPUs, direct access between GPUs, and NCCL."""
    import torch

    found = [Finding("CPU", f"{os.cpu_count()} cores")]
    if not torch.cuda.is_available():
        advice = "models run on the CPU, which is slow; `paraxis plan` needs no GPU"
        return [*found, Finding("GPU", "none available to torch", WARNING, advice)]
    count = torch.cuda.device_count()
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Finding(f"GPU {index}", f"{properties.name}, {total / 1e9:.0f} GB, {free / 1e9:.0f} GB free"))
    pairs = [(a, b) for a in range(count) for b in range(a)]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if pairs:
        advice = "" if direct == len(pairs) else "the other pairs communicate through host memory, which is slow"
        verdict = GOOD if direct == len(pairs) else WARNING
        found.append(Finding("GPU peer access", f"{direct} of {len(pairs)} pairs", verdict, advice))
    nccl = torch.distributed.is_nccl_available()
    advice = "" if nccl else "install a torch build with NCCL"
    found.append(Finding("NCCL", "available" if nccl else "missing", GOOD if nccl else BAD, advice))
    return found


def shared_memory() -> Finding:
    """The shared memory that ranks of one machine communicate through."""
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "no /dev/shm", WARNING, "ranks on this machine communicate through sockets")
    free = shutil.disk_usage("/dev/shm").free
    too_small = free < MIN_SHARED_MEMORY
    advice = "in a container, increase it (docker run --shm-size)" if too_small else ""
    return Finding("shared memory", f"{free / 1e6:.0f} MB free", WARNING if too_small else GOOD, advice)


def timeout() -> Finding:
    """How long ranks wait for one another."""
    from .. import Config

    seconds = Config().sync_timeout
    return Finding("timeout", f"{seconds:g} s for ranks to wait for one another (Config.sync_timeout)")


def communication() -> Finding:
    """Whether two ranks on this machine can all-reduce over gloo."""
    try:
        totals = launch(2, _all_reduce_ranks)
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        return Finding("gloo, 2 ranks", f"failed: {last}", BAD, "set GLOO_SOCKET_IFNAME to a working interface")
    if totals != [3, 3]:
        return Finding("gloo, 2 ranks", f"all-reduce of 1 and 2 gives {totals}", BAD, "reinstall torch")
    return Finding("gloo, 2 ranks", "all-reduce works")


def _all_reduce_ranks() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    dist.destroy_process_group()
    return int(number)
