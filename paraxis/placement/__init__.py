"""Where the elements of a tensor live: replicated, partial, or sharded by exact index ranges. Pure data."""

from .placement import (
    PARTIAL,
    REPLICATE,
    SHARED,
    Layout,
    Partial,
    Placement,
    Range,
    Ranges,
    Replicate,
    Shard,
    ensure_divisibility,
    from_json,
    local_index,
    local_shape,
    to_json,
)
