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


def run_as_first_rank(
    function: Callable[..., Any], group: dist.ProcessGroup, device: torch.device, *args: Any, **kwargs: Any
) -> Any:
    """Call a random operator on full tensors: all ranks draw what rank 0 draws, which is what an unsharded run with
    its seed would. A collective.

    The generator (``generator=``, or that of the device) goes on from there. On a rank whose generator was in another
    state it keeps its own.
    """
    generator = kwargs.get("generator")
    if generator is None:
        on_gpu = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator
    own = generator.get_state()
    first = broadcast(own.to(device), group).cpu()
    generator.set_state(first)
    try:
        return function(*args, **kwargs)
    finally:
        if not torch.equal(own, first):
            generator.set_state(own)
