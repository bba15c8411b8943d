"""``paraxis.init``: from the environment of ``torchrun``, or none, to a context; and the end of what it has started."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from .compat.inductor import shut_down_compile_workers
from .context import ParallelExecutionCtx
from .distributed.exit import end_process_groups

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a collective waits for the other ranks: torch's own default for gloo."""

_OTHER_LAUNCHERS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
"""Launchers that do not set what torch needs: where they say how many processes there are, and which one this is."""


class _Rank(NamedTuple):
    """This process among those that the launcher has started; ``local`` is None where the launcher does not say."""

    rank: int
    world_size: int
    local: int | None
    local_world_size: int | None
    launched: bool


def init(
    *,
    tp: int | None = None,
    dp: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    seed: int | None = None,
) -> ParallelExecutionCtx:
    """Join the ranks that ``torchrun`` has started, and return the context for :func:`parallelize_model`.

    Without a launcher this process is the only rank. If ``torch.distributed`` is initialized already, its ranks are
    used. Otherwise the process group is destroyed when the program ends, in whatever way that happens.

    Args:
        tp: Tensor-parallel ranks; by default all ranks, divided by ``dp``.
        dp: Data-parallel ranks: with ``dp=2`` on 8 ranks, two replicas of the model on 4 ranks each. The context then
            has a mesh, also with ``dp=1``.
        device: The device of this process; by default ``cuda:LOCAL_RANK`` where every rank of the machine has a GPU,
            else the CPU. ``"cuda"`` alone is ``cuda:LOCAL_RANK`` too.
        backend: Backend of the process group; by default the one that torch has for the device: ``nccl``, ``gloo``, ...
        timeout: How long collectives wait for the other ranks, as a ``timedelta`` or in seconds; by default torch's.
        seed: Seed torch with this number on every rank, so that modules that are built later have the same weights.

    Raises:
        ValueError: ``tp`` times ``dp`` is not the number of ranks, the ranks chose devices of different types, or the
            launcher's environment is incomplete.
    """
    if dist.is_initialized():
        if backend is not None or timeout is not None:
            raise ValueError(
                "torch.distributed is initialized already, with a backend and a timeout of its own: leave out backend= "
                "and timeout=, or call paraxis.init instead of torch.distributed.init_process_group"
            )
        place = _place_in(dist.get_rank(), dist.get_world_size())
        chosen = _device(device, place)
    else:
        place = _launched_rank()
        chosen = _device(device, place)
        _check_sizes(tp, dp, place.world_size)  # before there is a process group to destroy
        _join(place, chosen, backend, timeout)
    tp = _check_sizes(tp, dp, place.world_size)
    if seed is not None:
        torch.manual_seed(seed)
    if dp is None:
        assert dist.group.WORLD is not None
        return ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=chosen)
    mesh = init_device_mesh(chosen.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    return ParallelExecutionCtx(mesh=mesh, current_device=chosen)


def _launched_rank() -> _Rank:
    """This process as the launcher's environment describes it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if not missing:
        return _place_in(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"the environment has {', '.join(n for n in names if n not in missing)} but not {', '.join(missing)}: "
            "start the program with `torchrun --nproc-per-node=N script.py`, which sets all of them"
        )
    for launcher, (size, number) in _OTHER_LAUNCHERS.items():
        if int(os.environ.get(size, "1")) > 1:
            raise ValueError(
                f"{launcher} has started {os.environ[size]} processes, but torch's ranks are not set: start torchrun "
                "on every machine (`torchrun --nnodes=... --nproc-per-node=...`), or set RANK, WORLD_SIZE, LOCAL_RANK, "
                f"MASTER_ADDR and MASTER_PORT in each of them (RANK=${number})"
            )
    return _Rank(0, 1, 0, 1, launched=False)


def _place_in(rank: int, world_size: int) -> _Rank:
    local, local_world = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if world_size == 1:
        local, local_world = local or "0", local_world or "1"
    numbers = [None if text is None else int(text) for text in (local, local_world)]
    return _Rank(rank, world_size, numbers[0], numbers[1], launched=True)


def _device(device: torch.device | str | None, place: _Rank) -> torch.device:
    """The device of this process, made the current one."""
    if device is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        needed = place.local_world_size or place.world_size
        if 0 < count < needed and place.rank == 0:
            warnings.warn(
                f"{needed} ranks on a machine with {count} GPUs: they run on the CPU. Start at most {count} ranks, or "
                "pass device= if every rank sees a GPU of its own.",
                stacklevel=3,
            )
        device = "cuda" if count >= needed else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.index is None:
        local = place.local if place.local is not None else place.rank
        device = torch.device(device.type, local)
    torch.accelerator.set_device_index(device)
    return device


def _join(place: _Rank, device: torch.device, backend: str | None, timeout: timedelta | float | None) -> None:
    """Make the process group of all ranks, which ends with the program."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    limit = DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
    if place.launched:
        store, rank, world_size = next(rendezvous("env://", place.rank, place.world_size, timeout=limit))
        _check_same_device_type(store, rank, world_size, device, limit)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    backend = backend or dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("paraxis/default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=None if seconds is None else limit,
        device_id=device if device.type != "cpu" and backend != "gloo" else None,
    )
    atexit.register(_leave)


def _check_same_device_type(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> None:
    """Raise, on all ranks, if some have a GPU and others do not: they would wait for one another with two backends."""
    keys = [f"paraxis/device/{k}" for k in range(world_size)]
    store.set(keys[rank], device.type)
    store.wait(keys, timeout)
    types = [store.get(key).decode() for key in keys]
    if len(set(types)) > 1:
        by_type = {kind: [k for k, other in enumerate(types) if other == kind] for kind in dict.fromkeys(types)}
        text = ", ".join(f"{kind} on rank {', '.join(map(str, ranks[:8]))}" for kind, ranks in by_type.items())
        raise ValueError(f"the ranks chose devices of different types ({text}): pass the same device= on all of them")


def _check_sizes(tp: int | None, dp: int | None, world_size: int) -> int:
    """The number of tensor-parallel ranks; raises if it does not fit."""
    replicas = 1 if dp is None else dp
    found = tp if tp is not None else world_size // max(replicas, 1)
    if replicas < 1 or found < 1 or found * replicas != world_size:
        asked = f"dp={replicas}" if tp is None else f"tp={tp} × dp={replicas}"
        raise ValueError(
            f"{asked} does not fit {world_size} ranks: tp × dp must be the number of ranks; start "
            "`torchrun --nproc-per-node=N script.py` with that many, or leave out tp="
        )
    return found


def _leave() -> None:
    """End the process group and the compile workers while Python is still there.

    Their threads take the GIL. One that does so after the interpreter is gone aborts the process, and the exit code of
    a program that succeeded is not 0. A program that failed does not wait for other ranks, which may never come.
    """
    shut_down_compile_workers()
    end_process_groups(abort=getattr(sys, "last_type", None) is not None)
