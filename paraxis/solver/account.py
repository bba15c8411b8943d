"""What a solution takes: time, collectives and memory, without the prices that made it the one to choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch.utils import _pytree as pytree

from ..placement import PARTIAL, REPLICATE, Partial, Placement, Replicate
from ..rules.base import Unplaced
from .cost import CostModel, collective_between, nbytes
from .moves import settled
from .program import Program, Step, Value, hint, tensor_of
from .solution import Solution


@dataclass
class Account:
    """Seconds of one pass, and what is sent in it.

    Attributes:
        work: Seconds of computing and of memory traffic, by step.
        talk: Seconds of collectives, by step: those that it needs its inputs for.
        sent: Every collective of the forward pass: its kind, what it brings together, and the bytes of that.
    """

    work: dict[Step, float] = field(default_factory=dict)
    talk: dict[Step, float] = field(default_factory=dict)
    sent: list[tuple[str, Value, int]] = field(default_factory=list)

    @property
    def communication(self) -> float:
        return sum(self.talk.values())

    @property
    def seconds(self) -> float:
        return sum(self.work.values()) + self.communication

    @property
    def collectives(self) -> Counter[str]:
        return Counter(kind for kind, _, _ in self.sent)


def account(program: Program, solution: Solution, model: CostModel) -> Account:
    """Go through a solution and add up."""
    plain, total = model.without_prices(), Account()
    uses = Counter(v for step in program.steps if step.call for v in step.inputs)
    final: dict[Value, Placement] = {}

    def send(step: Step, value: Value, size: int, given: Placement, need: Placement) -> None:
        kind = collective_between(given, need)
        if kind is not None:
            total.sent.append((kind, value, size))
        seconds = plain.move(given, need, size)
        if value in program.learned:
            seconds += plain.return_gradient(given, need, size, uses[value])
        total.talk[step] = total.talk.get(step, 0.0) + seconds

    for step in program.steps:
        if step.call is None or step not in solution.strategies:
            continue
        strategy = solution.strategies[step]
        total.work[step] = plain.run(step.call, strategy)
        before = dict(zip(step.inputs, solution.given[step], strict=True))
        for value, tensor, need in zip(step.inputs, step.call.inputs, strategy.inputs, strict=True):
            given = before[value]
            if not isinstance(given, Unplaced):
                send(step, value, nbytes(tensor), given, need)
                before[value] = final[value] = settled(given, need)
        final.update(zip(step.outputs, strategy.outputs, strict=True))
    for step in program.steps:
        for value in dict.fromkeys(step.inputs) if step.call is None else ():
            if isinstance(final.get(value, REPLICATE), Partial):
                send(step, value, _size(value), PARTIAL, REPLICATE)
    return total


def _size(value: Value) -> int:
    tensors = [t for t in pytree.tree_leaves(tensor_of(value.node)) if isinstance(t, torch.Tensor)]
    tensor = tensors[value.index]
    return prod((hint(n) for n in tensor.shape), start=1) * tensor.dtype.itemsize


def parameter_bytes(program: Program, solution: Solution, model: CostModel, repeats: Mapping[str, int]) -> int:
    """Bytes of parameters of one rank. ``repeats``: how many parameters of the model one of the program stands for."""
    total = 0.0
    for value, name in program.parameters.items():
        placement = solution.parameters.get(value, REPLICATE)
        part = 1.0 if isinstance(placement, Replicate) else model.fraction(placement)
        total += part * _size(value) * repeats.get(name, 1)
    return int(total)
