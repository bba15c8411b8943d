"""Scaled gradients of sharded parameters: ``torch.amp.GradScaler`` divides them by the scale and looks for infinity.

Every rank unscales its own shards. Infinity on one rank must skip the step on all of them, hence an all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.torch import schema_of
from ..distributed.collectives import all_reduce
from .sharded_tensor import ShardedTensor

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(func: Any, args: Any, kwargs: Any) -> Any:
    """Unscale the shards in place and note infinity anywhere; NotImplemented for any other operator."""
    if func is not UNSCALE:
        return NotImplemented
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    gradients, found = arguments["self"], arguments["found_inf"]
    func([x._local if isinstance(x, ShardedTensor) else x for x in gradients], found, arguments["inv_scale"])
    sharded = [x for x in gradients if isinstance(x, ShardedTensor)]
    dp_groups = [x.dp_shard.group for x in sharded if x.dp_shard is not None]
    for group in dict.fromkeys([*dp_groups, *(x._spec.group for x in sharded)]):
        assert group is not None
        found.copy_(all_reduce(found, group, "max"))
    return None
