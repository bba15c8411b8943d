"""What a placement costs: communication, compute and memory, in seconds of one rank.

The memory of a parameter that could be sharded but is not outweighs any communication: a model that does not fit does
not run. Beyond that, fewer and smaller collectives win, then less work per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from ..placement import REPLICATE, Partial, Placement, Replicate, Shard
from ..rules import Call, Strategy, Tensor
from .machine import DEFAULT, Machine, volume
from .program import hint

aten = torch.ops.aten
CONTRACTING = {
    aten.linear.default: 0,
    aten.matmul.default: 0,
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
"""The matmuls, and which of their inputs has the inner dimension last."""


@dataclass(frozen=True)
class CostModel:
    """Seconds for what a rank does, and prices, also in seconds, for what takes no time but should be avoided.

    ``latency``, ``bandwidth``, ``flops`` and ``memory`` are the rates of a default machine; ``machine`` replaces them
    (see :meth:`on`).
    """

    world: int = 2
    latency: float = DEFAULT.link.latency
    bandwidth: float = DEFAULT.link.bandwidth
    flops: float = DEFAULT.flops
    memory: float = DEFAULT.memory
    machine: Machine | None = None
    backward: bool = False
    """Whether a backward pass follows: twice the work, and the collectives for gradients."""
    detour: float = 1e-8
    """Breaks ties in favour of reducing partial values early: less rounding, and replicated values are simpler."""
    replication: float = 1e-6
    """Seconds per byte of a replicated parameter that could be sharded."""
    narrow: float = 1e-10
    """The same for a layer with few outputs (a router, a small head): sharding it saves little and puts a collective
    into the forward, so only large ones are sharded."""
    aspect: int = 8
    """A layer with this many inputs per output is one with few outputs."""
    unscattered: float = 1e-3
    """Seconds for an activation between parallel layers that is replicated but should be sharded on the sequence."""
    gathered: float = 0.5
    """The price of a parameter that is sharded but gathered at each use, as a fraction of that of a replicated one."""
    thin: int = 4
    """A parameter of at most this many vectors (a depthwise convolution) may stay replicated, as vectors may."""

    def fraction(self, placement: Placement) -> float:
        """The largest fraction of the tensor that one rank holds."""
        if not isinstance(placement, Shard):
            return 1.0
        parts = (
            prod(sum(b - a for a, b in x.ranges[r]) / x.period for _, x in placement.layouts)
            for r in range(max(placement.world, 1) if placement.layouts else 1)
        )
        return max(parts)

    @classmethod
    def on(cls, machine: Machine, world: int, *, backward: bool = False) -> CostModel:
        """The costs of ``world`` ranks on a machine."""
        if machine is DEFAULT:
            return cls(world=world, backward=backward)
        return cls(world=world, flops=machine.flops, memory=machine.memory, machine=machine, backward=backward)

    def without_prices(self) -> CostModel:
        """Time alone: what a plan takes, without the prices that guide the search."""
        return replace(self, detour=0.0, replication=0.0, narrow=0.0, unscattered=0.0)

    def collective(self, kind: str, size: float) -> float:
        """Seconds for a collective on a full tensor of ``size`` bytes."""
        if self.machine is not None:
            return self.machine.collective(kind, size, self.world)
        if self.world == 1:
            return 0.0  # nothing is sent
        return self.latency + volume(kind, self.world) * size / self.bandwidth

    def move(self, source: Placement, target: Placement, size: float) -> float:
        """Seconds to move a tensor of ``size`` bytes from one placement to another."""
        kind = collective_between(source, target)
        return self.collective(kind, size) if kind is not None else 0.0

    def return_gradient(self, source: Placement, target: Placement, size: float, uses: int) -> float:
        """Seconds to move the gradient of a tensor that was moved back to the placement it came from.

        A tensor is moved once for all its ``uses``, and so is its gradient: each use pays an equal share.
        """
        if not self.backward or source == target or not isinstance(target, Shard):
            return 0.0  # every rank has the full gradient and takes what it needs of it
        if target.layouts:
            return self.collective("all_gather", size) / uses
        kind = "reduce_scatter" if isinstance(source, Shard) and source.layouts else "all_reduce"
        return self.collective(kind, size) / uses

    def run(self, call: Call, strategy: Strategy) -> float:
        """Seconds of compute and memory traffic of one rank."""
        traffic = sum(self.fraction(p) * nbytes(t) for t, p in zip(call.inputs, strategy.inputs, strict=True))
        traffic += sum(self.fraction(p) * nbytes(t) for t, p in zip(call.outputs, strategy.outputs, strict=True))
        seconds = traffic / self.memory
        if call.target in CONTRACTING:
            i = CONTRACTING[call.target]
            data, placement = call.inputs[i], strategy.inputs[i]
            inner = hint(data.shape[-1])
            work = self.fraction(strategy.outputs[0]) * numel(call.out)
            if isinstance(strategy.outputs[0], Partial):
                work = numel(call.out) * self.fraction(placement)
            seconds += 2 * work * inner / self.flops
        if self.backward:
            seconds *= 3
        if call.target in CONTRACTING:
            return seconds
        if not strategy.kind and any(isinstance(p, Partial) for p in strategy.outputs):
            seconds += self.detour
        return seconds

    def store(self, tensor: Tensor, placement: Placement, shardable: bool) -> float:
        """The price of storing a parameter in this placement."""
        if not isinstance(placement, Shard) or not placement.layouts:
            if not shardable or tensor.ndim < 2:
                return 0.0
            sizes = [hint(n) for n in tensor.shape]
            if prod(sizes) <= self.thin * max(sizes):
                return 0.0
            narrow = tensor.ndim == 2 and sizes[1] >= self.aspect * sizes[0]
            return (self.narrow if narrow else self.replication) * nbytes(tensor)
        return self.fraction(placement) * nbytes(tensor) / self.memory

    def gather_weight(self, tensor: Tensor) -> float:
        """The price of gathering a sharded weight, besides the collective: never worth it to save an all-reduce."""
        return self.gathered * self.store(tensor, REPLICATE, shardable=True)


def collective_between(source: Placement, target: Placement) -> str | None:
    """The collective that moves a tensor from one placement to another; None if nothing has to be sent."""
    if source == target or isinstance(source, Replicate):
        return None
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Shard) and target.layouts else "all_reduce"
    return "all_gather" if source.layouts else None


def numel(tensor: Tensor) -> int:
    """The number of elements; symbolic sizes count with their hints."""
    return prod((hint(n) for n in tensor.shape), start=1)


def nbytes(tensor: Tensor) -> int:
    """The number of bytes; symbolic sizes count with their hints."""
    if tensor.itemsize is not None:
        return round(numel(tensor) * tensor.itemsize)
    return numel(tensor) * tensor.dtype.itemsize
