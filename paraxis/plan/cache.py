"""Plans kept between runs: the second time a model is brought up, it is not captured and searched again.

A plan is kept under a key made of all that it was made from (``utils/disk_cache.py``). Should the key miss something, a
plan that is out of date may be a slower one, never a wrong one: it says where parameters live, and what happens to
the tensors in between is solved anew for every graph (see :mod:`paraxis.plan.apply`).
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
from ..utils import disk_cache as cache
from .apply import place, problems_of
from .plan import Plan

PLANS = "plans"
IRRELEVANT = {"plan", "weight_init_fn", "init_seed", "show_progress", "check_finite", "cache_plans", "sync_timeout"}
"""Options that a plan does not depend on."""


def recall(key: str | None, ctx: ParallelExecutionCtx) -> bool:
    """Place the parameters by the plan that is kept under a key; False, on all ranks, if there is none. A collective.

    The first rank reads it for all of them, by its key: their disks and environments may differ.
    """
    data = _read(key, ctx) if ctx.is_first else None
    data = all_gather_object(ctx.world_group, data, "looking for a plan that was kept")[0]
    if data is None:
        return False
    place(Plan.from_json(data), ctx)
    return True


def _read(key: str | None, ctx: ParallelExecutionCtx) -> Any:
    data = cache.read(PLANS, key)
    try:
        return None if data is None or problems_of(Plan.from_json(data), ctx) else data
    except (ValueError, KeyError, TypeError, AttributeError):  # not a plan
        return None


def keep(key: str | None, ctx: ParallelExecutionCtx) -> None:
    """Write the plan that was made, where the next run finds it."""
    if ctx.plan is not None and not ctx.plan.breaks and ctx.is_first:
        cache.write(PLANS, key, ctx.plan.to_json())


def fingerprint(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> str | None:
    """A key for all that the plan of a model depends on; None if there is no telling.

    A model of transformers has one, if it is planned with inputs that are made up.
    """
    if not config.cache_plans or not cache.directory(PLANS):
        return None
    return described(model, ctx, config, examples)


def described(
    model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any, code: bool = True
) -> str | None:
    """The key, whether plans are kept or not; ``code``: as of :func:`paraxis.utils.disk_cache.key_of`."""
    if config.pipeline is not None or examples is not None:
        return None
    try:
        options = {f.name: _option(getattr(config, f.name)) for f in fields(config) if f.name not in IRRELEVANT}
    except OSError:
        return None
    parameters = {
        name: [list(p.shape), str(p.dtype), p.requires_grad, ctx.aliases.get(name)]
        for name, p in ctx.param_cache.items()
    }
    ranks = [ctx.world_size, ctx.current_device.type]
    return cache.key_of(model, code=code, parameters=parameters, ranks=ranks, options=options)


def _option(value: Any) -> Any:
    if isinstance(value, (str, os.PathLike)) and os.path.isfile(value):  # the description of a machine
        return Path(value).read_text()
    return value
