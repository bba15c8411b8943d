"""The gradients of a strategy, as the engine derives them from placements (:mod:`paraxis.placement`).

A strategy that is right in values is right in gradients too, as long as the operator's backward is the derivative of
its forward, or comes apart in the same way. An operator with a backward of its own need not: it is tried.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import Partial, Placement, Replicate, Shard
from ..base import Strategy, is_shard
from .run import Trial, cut, mesh, same


def gradient_problem(trial: Trial, strategy: Strategy) -> str | None:
    """What is wrong with the gradients of the inputs, if anything; None also where the call has none."""
    whole = [_leaf(t) for t in trial.tensors]
    try:
        with torch.enable_grad():
            outputs = trial.run(whole)
    except RuntimeError:
        return None  # an input that cannot have a gradient
    given = [torch.randn_like(y) if y.requires_grad else None for y in outputs]
    right = _gradients(outputs, whole, given)
    if right is None:
        return None
    world = trial.call.world
    shared = [_parts(g, p, world) for g, p in zip(given, strategy.outputs)]
    found = []
    placed = trial.placed(strategy.inputs)
    for rank in range(world):
        mine = [_leaf(t) for t in placed[rank]]
        with torch.enable_grad():
            results = trial.run(mine, strategy.localize, rank)
        local = _gradients(results, mine, [parts[rank] for parts in shared])
        if local is None:
            return f"rank {rank} has no gradients where the whole has some"
        found.append(local)
    for i, wanted in enumerate(right):
        if wanted is None:
            continue
        parts = [torch.zeros_like(placed[r][i]) if (g := found[r][i]) is None else g for r in range(world)]
        if not _right(wanted, parts, strategy.inputs[i], strategy.is_sharded, trial.loose):
            return f"the gradient of input {i} is not that of the whole"
    return None


def _leaf(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().clone()
    return t.requires_grad_() if t.dtype.is_floating_point else t


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor], given: list[Any]) -> list[Any] | None:
    pairs = [(y, g) for y, g in zip(outputs, given) if g is not None and y.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not pairs or not leaves:
        return None
    try:
        found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
    except (RuntimeError, NotImplementedError):
        return None  # no backward
    return [next(found) if x.requires_grad else None for x in inputs]


def _parts(gradient: torch.Tensor | None, placement: Placement, world: int) -> list[torch.Tensor | None]:
    """What each rank gets of the gradient of a result: all of it, or of what it holds, copies in random parts."""
    if gradient is None or not isinstance(placement, Shard):
        return [gradient] * world
    weights = [_spread(torch.rand_like(cut(gradient, placement, r)), gradient, placement, r) for r in range(world)]
    total = torch.stack(weights).sum(0)
    return [cut(gradient * w / total, placement, r) for r, w in enumerate(weights)]


def _spread(part: torch.Tensor, like: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """A rank's part inside zeros of the whole shape."""
    result = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
    if not part.numel():
        return result
    result[mesh(like.shape, placement, rank)] = part
    return result


def _right(wanted: torch.Tensor, parts: list[torch.Tensor], placement: Placement, sharded: bool, loose: bool) -> bool:
    if isinstance(placement, Partial) or (isinstance(placement, Replicate) and not sharded):
        return all(same(part, wanted, loose) for part in parts)
    spread = [_spread(part, wanted, placement, r) if is_shard(placement) else part for r, part in enumerate(parts)]
    return same(torch.stack(spread).sum(0), wanted, loose)
