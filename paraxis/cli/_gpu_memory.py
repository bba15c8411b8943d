"""The smallest number of ranks whose memory fits on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._errors import UsageError

if TYPE_CHECKING:
    from .. import Plan

GPU_GB = {"a100": 80, "h100": 80, "h200": 141, "b200": 180, "l40s": 48, "a10": 24, "rtx4090": 24, "v100": 32}
"""Memory of GPUs by name, in GB; another size follows a dash, as in ``A100-40GB``."""
USABLE = 0.9
"""The fraction of a GPU's memory that a plan may fill; kernels, collectives and fragmentation take the rest."""
MAX_RANKS = 64
"""The largest number of ranks that ``--tp auto`` tries."""


def gpu_bytes(gpu: str) -> int:
    """The memory of a GPU from its name: ``H100``, ``A100-40GB`` or ``24GB``."""
    size_match = re.search(r"(?:^|\w[\s-])(\d+(?:\.\d+)?)\s*GB$", gpu.strip(), re.IGNORECASE)
    size = float(size_match[1]) if size_match else GPU_GB.get(gpu.strip().lower())
    if size_match and not size:
        raise UsageError(f"--gpu {gpu!r}: a GPU needs memory; add its size, as in 'A100-40GB'")
    if size is None:
        names = ", ".join(GPU_GB)
        raise UsageError(f"unknown GPU: --gpu {gpu!r}. Add its memory, as in '{gpu}-80GB', or use one of {names}")
    return int(size * 1e9)


def usable_bytes(gpu: str) -> int:
    """The bytes of a GPU that a plan may fill."""
    return int(gpu_bytes(gpu) * USABLE)


def smallest_fitting_plan(gpu: str, plan: Callable[[int], Plan]) -> Plan:
    """The plan with the fewest ranks, a power of two, whose memory per rank fits on the GPU."""
    limit, ranks = usable_bytes(gpu), 1
    found = plan(ranks)
    assert found.memory is not None
    unsharded = found.memory.total
    while found.memory.total > limit:
        ranks *= 2
        while unsharded / ranks > limit and ranks < MAX_RANKS:
            ranks *= 2  # too large even if every byte were sharded
        if ranks > MAX_RANKS:
            raise ValueError(
                f"the model does not fit on {MAX_RANKS} ranks or fewer: {USABLE:.0%} of {gpu} are "
                f"{limit / 1e9:.3g} GB, and {found.world_size} ranks need {found.memory}"
            )
        found = plan(ranks)
        assert found.memory is not None
    return found
