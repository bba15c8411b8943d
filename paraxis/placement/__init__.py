"""Where the elements of a tensor live: replicated, partial, or sharded by exact index ranges.

Pure data: this package knows nothing of process groups, devices or torch.
"""

from .layout import Layout, Range, Ranges, ensure_divisibility, length_of
from .placements import (
    PARTIAL,
    REPLICATE,
    SHARED,
    Partial,
    Placement,
    Replicate,
    Shard,
    from_json,
    local_index,
    local_shape,
    to_json,
)

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "SHARED",
    "Layout",
    "Partial",
    "Placement",
    "Range",
    "Ranges",
    "Replicate",
    "Shard",
    "ensure_divisibility",
    "from_json",
    "length_of",
    "local_index",
    "local_shape",
    "to_json",
]
