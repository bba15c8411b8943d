"""Random numbers that agree where tensors are replicated and differ where they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .collectives import broadcast


class RandomState:
    """One stream of seeds, the same on all ranks, from which every random operator of a model draws its own.

    Rank 0's seed is broadcast, so the ranks agree without the user seeding anything. Another ``stream`` draws other
    numbers from the same seed: every data-parallel rank has its own. ``agreed=False`` skips the broadcast, for a rank
    that builds a program alone, to inspect it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stream: int = 0, agreed: bool = True) -> None:
        self.rank = dist.get_rank(group)
        self.device = device
        seed = torch.tensor([torch.initial_seed() % (1 << 62)], dtype=torch.int64, device=device)
        if agreed:
            seed = broadcast(seed, group)
        self.generator = torch.Generator().manual_seed((int(seed.item()) + 104729 * stream) % (1 << 62))

    def run(self, function: Callable[..., Any], sharded: bool, *args: Any, **kwargs: Any) -> Any:
        """Call a random operator; ``sharded`` says whether each rank draws different numbers, for its own shard."""
        seed = int(torch.randint(1 << 62, (), generator=self.generator))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((seed + 7919 * (self.rank + 1)) % (1 << 62) if sharded else seed)
            return function(*args, **kwargs)
