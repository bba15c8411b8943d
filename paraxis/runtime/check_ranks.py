"""``check_ranks``: whether the ranks of a parallel model still agree, on demand."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.activity import collective_call
from ..distributed.consensus import on_all_ranks
from ..distributed.input_check import InputCheck
from ..weights.compare_parameters import compare_parameters, compare_writes, context_of


def setup_checks(ctx: ParallelExecutionCtx, config: Config) -> None:
    """Compare the inputs of calls from now on, unless ``Config.check_ranks`` is off. A collective."""
    ctx.state.input_check = InputCheck.create(ctx.tp_group, config.sync_timeout) if config.check_ranks else None


@collective_call("check_ranks")
def check_ranks(model: Any) -> None:
    """Raise, on all ranks, if the ranks of a parallel model do not agree. A collective: every rank must call it.

    Compared are the inputs of all calls so far (tensor-parallel ranks must get the same), replicated parameters and
    buffers by their values, and shards by how often they were written to. It reads every replicated parameter once.

    Args:
        model: What :func:`paraxis.parallelize_model` returned.

    Raises:
        RankMismatchError: The message names the argument or parameter, and the ranks.
        TypeError: The model is not parallel.
    """
    ctx = context_of(model)
    if ctx is None:
        raise TypeError(f"{type(model).__name__} is not a parallel model; pass what parallelize_model returned")
    if ctx.state.input_check is not None:
        with on_all_ranks(ctx.world_group, "comparing the inputs"):
            ctx.state.input_check.flush()
    compare_parameters(model, ctx)
    compare_writes(model, ctx)
