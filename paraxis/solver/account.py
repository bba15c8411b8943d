"""What a solution takes: time, collectives and memory, without the prices that only guide the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from ..compat.torch import pytree
from ..placement import PARTIAL, REPLICATE, Partial, Placement, Replicate
from ..rules import Unplaced
from .cost import CostModel, collective_between, nbytes
from .moves import settled
from .program import Program, Step, Value, hint, tensor_of
from .solution import Solution
from .work import local_fraction, matmul_flops


@dataclass
class Account:
    """Seconds of one pass, and its collectives.

    Attributes:
        compute: Seconds of compute and memory traffic, by step.
        comm: Seconds of the collectives on the inputs of a step, by step.
        work: FLOPs of a matmul, convolution or attention, and the fraction of them that one rank does, by step.
        sent: Every collective of the forward pass: its kind, the tensor, and the bytes of the full tensor.
    """

    compute: dict[Step, float] = field(default_factory=dict)
    comm: dict[Step, float] = field(default_factory=dict)
    work: dict[Step, tuple[int, float]] = field(default_factory=dict)
    sent: list[tuple[str, Value, int]] = field(default_factory=list)

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(self.comm.values())

    @property
    def seconds(self) -> float:
        """Seconds of everything."""
        return sum(self.compute.values()) + self.communication

    @property
    def collectives(self) -> Counter[str]:
        """How many collectives of each kind there are."""
        return Counter(kind for kind, _, _ in self.sent)


def account(program: Program, solution: Solution, model: CostModel) -> Account:
    """Add up what the steps of a solution take."""
    plain, total = model.without_prices(), Account()
    uses = Counter(v for step in program.steps if step.call for v in step.inputs)
    final: dict[Value, Placement] = {}

    def send(step: Step, value: Value, size: int, now: Placement, need: Placement) -> None:
        kind = collective_between(now, need)
        if kind is not None:
            total.sent.append((kind, value, size))
        seconds = plain.move(now, need, size)
        if value in program.learned:
            seconds += plain.return_gradient(now, need, size, uses[value])
        total.comm[step] = total.comm.get(step, 0.0) + seconds

    for step in program.steps:
        if step.call is None or step not in solution.strategies:
            continue
        strategy = solution.strategies[step]
        total.compute[step] = plain.run(step.call, strategy)
        flops = matmul_flops(step.call)
        if flops:
            total.work[step] = flops, local_fraction(strategy, plain)
        before = dict(zip(step.inputs, solution.input_placements[step], strict=True))
        for value, tensor, need in zip(step.inputs, step.call.inputs, strategy.inputs, strict=True):
            now = before[value]
            if not isinstance(now, Unplaced):
                send(step, value, nbytes(tensor), now, need)
                before[value] = final[value] = settled(now, need)
        final.update(zip(step.outputs, strategy.outputs, strict=True))
    for step in program.steps:
        for value in dict.fromkeys(step.inputs) if step.call is None else ():
            if isinstance(final.get(value, REPLICATE), Partial):
                send(step, value, _size(value), PARTIAL, REPLICATE)
    return total


def _size(value: Value, itemsize: float | None = None) -> int:
    """The bytes of a full tensor."""
    tensors = [t for t in pytree.tree_leaves(tensor_of(value.node)) if isinstance(t, torch.Tensor)]
    tensor = tensors[value.index]
    return round(prod((hint(n) for n in tensor.shape), start=1) * (itemsize or tensor.dtype.itemsize))


def parameter_bytes(program: Program, solution: Solution, model: CostModel, repeats: Mapping[str, int]) -> int:
    """The bytes of the parameters on one rank.

    ``repeats``: how many parameters of the model one parameter of the program stands for.
    """
    total = 0.0
    for value, name in program.parameters.items():
        placement = solution.parameters.get(value, REPLICATE)
        fraction = 1.0 if isinstance(placement, Replicate) else model.fraction(placement)
        encoded = program.encodings.get(value)
        size = _size(value) if encoded is None else _size(value, encoded.itemsize)
        total += fraction * size * repeats.get(name, 1)
    return int(total)
