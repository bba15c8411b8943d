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

from ._devices import init_process_group
from ._errors import FAILED, Debug, report_errors
from ._launch import console, launch
from ._options import JsonOption, quiet

PACKAGES = ("paraxis", "torch", "transformers", "safetensors", "huggingface_hub", "triton", "accelerate", "peft")
REQUIRED = PACKAGES[:5]
MIN_SHARED_MEMORY = 64 * 2**20
"""Bytes of shared memory below which all-reduces between ranks of one machine go through sockets."""
GOOD, WARNING, BAD, UNCHECKED = "good", "warning", "bad", "unchecked"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    verdict: str = GOOD
    advice: str = ""


def command(as_json: JsonOption = False, debug: Debug = False) -> None:
    """Check this machine: versions, GPUs, NCCL, peer access, shared memory, and communication between two ranks.

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

            table = Table("", "check", "result", "what to do or what it is for")
            signs = {
                GOOD: "[green]ok[/green]",
                WARNING: "[yellow]note[/yellow]",
                BAD: "[red]error[/red]",
                UNCHECKED: "-",
            }
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
    """CPU cores and GPUs; NCCL, peer access and symmetric memory, which ranks on GPUs communicate through."""
    import torch

    found = [Finding("CPU", f"{os.cpu_count()} cores")]
    if torch.cuda.is_available():
        return [*found, *gpu_findings()]
    advice = "models run on the CPU, which is slow; `paraxis plan` needs no GPU"
    found.append(Finding("GPU", "none available to torch", WARNING, advice))
    meaning = {
        "NCCL": "collectives between GPUs",
        "GPU peer access": "GPUs that read one another's memory, without the detour through the host",
        "symmetric memory": "kernels that read the memory of other GPUs, as one-shot all-reduces do",
    }
    return [*found, *(Finding(name, "not checked: no GPU", UNCHECKED, f"for {text}") for name, text in meaning.items())]


def gpu_findings() -> list[Finding]:
    """Every GPU, and what connects them."""
    import torch

    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Finding(f"GPU {index}", f"{properties.name}, {total / 1e9:.0f} GB, {free / 1e9:.0f} GB free"))
    return [*found, nccl(count), peer_access(count), symmetric_memory(count)]


def nccl(count: int) -> Finding:
    """Whether torch has NCCL, and with several GPUs, whether two of them can all-reduce over it."""
    import torch

    if not torch.distributed.is_nccl_available():
        advice = "ranks cannot run on GPUs: install a torch build with NCCL"
        return Finding("NCCL", "missing", BAD, advice)
    release = ".".join(map(str, torch.cuda.nccl.version()))
    if count < 2:
        return Finding("NCCL", f"{release} available; not tested: one GPU")
    try:
        totals = launch(2, _all_reduce_ranks, "cuda")
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        return Finding("NCCL", f"{release} failed: {last}", BAD, "run with NCCL_DEBUG=INFO to see why")
    if totals != [3, 3]:
        return Finding("NCCL", f"{release}: all-reduce of 1 and 2 gives {totals}", BAD, "reinstall torch")
    return Finding("NCCL", f"{release}, all-reduce between 2 GPUs works")


def peer_access(count: int) -> Finding:
    """Whether GPUs can read one another's memory."""
    import torch

    pairs = [(a, b) for a in range(count) for b in range(a)]
    if not pairs:
        return Finding("GPU peer access", "not checked: one GPU", UNCHECKED)
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if direct == len(pairs):
        return Finding("GPU peer access", f"ok: all {direct} pairs")
    advice = "the other pairs communicate through host memory, which is slow"
    return Finding("GPU peer access", f"missing: {direct} of {len(pairs)} pairs have it", WARNING, advice)


def symmetric_memory(count: int) -> Finding:
    """Whether two ranks can map the memory of each other's GPU, as one-shot all-reduces need it."""
    name = "symmetric memory"
    if count < 2:
        return Finding(name, "not checked: one GPU", UNCHECKED)
    try:
        multicast = all(launch(2, _map_memory))
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        return Finding(name, f"missing: {last}", WARNING, "all-reduces go through NCCL only")
    return Finding(name, f"ok, {'with' if multicast else 'without'} multicast (NVLink SHARP)")


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
        totals = launch(2, _all_reduce_ranks, "cpu")
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        return Finding("gloo, 2 ranks", f"failed: {last}", BAD, "set GLOO_SOCKET_IFNAME to a working interface")
    if totals != [3, 3]:
        return Finding("gloo, 2 ranks", f"all-reduce of 1 and 2 gives {totals}", BAD, "reinstall torch")
    return Finding("gloo, 2 ranks", "all-reduce works")


def _map_memory() -> bool:
    import torch.distributed as dist

    from ..compat.distributed import map_symmetric_memory
    from ..distributed.exit import end_process_groups

    device = init_process_group("cuda")
    try:
        assert dist.group.WORLD is not None
        return map_symmetric_memory(device, dist.group.WORLD)
    finally:
        end_process_groups()


def _all_reduce_ranks(device: str) -> int:
    import torch
    import torch.distributed as dist

    from ..distributed.exit import end_process_groups

    number = torch.tensor(1, device=init_process_group(device))
    number += dist.get_rank()
    dist.all_reduce(number)
    end_process_groups()
    return int(number)
