"""Whether a model fits into the memory of this machine, found before anything is built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESERVED_PER_RANK = 0.5e9
"""Bytes that a rank takes besides the model: Python, torch, and the activations of a short call."""
CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows the memory limits of containers and jobs."""


def parameter_count(model: str, layers: int | None = None) -> int:
    """The number of parameters, from the configuration alone: the model is built on the meta device."""
    import torch

    from ..weights.build import build_on_meta

    overrides = {} if layers is None else {"num_hidden_layers": layers}
    return sum(p.numel() for p in build_on_meta(model, torch.float32, overrides).parameters())


def itemsize(model: str, dtype: str) -> int:
    """Bytes per parameter in a dtype of ``--dtype``; ``auto`` is that of the configuration."""
    import torch

    from ..weights.hub import load_config_and_class, resolve_checkpoint

    if dtype != "auto":
        return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
    found = getattr(load_config_and_class(resolve_checkpoint(model, weights=False), {})[0], "dtype", None)
    return int((found or torch.float32).itemsize)


def available_memory() -> int | None:
    """Bytes of memory that are free on this machine, or in its container; None if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        try:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None
    return max(0, min([free, *container_limits()]))


def container_limits(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> list[int]:
    """Bytes that are free in each control group this process is in: those of a container, a job, or a service.

    Files in the page cache count as free: the kernel drops them when a process needs the memory.
    """
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in groups:
        if controllers == "":  # version 2
            top, names, prefix = root, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            top, names, prefix = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        folder = top / path.lstrip("/")
        for each in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            try:
                limit, used = (int((each / name).read_text()) for name in names)
                stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group in this container, or no limit: "max"
                continue
            cached = int(stat.get(f"{prefix}active_file", 0)) + int(stat.get(f"{prefix}inactive_file", 0))
            found.append(limit - used + cached)
    return found


def check_fits(
    count: Callable[[int | None], int],
    layers: int | None,
    needed: Callable[[int], dict[str, float]],
    available: int | None,
    where: str,
) -> None:
    """Raise before anything is built if the parts of ``needed`` do not fit into ``available`` bytes.

    Args:
        count: The number of parameters of the model with so many layers (None: all of them).
        layers: The layers of ``--layers``.
        needed: The bytes needed for a number of parameters, by what needs them.
        available: The bytes there are; None if unknown, which passes.
        where: Which memory that is, for the message.
    """
    from ..utils.sizes import size_text

    if available is None:
        return
    parameters = count(layers)
    parts = needed(parameters)
    if sum(parts.values()) <= available:
        return
    most = most_layers(count, parameters, lambda n: sum(needed(n).values()) <= available)
    advice = f"--layers {most} fits" if most else "use a machine with more memory (`paraxis plan` needs none)"
    if most and layers is None:
        advice += " (random weights, otherwise the same model)"
    details = " + ".join(f"{size_text(size)} {what}" for what, size in parts.items() if size)
    raise ValueError(
        f"the model does not fit: it has {parameters / 1e9:.3g} billion parameters, and this needs "
        f"{size_text(sum(parts.values()))} ({details}), but {size_text(available)} are available {where}: {advice}"
    )


def most_layers(count: Callable[[int | None], int], parameters: int, fits: Callable[[int], bool]) -> int:
    """The largest ``--layers`` that fits, from the sizes of the model with one and with two; 0 if there is none."""
    try:
        one, two = count(1), count(2)
    except Exception:  # a model whose number of layers cannot be set this way
        return 0
    each = two - one
    if each <= 0 or one >= parameters or not fits(one):
        return 0
    layers = 1
    while one + layers * each < parameters and fits(one + layers * each):
        layers += 1
    return layers


def check_disk(folder: str, needed: int) -> None:
    """Raise if the random weights that are written for the ranks do not fit on the disk."""
    from ..utils.sizes import size_text

    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the random weights need {size_text(needed)} in {str(Path(folder).parent)!r}, which has "
            f"{size_text(free)} free: set TMPDIR to a folder on a larger disk, or use fewer --layers"
        )


def local_ranks(tp: int) -> int:
    """The ranks on this machine: all of them, unless torchrun started ranks on several machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", tp))


def gpu_memory() -> int | None:
    """The memory of the smallest GPU; None without one."""
    import torch

    sizes: list[Any] = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes) if torch.cuda.is_available() and sizes else None
