"""The plan of blocks that were not planned themselves, from that of the blocks they are like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from ..capture.repeated_blocks import Repeated
from ..context import ParallelExecutionCtx
from ..graph.nodes import captured_module_of
from .solve import Solved

T = TypeVar("T")


def spread(ctx: ParallelExecutionCtx, repeated: list[Repeated], solved: Solved) -> None:
    """Give every left-out block the placements, layers, collectives and costs of the one that it is like."""
    plan = ctx.plan
    assert plan is not None
    reasons = dict(plan.replicated)
    for each in repeated:
        for index in each.like:
            for name in own(each, each.like[index], ctx.param_cache):
                other = each.renamed(name, index)
                source, target = _spec(ctx, name), _spec(ctx, other)
                if source is None or target is None or source.placement is None or target.placement is not None:
                    continue
                target.placement, target.group, target.dim = source.placement, source.group, source.dim
                target.is_modified_meta, target.is_parallel = True, source.is_parallel
                plan.add_parameter(other, source.placement, tuple(ctx.param_cache[other].shape), rank=0)
                if name in reasons:
                    plan.replicated.append((other, reasons[name]))
            inside = [s for s in solved.program.steps if each.renamed(f"{captured_module_of(s.node)}.", index)]
            talk = sum(solved.account.talk.get(s, 0.0) for s in inside)
            plan.cost += sum(solved.solution.costs.get(s, 0.0) for s in inside)
            plan.seconds += talk + sum(solved.account.work.get(s, 0.0) for s in inside)
            plan.communication += talk
        plan.layers = _repeat(plan.layers, each, lambda x: x.name, lambda x, name: replace(x, name=name))
        plan.collectives = _repeat(plan.collectives, each, lambda x: x.module, lambda x, name: replace(x, module=name))
        plan.gathered = _repeat(plan.gathered, each, lambda x: x[0], lambda x, name: (name, x[1]))


def own(each: Repeated, index: int, names: Iterable[str]) -> list[str]:
    """The names of what is in one of the blocks."""
    return [name for name in names if name.startswith(f"{each.path}.{index}.")]


def copies(repeated: list[Repeated], names: Iterable[str]) -> dict[str, int]:
    """How many parameters of the model those of the planned blocks stand for, themselves included."""
    counts: Counter[str] = Counter()
    for each in repeated:
        for index in each.like:
            counts.update(own(each, each.like[index], names))
    return {name: count + 1 for name, count in counts.items()}


def _spec(ctx: ParallelExecutionCtx, name: str) -> Any:
    return getattr(ctx.param_cache.get(name), "_spec", None)


def _repeat(items: list[T], each: Repeated, name_of: Callable[[T], str], renamed: Callable[[T, str], T]) -> list[T]:
    """The items with those of the left-out blocks, in the order of the program."""

    def of(index: int) -> list[T]:
        return [x for x in items if f"{name_of(x)}.".startswith(f"{each.path}.{index}.")]

    more = [
        renamed(x, each.renamed(f"{name_of(x)}.", index).removesuffix("."))
        for index in each.like
        for x in of(each.like[index])
    ]
    last = max((i for i, x in enumerate(items) if name_of(x).startswith(f"{each.path}.")), default=len(items) - 1)
    return [*items[: last + 1], *more, *items[last + 1 :]]
