"""Data parallelism beside tensor parallelism: replicated (DDP) or sharded (FSDP) parameters, gradient reduction."""

from .replicate import no_sync, reduce_late_parameters
from .setup import check_option, setup_data_parallel
from .shard import shards_parameters, unshard_at_first_use

__all__ = [
    "check_option",
    "no_sync",
    "reduce_late_parameters",
    "setup_data_parallel",
    "shards_parameters",
    "unshard_at_first_use",
]
