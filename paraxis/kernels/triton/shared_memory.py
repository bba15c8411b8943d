"""How much shared memory a program of a kernel may use: what tiles and pipeline stages have to fit into."""

from __future__ import annotations

from functools import cache

import torch

SMALLEST = 48 << 10
"""What every device has."""


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program on this device may use."""
    if device.type != "cuda":
        return SMALLEST
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST)
    return max(int(found), SMALLEST)
