"""How many ranks a model needs on a kind of GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._errors import UsageError

if TYPE_CHECKING:
    from .. import Plan

SIZES = {"a100": 80, "h100": 80, "h200": 141, "b200": 180, "l40s": 48, "a10": 24, "rtx4090": 24, "v100": 32}
"""GB of GPUs that are known by name; another size is said after a dash, as in ``A100-40GB``."""
USABLE = 0.9
"""The part of a GPU's memory that is left for the model: the rest is for kernels, collectives and fragments."""
MOST = 64
"""The largest number of ranks that is tried."""


def bytes_of(gpu: str) -> int:
    """The memory of a GPU by its name, as in ``H100``, ``A100-40GB`` or ``24GB``."""
    found = re.search(r"(?:^|\w[\s-])(\d+(?:\.\d+)?)\s*GB$", gpu.strip(), re.IGNORECASE)
    size = float(found[1]) if found else SIZES.get(gpu.strip().lower())
    if found and not size:
        raise UsageError(f"--gpu {gpu!r} has no memory: say its size, as in 'A100-40GB'")
    if size is None:
        raise UsageError(f"--gpu {gpu!r} is not known: say its size, as in '{gpu}-80GB', or one of {', '.join(SIZES)}")
    return int(size * 1e9)


def room_on(gpu: str) -> int:
    """The bytes of a GPU that are counted on."""
    return int(bytes_of(gpu) * USABLE)


def fewest(gpu: str, plan: Callable[[int], Plan]) -> Plan:
    """The plan for the smallest power of two of ranks with which a rank fits on the GPU."""
    room, ranks = room_on(gpu), 1
    found = plan(ranks)
    assert found.memory is not None
    alone = found.memory.total
    while found.memory.total > room:
        ranks *= 2
        while alone / ranks > room and ranks < MOST:
            ranks *= 2  # it would not fit even if all of it were split
        if ranks > MOST:
            raise ValueError(
                f"no number of ranks up to {MOST} makes it fit on {gpu}, of which {USABLE:.0%} are counted on: over "
                f"{found.world_size} it takes {found.memory}"
            )
        found = plan(ranks)
        assert found.memory is not None
    return found
