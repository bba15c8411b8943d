"""`paraxis doctor`: what this machine has, and what will and will not work on it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from ._errors import FAILED, Debug, told
from ._launch import console, launch
from ._planning import JsonOption, quiet

PACKAGES = ("paraxis", "torch", "transformers", "safetensors", "huggingface_hub", "triton", "accelerate", "peft")
NEEDED = PACKAGES[:5]
SHARED = 64 * 2**20
"""Bytes of shared memory below which the sums of ranks on one machine go through sockets."""
GOOD, WARNING, BAD = "good", "warning", "bad"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    verdict: str = GOOD
    advice: str = ""


def command(as_json: JsonOption = False, debug: Debug = False) -> None:
    """Look at this machine: versions, devices, how ranks meet, shared memory, time-outs, and what follows from it.

    Exits with 1 if something that is needed does not work.

    Example: paraxis doctor
    """
    with told(debug):
        quiet()
        findings = [*packages(), *devices(), *memory(), *waiting(), meeting()]
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        else:
            from rich.table import Table

            table = Table("", "what", "found", "what to do")
            signs = {GOOD: "[green]ok[/green]", WARNING: "[yellow]note[/yellow]", BAD: "[red]bad[/red]"}
            for finding in findings:
                table.add_row(signs[finding.verdict], finding.what, finding.found, finding.advice)
            console().print(table)
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(FAILED)


def packages() -> list[Finding]:
    found = [Finding("Python", sys.version.split()[0])]
    for name in PACKAGES:
        try:
            found.append(Finding(name, version(name)))
        except PackageNotFoundError:
            if name == "paraxis":  # which runs, as can be seen
                found.append(Finding(name, "not installed, run from its folder", WARNING, "pip install ."))
            elif name in NEEDED:
                found.append(Finding(name, "missing", BAD, f"pip install {name}"))
    try:
        from ..weights.hub import check_transformers_version

        check_transformers_version()
    except ImportError as error:
        found.append(Finding("transformers", "too old", BAD, str(error)))
    return found


def devices() -> list[Finding]:
    import torch

    found = [Finding("CPU", f"{os.cpu_count()} cores")]
    if not torch.cuda.is_available():
        text = "none that torch can use"
        return [*found, Finding("GPU", text, WARNING, "models run on the CPU, for trying out; plan needs no GPU")]
    count = torch.cuda.device_count()
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            Finding(f"GPU {index}", f"{properties.name}, {total / 1e9:.0f} GB, {free / 1e9:.0f} GB of it free")
        )
    pairs = [(a, b) for a in range(count) for b in range(a)]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if pairs:
        slow = "" if direct == len(pairs) else "others go through the host's memory, which is slow"
        verdict = GOOD if direct == len(pairs) else WARNING
        found.append(
            Finding("between GPUs", f"{direct} of {len(pairs)} pairs reach each other directly", verdict, slow)
        )
    nccl = torch.distributed.is_nccl_available()
    found.append(Finding("NCCL", "there" if nccl else "missing", GOOD if nccl else BAD))
    return found


def memory() -> list[Finding]:
    found = []
    if os.path.isdir("/dev/shm"):
        room = shutil.disk_usage("/dev/shm").free
        few = room < SHARED
        advice = "in a container, give it more (docker run --shm-size)" if few else ""
        found.append(Finding("shared memory", f"{room / 1e6:.0f} MB free", WARNING if few else GOOD, advice))
    else:
        found.append(Finding("shared memory", "no /dev/shm", WARNING, "ranks on this machine talk through sockets"))
    return found


def waiting() -> list[Finding]:
    from .. import Config

    seconds = Config().sync_timeout
    return [Finding("time-out", f"{seconds:g} s for ranks to agree (Config.sync_timeout); then all end with an error")]


def meeting() -> Finding:
    """Whether two ranks on this machine find each other."""
    try:
        total = launch(2, _add_ranks)
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        return Finding("two ranks", f"do not meet: {last}", BAD, "set GLOO_SOCKET_IFNAME to an interface that works")
    return Finding("two ranks", f"met over gloo and added up to {total[0]}", GOOD if total == [3, 3] else BAD)


def _add_ranks() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    dist.destroy_process_group()
    return int(number)
