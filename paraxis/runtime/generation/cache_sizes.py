"""How many rows and positions the KV cache of a call gets: few sizes, since each has programs of its own.

A cache is as large as the call may need, rounded up generously where memory allows: prompts of all lengths up to 1024
minus the new tokens have one program for their decode steps, those up to 4096 another one.
"""

from __future__ import annotations

from typing import Any

import torch

FIRST_CAPACITY = 1024
"""Positions of the smallest KV cache; larger ones have four times as many, and so on."""
LARGEST_STEP = 8192
"""From here on, capacities are multiples of this."""
MAX_FIRST = 8192
"""A call that may generate more than this starts with a smaller KV cache, which grows: it may stop early."""
MEMORY_FRACTION = 8
"""KV caches take at most one part in so many of a GPU's memory where they have more positions than they need, and
where they wait for the next call."""
MAX_HOST_BYTES = 1 << 28
"""What pooled KV caches may take of the host's memory."""


def capacity_for(length: int, affordable: int | None = None) -> int:
    """The positions of a KV cache that has to hold ``length`` ones: few sizes, since each has programs of its own.

    Above ``affordable`` positions, memory counts for more: then there are at most twice as many as needed.
    """
    for factor in (4, 2):
        capacity = FIRST_CAPACITY
        while capacity < length and capacity < LARGEST_STEP:
            capacity *= factor
        if capacity > LARGEST_STEP or capacity < length:
            capacity = -(-length // LARGEST_STEP) * LARGEST_STEP
        if affordable is None or capacity <= affordable:
            break
    return capacity


def affordable_positions(prefilled: Any, batch: int, ranks: int, limit: int) -> int:
    """How many positions a KV cache like that of this prefill may have to take at most ``limit`` bytes of a rank.

    The same on all ranks, though some may have more heads than others: so have the capacities that follow from it.
    """
    states = [state for layer in prefilled.layers for state in (layer.keys, layer.values)]
    of_position = sum(x.shape[1] * x.shape[-1] * x.element_size() for x in states if x is not None)
    return limit * ranks // max(of_position * rows_for(batch), 1)


def rows_for(batch: int) -> int:
    """The rows of a decode step for a batch: few sizes, since each has programs of its own."""
    rows = 1
    while rows < batch and rows < 16:
        rows *= 2
    return rows if rows >= batch else -(-batch // 16) * 16


def memory_limit(device: torch.device) -> int:
    """The bytes that KV caches may take beyond those in use."""
    if device.type != "cuda":
        return MAX_HOST_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // MEMORY_FRACTION
