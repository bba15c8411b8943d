"""Running by a plan that was made before: on another machine, in an earlier run, or by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..placement import Replicate, Shard, local_shape, to_json
from .plan import Plan


def use_plan(given: Plan | str | os.PathLike[str], ctx: ParallelExecutionCtx) -> None:
    """Place every parameter as a plan says, instead of searching. A collective.

    What a plan fixes is where the parameters live; how the tensors in between are placed is solved when a graph is
    compiled, with the parameters as they are. So a plan may be wrong for the model's speed, but not for its results.

    Raises:
        ValueError: the plan is not one of this model and number of ranks, or the ranks were given different ones.
    """
    plan = given if isinstance(given, Plan) else _read(given)
    problems = problems_of(plan, ctx)
    placed = json.dumps({name: to_json(p.placement) for name, p in sorted(plan.parameters.items())})
    said = all_gather_object(ctx.world_group, [problems, placed], "comparing the given plans")
    for rank, (found, text) in enumerate(said):
        if found:
            lines = "\n".join(f"  - {problem}" for problem in found[:12])
            more = f"\n  and {len(found) - 12} more" if len(found) > 12 else ""
            raise ValueError(f"the given plan does not fit the model:\n{lines}{more}\nMake a new one: leave out plan=.")
        if text != said[0][1]:
            raise ValueError(f"rank {rank} was given another plan than rank 0: give all ranks the same one")
    place(plan, ctx)


def place(plan: Plan, ctx: ParallelExecutionCtx) -> None:
    """Place every parameter as a plan that fits the model says."""
    for name, parameter in ctx.param_cache.items():
        spec: Any = getattr(parameter, "_spec", None)
        if spec is None:
            continue
        spec.placement, spec.group, spec.is_modified_meta = plan.parameters[name].placement, ctx.tp_group, True
        spec.is_parallel = isinstance(spec.placement, Shard)
    ctx.plan = _seen_from(ctx.rank, plan)


def _seen_from(rank: int, plan: Plan) -> Plan:
    """A plan with the local shapes of a rank; saved are those of the first one."""
    parameters = {
        name: replace(p, local_shape=local_shape(p.placement, p.global_shape, rank))
        for name, p in plan.parameters.items()
    }
    layers = [
        replace(layer, local_shape=parameters[f"{layer.name}.weight"].local_shape)
        if f"{layer.name}.weight" in parameters
        else layer
        for layer in plan.layers
    ]
    return replace(plan, parameters=parameters, layers=layers)


def _read(path: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.load(os.fspath(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"plan={os.fspath(path)!r} is not a plan ({type(error).__name__}: {error}). Plans are written by "
            "`Plan.save` and by `paraxis plan MODEL --tp N --save FILE`."
        ) from error


def problems_of(plan: Plan, ctx: ParallelExecutionCtx) -> list[str]:
    """A line for everything that keeps the plan from being used."""
    if plan.world_size != ctx.world_size:
        return [f"it is for {plan.world_size} ranks, and there are {ctx.world_size}"]
    if plan.breaks:
        return [
            f"it was made by running the model, which is not one graph ({plan.breaks[0]}); such plans are not reused"
        ]
    shapes = {name: tuple(p.shape) for name, p in ctx.param_cache.items() if getattr(p, "_spec", None) is not None}
    found = [f"{name}: not in the plan" for name in shapes if name not in plan.parameters]
    found += [f"{name}: in the plan, not in the model" for name in plan.parameters if name not in shapes]
    for name in shapes.keys() & plan.parameters.keys():
        planned = plan.parameters[name]
        if planned.global_shape != shapes[name]:
            found.append(f"{name}: of shape {planned.global_shape} in the plan, {shapes[name]} in the model")
        elif not isinstance(planned.placement, (Replicate, Shard)):
            found.append(f"{name}: parameters are held whole or in shards, not as {planned.placement}")
        else:
            try:
                for rank in range(ctx.world_size):
                    local_shape(planned.placement, shapes[name], rank)
            except (ValueError, IndexError, AssertionError) as error:
                found.append(f"{name}: {planned.placement} does not fit shape {shapes[name]} ({error})")
    return sorted(found)
