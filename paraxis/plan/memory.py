"""What a plan takes of a rank's memory: parameters, buffers, activations, the cache, and what training adds.

Activations and the cache are counted by running a rank's program without memory (``plan/activations.py``). Where
that cannot be done the cache is still told. How large it gets is the model's business: some layers keep every position,
some a window, some a state. So the unsharded model is run on the meta device, and what it keeps is measured; the plan
says which part of that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture import mark_output_op
from ..placement import Placement, local_shape
from .plan import Memory, Plan

if TYPE_CHECKING:
    from ..passes.solve import Solved
    from .activations import Used

Kept = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor of a cache."""
ADAM = 2
"""Values that AdamW keeps for every trained one."""
DEEPEST = 12
"""How far into the objects of a cache tensors are looked for."""


@dataclass(frozen=True)
class Sizes:
    """What the memory of a plan is given for; without a context neither cache nor activations are counted."""

    batch: int = 1
    context: int | None = None
    train: bool = False


@dataclass
class Kinds:
    """The tensors that a model keeps between calls: as planned, and as they are for the sizes asked for."""

    planned: list[Kept]
    asked: list[Kept]


def kept_tensors(model: nn.Module, planned: dict[str, Any], asked: dict[str, Any]) -> Kinds | str:
    """What a model keeps after a call with the inputs it is planned with, and after one with those asked for.

    A text where that is not known: why.
    """
    try:
        found = Kinds(_kept(model, planned)[0], _kept(model, asked)[0])
    except Exception as error:  # it looks at values, or makes tensors elsewhere
        return f"it does not run without memory: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if len(found.planned) != len(found.asked):
        return "it keeps more tensors after a longer call"
    return found if found.planned else "it keeps nothing between calls"


def growth(model: nn.Module, planned: dict[str, Any], asked: dict[str, Any]) -> float:
    """How many operators a call with the inputs asked for has for each of one with those planned; 1 if not known."""
    try:
        return _kept(model, asked)[1] / _kept(model, planned)[1]
    except Exception:  # it looks at values, or makes tensors elsewhere
        return 1.0


def resized(planned: dict[str, Any], rows: int, context: int) -> dict[str, Any] | str:
    """The inputs that a model is planned with for so many sequences and tokens; a text where there are none: why."""
    ids = planned.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "its inputs are no token ids"

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != ids.shape[0]:
            return value
        if name.endswith("input_ids") or value.shape == ids.shape:
            return torch.ones(rows, context, dtype=value.dtype)
        return value[:1].expand(rows, *value.shape[1:])

    return {name: other(name, value) for name, value in planned.items()}


@contextmanager
def _experts_at_once(model: nn.Module) -> Iterator[None]:
    """Run experts in a way that does not look at which are chosen, and takes any dtype without memory."""
    name, found = "_experts_implementation", {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, name, None), str):
            found[id(config)] = (config, getattr(config, name))
    try:
        for config, _ in found.values():
            setattr(config, name, "batched_mm")
        yield
    finally:
        for config, before in found.values():
            setattr(config, name, before)


class _Counting(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _kept(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Kept], int]:
    """What a model keeps after a call, and how many operators it ran."""
    named = (*model.named_parameters(), *model.named_buffers())
    state = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named}
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.no_grad(), _experts_at_once(model), _Counting() as counting:
        output = functional_call(model, state, kwargs=given)
    return [(tuple(t.shape), t.dtype) for t in held_tensors(output)], counting.count


def held_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that an output holds beyond plain containers: those stay sharded, and the next call reads them."""
    seen: set[int] = set()

    def inside(value: Any, depth: int) -> Iterator[torch.Tensor]:
        if id(value) in seen or depth > DEEPEST:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from inside(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from inside(item, depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            yield from inside(vars(value), depth + 1)

    if isinstance(output, (list, tuple, dict)):
        for item in output.values() if isinstance(output, dict) else output:
            if not isinstance(item, (torch.Tensor, str)):
                yield from held_tensors(item) if type(item) in (list, tuple, dict) else inside(item, 0)


def memory_of(
    plan: Plan,
    parameters: dict[str, Any],
    model: nn.Module,
    solved: Solved,
    used: Used | str,
    kinds: Kinds | str,
    sizes: Sizes,
) -> Memory:
    """The memory of the fullest rank under a plan; of what its program makes that of the rank that was run."""

    def held(names: list[str], rank: int) -> int:
        known = ((parameters[n].dtype.itemsize, plan.parameters[n]) for n in names)
        return sum(size * prod(local_shape(p.placement, p.global_shape, rank)) for size, p in known)

    ranks = range(plan.world_size)
    trained = [n for n in plan.parameters if parameters[n].requires_grad] if sizes.train else []
    gradients = max(held(trained, rank) for rank in ranks)
    cache, activations = None, None
    if not isinstance(used, str):
        activations, cache = used.activations, used.cache or None
    elif isinstance(kinds, Kinds):
        where = places(solved)
        cache = max(_cache_bytes(kinds, where, rank) for rank in ranks)
    return Memory(
        parameters=max(held(list(plan.parameters), rank) for rank in ranks),
        buffers=sum(b.numel() * b.dtype.itemsize for b in model.buffers()),
        cache=cache,
        activations=activations,
        gradients=gradients,
        optimizer=ADAM * gradients,
        batch=sizes.batch,
        context=sizes.context or 0,
        unknown=kinds if isinstance(kinds, str) else "",
        uncounted=used if isinstance(used, str) else "",
    )


def places(solved: Solved) -> dict[Kept, Placement]:
    """Where the tensors that a program keeps are, by their shape and dtype."""
    returned = [v for step in solved.program.steps if step.call is None for v in step.inputs]
    found: dict[Kept, Placement] = {}
    for value, placement in zip(returned, solved.solution.results, strict=True):
        tensor = value.node.meta.get("val")
        if value.node.target is not mark_output_op and isinstance(tensor, torch.Tensor):
            found[tuple(tensor.shape), tensor.dtype] = placement
    return found


def _cache_bytes(kinds: Kinds, where: dict[Kept, Placement], rank: int) -> int:
    total = 0
    for planned, (shape, dtype) in zip(kinds.planned, kinds.asked, strict=True):
        placement = where.get(planned)
        total += prod(local_shape(placement, shape, rank) if placement is not None else shape) * dtype.itemsize
    return total
