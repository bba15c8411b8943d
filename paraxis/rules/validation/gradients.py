"""The gradients of a strategy, as the engine derives them from placements (:mod:`paraxis.placement`).

A strategy with right values has right gradients if the operator's backward is the derivative of its forward. A custom
backward may be anything, so gradients are compared too.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import Partial, Placement, Replicate, Shard
from ..base import Strategy, is_shard
from .run import Trial, indices_of, same, shard_of


def gradient_problem(trial: Trial, strategy: Strategy) -> str | None:
    """What is wrong with the gradients of the inputs; None if nothing is, or if the call has no gradients."""
    leaves = [_leaf(t) for t in trial.tensors]
    try:
        with torch.enable_grad():
            outputs = trial.run(leaves)
    except RuntimeError:
        return None  # an input that cannot have a gradient
    incoming = [torch.randn_like(y) if y.requires_grad else None for y in outputs]
    expected = _gradients(outputs, leaves, incoming)
    if expected is None:
        return None
    world = trial.call.world
    incoming_parts = [_incoming(g, p, world) for g, p in zip(incoming, strategy.outputs)]
    found = []
    placed = trial.placed(strategy.inputs)
    for rank in range(world):
        mine = [_leaf(t) for t in placed[rank]]
        with torch.enable_grad():
            results = trial.run(mine, strategy.localize, rank)
        local = _gradients(results, mine, [parts[rank] for parts in incoming_parts])
        if local is None:
            return f"rank {rank} has no gradients, but the unsharded call has"
        found.append(local)
    for i, gradient in enumerate(expected):
        if gradient is None:
            continue
        parts = [torch.zeros_like(placed[r][i]) if (g := found[r][i]) is None else g for r in range(world)]
        if not _right(gradient, parts, strategy.inputs[i], strategy.is_sharded, trial.loose):
            return f"the gradient of input {i} is not that of the unsharded call"
    return None


def _leaf(t: torch.Tensor) -> torch.Tensor:
    """A copy that requires a gradient, if it can."""
    t = t.detach().clone()
    return t.requires_grad_() if t.dtype.is_floating_point else t


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor], incoming: list[Any]) -> list[Any] | None:
    """The gradients of the inputs, from those of the outputs; None if there is no backward."""
    pairs = [(y, g) for y, g in zip(outputs, incoming) if g is not None and y.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not pairs or not leaves:
        return None
    try:
        found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
    except (RuntimeError, NotImplementedError):
        return None  # no backward
    return [next(found) if x.requires_grad else None for x in inputs]


def _incoming(gradient: torch.Tensor | None, placement: Placement, world: int) -> list[torch.Tensor | None]:
    """The gradient of a result on each rank: all of it, or that of its shard, copies as random partial values."""
    if gradient is None or not isinstance(placement, Shard):
        return [gradient] * world
    weights = [
        _unsharded(torch.rand_like(shard_of(gradient, placement, r)), gradient, placement, r) for r in range(world)
    ]
    total = torch.stack(weights).sum(0)
    return [shard_of(gradient * w / total, placement, r) for r, w in enumerate(weights)]


def _unsharded(part: torch.Tensor, like: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The shard of a rank inside zeros of the full shape."""
    result = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
    if not part.numel():
        return result
    result[indices_of(like.shape, placement, rank)] = part
    return result


def _right(expected: torch.Tensor, parts: list[torch.Tensor], placement: Placement, sharded: bool, loose: bool) -> bool:
    """Whether the gradients of the ranks are, or sum to, the expected one."""
    if isinstance(placement, Partial) or (isinstance(placement, Replicate) and not sharded):
        return all(same(part, expected, loose) for part in parts)
    terms = [_unsharded(part, expected, placement, r) if is_shard(placement) else part for r, part in enumerate(parts)]
    return same(torch.stack(terms).sum(0), expected, loose)
