"""Applying a plan: the placements of a model's parameters are what the plan says, wherever it comes from."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object
from ..placement import Replicate, Shard, local_shape, to_json
from ..tensor.apply_placements import apply_placements
from ..tensor.parameter_meta import ParameterMeta
from .plan import Plan


def apply_plan(plan: Plan, ctx: ParallelExecutionCtx) -> None:
    """Place every parameter as the plan says, and make it the plan of the context.

    What a plan fixes is where the parameters live; how the tensors in between are placed is solved when a graph is
    compiled, with the parameters as they are. So a plan may be bad for the model's speed, but not for its results.
    """
    placements = plan.placements
    apply_placements(
        ((meta, placements[name]) for name, meta in parameter_metas(ctx).items() if name in placements), ctx.tp_group
    )
    ctx.plan = _seen_from(ctx.rank, plan)


def parameter_metas(ctx: ParallelExecutionCtx) -> dict[str, ParameterMeta]:
    """What is known of the sharded parameters of the context, by name."""
    found = {name: getattr(p, "_spec", None) for name, p in ctx.param_cache.items()}
    return {name: meta for name, meta in found.items() if isinstance(meta, ParameterMeta)}


def parameter_shapes(ctx: ParallelExecutionCtx) -> dict[str, tuple[int, ...]]:
    """The global shapes of the sharded parameters of the context, by name."""
    return {name: tuple(ctx.param_cache[name].shape) for name in parameter_metas(ctx)}


def _seen_from(rank: int, plan: Plan) -> Plan:
    """The plan with the local shapes of a rank; saved plans have those of rank 0."""
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


def plan_of_user(plan: Plan | str | os.PathLike[str], ctx: ParallelExecutionCtx) -> Plan:
    """The plan that was passed as ``plan=``, or read from that file, checked against the model. A collective.

    Raises:
        ValueError: the plan is not one of this model and number of ranks, or the ranks were passed different ones.
    """
    plan = plan if isinstance(plan, Plan) else _read(plan)
    placements = json.dumps({name: to_json(p.placement) for name, p in sorted(plan.parameters.items())})
    answers = all_gather_object(ctx.world_group, [problems_of(plan, ctx), placements], "comparing the plans")
    for rank, (problems, text) in enumerate(answers):
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems[:12])
            more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise ValueError(f"plan= does not fit the model:\n{lines}{more}\nTo make a new one, leave out plan=.")
        if text != answers[0][1]:
            raise ValueError(f"rank {rank} was passed another plan than rank 0: pass the same plan= on all ranks")
    return plan


def _read(path: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.load(os.fspath(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"plan={os.fspath(path)!r} is not a plan ({type(error).__name__}: {error}). Plans are written by "
            "`Plan.save` and by `paraxis plan MODEL --tp N --save FILE`."
        ) from error


def problems_of(plan: Plan, ctx: ParallelExecutionCtx) -> list[str]:
    """A line for everything that prevents the plan from being used."""
    if plan.world_size != ctx.world_size:
        return [f"it is for {plan.world_size} ranks, and there are {ctx.world_size}"]
    if plan.breaks:
        return [
            f"it was made by running the model, which has graph breaks ({plan.breaks[0]}); such plans are not reused"
        ]
    shapes = parameter_shapes(ctx)
    found = [f"{name}: not in the plan" for name in shapes if name not in plan.parameters]
    found += [f"{name}: in the plan, not in the model" for name in plan.parameters if name not in shapes]
    for name in shapes.keys() & plan.parameters.keys():
        planned = plan.parameters[name]
        if planned.global_shape != shapes[name]:
            found.append(f"{name}: of shape {planned.global_shape} in the plan, {shapes[name]} in the model")
        elif not isinstance(planned.placement, (Replicate, Shard)):
            found.append(f"{name}: parameters are replicated or sharded, not {planned.placement}")
        else:
            try:
                for rank in range(ctx.world_size):
                    local_shape(planned.placement, shapes[name], rank)
            except (ValueError, IndexError, AssertionError) as error:
                found.append(f"{name}: {planned.placement} does not fit shape {shapes[name]} ({error})")
    return sorted(found)
