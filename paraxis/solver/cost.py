"""What a placement costs: communication, computation and memory, in seconds of one rank.

The memory of a parameter that could be split but is not weighs more than any communication: a model that does not fit
does not run. Beyond that, fewer and smaller collectives win, then less work per rank.
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
_CONTRACTING = {
    aten.linear.default: 0,
    aten.matmul.default: 0,
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}


@dataclass(frozen=True)
class CostModel:
    """Seconds for what a rank does, and prices, in seconds too, for what is not a matter of time.

    ``latency``, ``bandwidth``, ``flops`` and ``memory`` are the rates of a plain machine; a :class:`Machine` that is
    given takes their place (see :meth:`on`).
    """

    world: int = 2
    latency: float = DEFAULT.link.latency
    bandwidth: float = DEFAULT.link.bandwidth
    flops: float = DEFAULT.flops
    memory: float = DEFAULT.memory
    machine: Machine | None = None
    backward: bool = False
    """Whether a backward pass follows: twice the work, and the collectives that bring gradients together."""
    detour: float = 1e-8
    """Of two equal ways, reduce a sum early: later terms round in every rank, and replicated values are simpler."""
    replication: float = 1e-6
    """Seconds per byte for keeping a parameter whole that could be split."""
    narrow: float = 1e-10
    """The same for a layer with few outputs (a router, a small head): splitting it saves little and puts a collective
    into the forward, so it is split only where it is large."""
    aspect: int = 8
    """From how many inputs per output a layer counts as one with few outputs."""
    unsplit: float = 1e-3
    """Seconds for an activation that is whole between parallel layers where it should be split on the sequence."""
    gathered: float = 0.5
    """The part of the price of a whole parameter for one that is split, but made whole wherever it is used."""
    thin: int = 4
    """A parameter of up to so many vectors (a depthwise convolution) may stay whole, as vectors may."""

    def fraction(self, placement: Placement) -> float:
        """The largest part of the tensor that one rank holds."""
        if not isinstance(placement, Shard):
            return 1.0
        parts = (
            prod(sum(b - a for a, b in x.ranges[r]) / x.period for _, x in placement.layouts)
            for r in range(max(placement.world, 1) if placement.layouts else 1)
        )
        return max(parts)

    @classmethod
    def on(cls, machine: Machine, world: int, *, backward: bool = False) -> CostModel:
        """The costs of a number of ranks on a machine."""
        if machine is DEFAULT:
            return cls(world=world, backward=backward)
        return cls(world=world, flops=machine.flops, memory=machine.memory, machine=machine, backward=backward)

    def without_prices(self) -> CostModel:
        """Time alone: what a plan takes, rather than what makes it the one to choose."""
        return replace(self, detour=0.0, replication=0.0, narrow=0.0, unsplit=0.0)

    def collective(self, kind: str, size: float) -> float:
        """Seconds for a collective on a tensor that has ``size`` bytes when it is whole."""
        if self.machine is not None:
            return self.machine.collective(kind, size, self.world)
        return self.latency + volume(kind, self.world) * size / self.bandwidth

    def move(self, source: Placement, target: Placement, size: float) -> float:
        """Bring a tensor of ``size`` bytes from one placement to another."""
        kind = collective_between(source, target)
        return self.collective(kind, size) if kind is not None else 0.0

    def return_gradient(self, source: Placement, target: Placement, size: float, uses: int) -> float:
        """Bring the gradient of a tensor that was moved back to where it came from, in the backward pass.

        A tensor is moved once for all its ``uses``, and so is its gradient: they are charged for it alike.
        """
        if not self.backward or source == target or not isinstance(target, Shard):
            return 0.0  # a whole gradient is at hand: every rank takes what it needs of it
        if target.layouts:
            return self.collective("all_gather", size) / uses
        kind = "reduce_scatter" if isinstance(source, Shard) and source.layouts else "all_reduce"
        return self.collective(kind, size) / uses

    def run(self, call: Call, strategy: Strategy) -> float:
        """Compute and memory traffic of one rank."""
        traffic = sum(self.fraction(p) * nbytes(t) for t, p in zip(call.inputs, strategy.inputs, strict=True))
        traffic += sum(self.fraction(p) * nbytes(t) for t, p in zip(call.outputs, strategy.outputs, strict=True))
        seconds = traffic / self.memory
        if call.target in _CONTRACTING:
            i = _CONTRACTING[call.target]
            data, placement = call.inputs[i], strategy.inputs[i]
            inner = hint(data.shape[-1])
            work = self.fraction(strategy.outputs[0]) * numel(call.out)
            if isinstance(strategy.outputs[0], Partial):
                work = numel(call.out) * self.fraction(placement)
            seconds += 2 * work * inner / self.flops
        if self.backward:
            seconds *= 3
        if call.target in _CONTRACTING:
            return seconds
        if not strategy.kind and any(isinstance(p, Partial) for p in strategy.outputs):
            seconds += self.detour
        return seconds

    def keep(self, tensor: Tensor, placement: Placement, splittable: bool) -> float:
        """Keep a parameter in this placement."""
        if not isinstance(placement, Shard) or not placement.layouts:
            if not splittable or tensor.ndim < 2:
                return 0.0
            sizes = [hint(n) for n in tensor.shape]
            if prod(sizes) <= self.thin * max(sizes):
                return 0.0
            narrow = tensor.ndim == 2 and sizes[1] >= self.aspect * sizes[0]
            return (self.narrow if narrow else self.replication) * nbytes(tensor)
        return self.fraction(placement) * nbytes(tensor) / self.memory

    def gather_weight(self, tensor: Tensor) -> float:
        """Make a weight whole to use it, beside the collective: never done to save a sum."""
        return self.gathered * self.keep(tensor, REPLICATE, splittable=True)


def collective_between(source: Placement, target: Placement) -> str | None:
    """What brings a tensor from one placement to another; None if nothing has to be sent."""
    if source == target or isinstance(source, Replicate):
        return None
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Shard) and target.layouts else "all_reduce"
    return "all_gather" if source.layouts else None


def numel(tensor: Tensor) -> int:
    return prod((hint(n) for n in tensor.shape), start=1)


def nbytes(tensor: Tensor) -> int:
    return numel(tensor) * tensor.dtype.itemsize
