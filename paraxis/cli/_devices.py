"""The devices that ranks run on: CPU ranks over gloo, or one GPU per rank over NCCL."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ._errors import UsageError
from ._fits import local_ranks

CPU, CUDA, AUTO = "cpu", "cuda", "auto"
DeviceOption = Annotated[
    str,
    typer.Option("--device", help="cpu (gloo), cuda (NCCL, one GPU per rank), or auto: cuda if there are enough GPUs."),
]


def choose_device(device: str, tp: int, share: bool = False) -> str:
    """``cpu`` or ``cuda`` for ``--device``; raises before anything starts if the GPUs asked for are not there.

    With ``share``, ranks for which there is no GPU of their own share GPUs, over gloo: right, but slow.
    """
    if device not in (CPU, CUDA, AUTO):
        raise UsageError(f"--device {device!r} is none of {CPU}, {CUDA} and {AUTO}")
    if device == CPU:
        return CPU
    missing = missing_gpus() or ("" if share and device == CUDA else missing_for_nccl(local_ranks(tp)))
    if missing and device == CUDA:
        raise ValueError(f"--device cuda: {missing}, or use --device cpu")
    return CPU if missing else CUDA


def missing_gpus() -> str:
    """Why torch cannot use GPUs here, and what to do; empty if it can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "check the driver (nvidia-smi)" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        return f"torch finds no GPU on this machine: {hint}"
    return ""


def missing_for_nccl(ranks: int) -> str:
    """What so many ranks on this machine lack to communicate over NCCL, and what to do; empty if nothing."""
    import torch

    count = torch.cuda.device_count()
    if count < ranks:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        return (
            f"{ranks} ranks need {ranks} GPUs, because NCCL cannot share one between ranks, and torch finds {gpus} on "
            f"this machine: use --tp {count}, or several machines with torchrun"
        )
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL: install a build with it"
    return ""


def ranks_per_gpu(tp: int) -> int:
    """How many ranks of this machine share a GPU, at most."""
    import torch

    return -(-local_ranks(tp) // max(1, torch.cuda.device_count()))


def init_process_group(device: str = AUTO) -> Any:
    """Initialize torch.distributed in a rank, and return its device.

    NCCL if every rank has a GPU of its own, else gloo: on CPUs, or where ``cuda`` is asked for on shared GPUs.
    """
    import torch
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", 1))
    if choose_device(device, world, share=True) == CPU:
        dist.init_process_group("gloo")
        return torch.device(CPU)
    found = torch.device(CUDA, int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(found)
    if missing_for_nccl(local_ranks(world)):
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=found)
    return found
