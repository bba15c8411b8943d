"""The memory of one rank under a plan: parameters, buffers, activations, KV cache, gradients and optimizer state.

Activations and KV cache are measured by running a rank's local program on fake tensors (``plan/activations.py``). If
that fails, the KV cache is still measured. Its size depends on the model: some layers cache every position, some a
sliding window, some a fixed-size state. So the unsharded model runs on the meta device, and the tensors in the cache it
returns are counted; the plan says which shard of them a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from ..capture import mark_output_op
from ..compat.torch import TorchDispatchMode
from ..compat.transformers import batched_experts
from ..placement import Placement, local_shape
from ..tensor.parameter_meta import ParameterMeta
from .plan import Memory, Plan
from .quantized import quantization_note

if TYPE_CHECKING:
    from ..passes.solve import Solved
    from .activations import Usage

CacheTensor = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a KV cache."""
ADAMW_STATES = 2
"""State values that AdamW has per trained parameter."""
MAX_CACHE_DEPTH = 12
"""How many objects deep the tensors of a cache are searched for."""


@dataclass(frozen=True)
class Sizes:
    """The workload to compute memory for; without ``context``, KV cache and activations are left out."""

    batch: int = 1
    context: int | None = None
    train: bool = False


@dataclass
class CacheTensors:
    """The tensors in a model's KV cache: after the call it was planned with, and after one of the requested size."""

    planned: list[CacheTensor]
    requested: list[CacheTensor]


def measure_cache(model: nn.Module, planned: dict[str, Any], requested: dict[str, Any]) -> CacheTensors | str:
    """Run the model on the meta device with both inputs and collect the tensors of the caches it returns.

    Returns the reason, as text, if that is not possible.
    """
    try:
        found = CacheTensors(_run_on_meta(model, planned)[0], _run_on_meta(model, requested)[0])
    except Exception as error:  # its code reads tensor values, or creates tensors on another device
        return (
            f"the model does not run on the meta device: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    if len(found.planned) != len(found.requested):
        return "the cache holds more tensors after a longer call"
    return found if found.planned else "the model returns no cache"


def operator_ratio(model: nn.Module, planned: dict[str, Any], requested: dict[str, Any]) -> float:
    """How many operators a call with the requested inputs runs for each one with the planned inputs; 1 if unknown."""
    try:
        return _run_on_meta(model, requested)[1] / _run_on_meta(model, planned)[1]
    except Exception:  # its code reads tensor values, or creates tensors on another device
        return 1.0


def resize_inputs(planned: dict[str, Any], rows: int, context: int) -> dict[str, Any] | str:
    """The inputs of the plan with ``rows`` sequences of ``context`` tokens; the reason, as text, if not possible."""
    ids = planned.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "the model does not take input_ids"

    def resized(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != ids.shape[0]:
            return value
        if name.endswith("input_ids") or value.shape == ids.shape:
            return torch.ones(rows, context, dtype=value.dtype)
        return value[:1].expand(rows, *value.shape[1:])

    return {name: resized(name, value) for name, value in planned.items()}


class _OperatorCount(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _run_on_meta(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[CacheTensor], int]:
    """The tensors of the cache that a call returns, and the number of operators it runs."""
    named = (*model.named_parameters(), *model.named_buffers())
    state = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named}
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.no_grad(), batched_experts(model), _OperatorCount() as operators:
        output = functional_call(model, state, kwargs=on_meta)
    return [(tuple(t.shape), t.dtype) for t in tensors_in_caches(output)], operators.count


def tensors_in_caches(output: Any) -> Iterator[torch.Tensor]:
    """The tensors inside an output's cache objects (not plain containers): they stay sharded for the next call."""
    seen: set[int] = set()

    def inside(value: Any, depth: int) -> Iterator[torch.Tensor]:
        if id(value) in seen or depth > MAX_CACHE_DEPTH:
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
                yield from tensors_in_caches(item) if type(item) in (list, tuple, dict) else inside(item, 0)


def memory_of(
    plan: Plan,
    parameters: dict[str, Any],
    model: nn.Module,
    solved: Solved,
    usage: Usage | str,
    tensors: CacheTensors | str,
    sizes: Sizes,
) -> Memory:
    """The memory of the rank with the largest shards; activations and KV cache are those of the simulated rank.

    Args:
        plan: The plan.
        parameters: The model's parameters by name.
        model: The model, for its buffers.
        solved: The solution that the plan was made of.
        usage: Activations and KV cache as measured, or the reason why they were not.
        tensors: The KV cache measured on the meta device, used if ``usage`` has none, or the reason.
        sizes: The workload.
    """

    def shard_bytes(names: list[str], rank: int) -> int:
        return sum(shard_bytes_of(parameters[n], plan.parameters[n].placement, rank) for n in names)

    ranks = range(plan.world_size)
    trained = [n for n in plan.parameters if parameters[n].requires_grad] if sizes.train else []
    gradients = max(shard_bytes(trained, rank) for rank in ranks)
    cache, activations = None, None
    if not isinstance(usage, str):
        activations, cache = usage.activations, usage.cache or None
    elif isinstance(tensors, CacheTensors):
        placements = cache_placements(solved)
        cache = max(_cache_bytes(tensors, placements, rank) for rank in ranks)
    seconds, communication = (None, None) if isinstance(usage, str) else (usage.seconds, usage.communication)
    return Memory(
        parameters=max(shard_bytes(list(plan.parameters), rank) for rank in ranks),
        buffers=sum(b.numel() * b.dtype.itemsize for b in model.buffers()),
        cache=cache,
        activations=activations,
        gradients=gradients,
        optimizer=ADAMW_STATES * gradients,
        batch=sizes.batch,
        context=sizes.context or 0,
        cache_error=tensors if isinstance(tensors, str) else "",
        activations_error=usage if isinstance(usage, str) else "",
        seconds=seconds,
        communication=communication,
        quantization=quantization_note(getattr(model, "config", None), parameters.values()),
    )


def shard_bytes_of(parameter: Any, placement: Placement, rank: int) -> int:
    """The bytes of a rank's shard of a parameter: as encoded, if it is quantized."""
    meta = getattr(parameter, "spec", None)
    if isinstance(meta, ParameterMeta) and meta.quantized is not None:
        return meta.quantized.nbytes(placement, rank)
    return prod(local_shape(placement, parameter.shape, rank)) * int(parameter.dtype.itemsize)


def cache_placements(solved: Solved) -> dict[CacheTensor, Placement]:
    """The placements of the cache tensors that a program returns, by shape and dtype."""
    returned = [v for step in solved.program.steps if step.call is None for v in step.inputs]
    found: dict[CacheTensor, Placement] = {}
    for value, placement in zip(returned, solved.solution.results, strict=True):
        tensor = value.node.meta.get("val")
        if value.node.target is not mark_output_op and isinstance(tensor, torch.Tensor):
            found[tuple(tensor.shape), tensor.dtype] = placement
    return found


def _cache_bytes(tensors: CacheTensors, placements: dict[CacheTensor, Placement], rank: int) -> int:
    total = 0
    for planned, (shape, dtype) in zip(tensors.planned, tensors.requested, strict=True):
        placement = placements.get(planned)
        total += prod(local_shape(placement, shape, rank) if placement is not None else shape) * dtype.itemsize
    return total
