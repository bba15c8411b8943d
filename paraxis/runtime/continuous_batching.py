"""``generate_batch`` on a parallel model: the default size of its KV cache is each rank's share of free memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..compat.transformers import limit_cache_memory, new_batching_config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..distributed.liveness import machine_id
from ..utils.memory import available_memory

SHARE = 0.5
"""Of the free memory of a machine, what the caches of all its ranks may take together by default."""


def bounded_cache(init: Callable[..., Any], ctx: ParallelExecutionCtx) -> Callable[..., Any]:
    """``init_continuous_batching`` with a default size that fits all ranks of a machine, and is the same on all ranks.

    transformers gives the cache most of the machine's memory, and on the CPU every rank would do so. Sizes that the
    user sets are left alone.
    """

    def init_continuous_batching(
        generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        config = continuous_batching_config
        if config is None:
            config = getattr(generation_config, "continuous_batching_config", None) or new_batching_config()
        if config.max_memory_percent is None and config.num_blocks is None:
            config = copy.deepcopy(config)
            limit_cache_memory(config, cache_bytes(ctx))
        return init(generation_config, config, *args, **kwargs)

    return init_continuous_batching


def cache_bytes(ctx: ParallelExecutionCtx) -> int:
    """The bytes that the cache of a rank may take: the same on all ranks. A collective."""
    here = machine_id()
    answers = all_gather_object(ctx.world_group, [here, available_memory()], "sizing the KV cache")
    ranks = {where: sum(other == where for other, _ in answers) for where, _ in answers}
    return int(min(SHARE * free / ranks[where] for where, free in answers))
