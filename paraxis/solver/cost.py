"""What a placement costs: communication, computation and memory, in seconds of one rank.

The memory of a parameter that could be split but is not weighs more than any communication: a model that does not fit
does not run. Beyond that, fewer and smaller collectives win, then less work per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ..placement import Partial, Placement, Replicate, Shard
from ..rules import Call, Strategy, Tensor
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
    """Rates of the machine. The defaults are the order of magnitude of one node with a fast interconnect."""

    world: int = 2
    latency: float = 2e-5
    bandwidth: float = 1e11
    flops: float = 1e14
    memory: float = 1e12
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

    def all_reduce(self, size: float) -> float:
        return self.latency + 2 * (self.world - 1) / self.world * size / self.bandwidth

    def all_gather(self, size: float) -> float:
        return self.latency + (self.world - 1) / self.world * size / self.bandwidth

    def move(self, source: Placement, target: Placement, size: float) -> float:
        """Bring a tensor of ``size`` bytes from one placement to another."""
        if source == target or isinstance(source, Replicate):
            return 0.0
        if isinstance(source, Partial):
            if isinstance(target, Shard) and target.layouts:
                return self.all_gather(size)
            return self.all_reduce(size)
        return self.all_gather(size) if source.layouts else 0.0

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
        elif not strategy.kind and any(isinstance(p, Partial) for p in strategy.outputs):
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


def numel(tensor: Tensor) -> int:
    return prod((hint(n) for n in tensor.shape), start=1)


def nbytes(tensor: Tensor) -> int:
    return numel(tensor) * tensor.dtype.itemsize
