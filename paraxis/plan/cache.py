"""Plans cached on disk: the second time a model is brought up, it is not captured and searched again.

A plan is cached under a key made of all that it was made from (``utils/disk_cache.py``). Should the key miss something,
a stale plan may be a slower one, never a wrong one: it says where parameters live, and what happens to the tensors in
between is solved anew for every graph (see :mod:`paraxis.plan.apply`).
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..utils import disk_cache
from .apply import problems_of
from .plan import Plan

PLANS = "plans"
IRRELEVANT = {
    "plan",
    "weight_init_fn",
    "init_seed",
    "show_progress",
    "check_finite",
    "cache_plans",
    "sync_timeout",
    "check_ranks",
}
"""Options that a plan does not depend on."""


def cached_plan(key: str | None, ctx: ParallelExecutionCtx) -> Plan | None:
    """The plan that is cached under a key; None, on all ranks, if there is none. A collective.

    Rank 0 reads it for all of them, by its key: their disks and environments may differ.
    """
    data = _read(key, ctx) if ctx.is_first else None
    data = all_gather_object(ctx.world_group, data, "looking for a cached plan")[0]
    return None if data is None else Plan.from_json(data)


def _read(key: str | None, ctx: ParallelExecutionCtx) -> Any:
    data = disk_cache.read(PLANS, key)
    try:
        return None if data is None or problems_of(Plan.from_json(data), ctx) else data
    except (ValueError, KeyError, TypeError, AttributeError):  # not a plan
        return None


def store_plan(key: str | None, plan: Plan, ctx: ParallelExecutionCtx) -> None:
    """Write a plan where the next run finds it."""
    if not plan.breaks and ctx.is_first:
        disk_cache.write(PLANS, key, plan.to_json())


def cache_key(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> str | None:
    """A key for all that the plan of a model depends on; None if plans are not cached or there is no telling.

    A model of transformers has one, if it is planned with dummy inputs.
    """
    if not config.cache_plans or not disk_cache.directory(PLANS):
        return None
    return plan_key(model, ctx, config, examples)


def plan_key(
    model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any, code: bool = True
) -> str | None:
    """The key, whether plans are cached or not; ``code``: as of :func:`paraxis.utils.disk_cache.key_of`."""
    if config.pipeline is not None or examples is not None:
        return None
    try:
        options = {f.name: _option(getattr(config, f.name)) for f in fields(config) if f.name not in IRRELEVANT}
    except OSError:
        return None
    parameters = {
        name: [list(p.shape), str(p.dtype), p.requires_grad, ctx.state.aliases.get(name)]
        for name, p in ctx.param_cache.items()
    }
    ranks = [ctx.world_size, ctx.current_device.type]
    return disk_cache.key_of(model, code=code, parameters=parameters, ranks=ranks, options=options)


def _option(value: Any) -> Any:
    if isinstance(value, (str, os.PathLike)) and os.path.isfile(value):  # the description of a machine
        return Path(value).read_text()
    return value
