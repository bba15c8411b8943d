"""The ways to run one step: the strategies that its rule has for the current placements, and what each costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..placement import PARTIAL, REPLICATE, SHARED, Partial, Placement, Shard
from ..placement.blocks import is_granular
from ..rules import (
    UNPLACED,
    Call,
    InputPlacement,
    Strategy,
    Tensor,
    Unplaced,
    accepts_unplaced,
    replicated,
    rule_for,
    same_size,
)
from ..rules.base import is_one
from .cost import CostModel, nbytes
from .moves import sequence_length, sequence_shards, settled, share
from .program import Program, Step, Value
from .structure import Candidates

Permit = Callable[[Step, Strategy, tuple[InputPlacement, ...], tuple[Placement, ...]], bool]
"""``permit(step, strategy, before, after)``: whether a step may run like this.

``before`` and ``after`` are the placements of its inputs before and after the step.
"""


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Attributes:
        strategy: What the step does.
        before: The placements of its inputs before it.
        after: The placements of its inputs after it.
        cost: Seconds, including the collectives that bring the inputs where the strategy needs them.
    """

    strategy: Strategy
    before: tuple[InputPlacement, ...]
    after: tuple[Placement, ...]
    cost: float

    def placements(self, step: Step) -> dict[Value, Placement]:
        """The placements of the inputs and outputs of the step after it."""
        values, placements = (*step.inputs, *step.outputs), (*self.after, *self.strategy.outputs)
        return dict(zip(values, placements, strict=True))


class Choices:
    """Finds the choices for the steps of a program.

    With ``sequence``, partial activations may be scattered on the sequence, and are charged for where they are not.
    ``permit`` rules out choices.
    """

    def __init__(
        self, program: Program, candidates: Candidates, model: CostModel, sequence: bool, permit: Permit | None
    ) -> None:
        self.program, self.candidates, self.model = program, candidates, model
        self.sequence, self.permit = sequence, permit
        self.length = sequence_length(program) if sequence else None
        self.uses = Counter(v for step in program.steps if step.call for v in step.inputs)
        self._shardable: dict[Value, bool] = {}

    def initial(self, value: Value) -> InputPlacement:
        """The placement of an input of the program, or of a parameter, before its first use."""
        if value in self.program.placements:
            return self.program.placements[value]
        return UNPLACED if value in self.program.parameters else REPLICATE

    def of(self, step: Step, inputs: tuple[InputPlacement, ...]) -> list[Choice]:
        """The choices for a step with these input placements; of those with the same effect, the cheapest."""
        assert step.call is not None
        best: dict[Any, Choice] = {}
        for strategy in self._strategies(step, step.call, inputs):
            choice = self._priced(step, step.call, strategy, inputs)
            if self.permit is not None and not self.permit(step, strategy, inputs, choice.after):
                continue
            effect = (strategy.outputs, choice.after)
            if effect not in best or choice.cost < best[effect].cost:
                best[effect] = choice
        return list(best.values())

    # -- strategies --------------------------------------------------------------------------------------------

    def _strategies(self, step: Step, call: Call, inputs: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        yield replicated(call)
        if step.impure:
            yield from self._copies_in_place(step, call, inputs)
            return
        yield from (s for s in self._by_rule(step, call, inputs) if step.home is None or self._stays(step.home, s))

    def _stays(self, home: Value, strategy: Strategy) -> bool:
        """Whether a strategy that writes into an input leaves the placement of that input unchanged."""
        placement = self.program.placements.get(home, REPLICATE)
        return strategy.inputs[0] == placement and strategy.outputs[0] == placement

    def _by_rule(self, step: Step, call: Call, inputs: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        rule = rule_for(call.target)
        if rule is None:
            return
        options: list[Sequence[InputPlacement]] = []
        for i, placement in enumerate(inputs):
            if placement is UNPLACED and not accepts_unplaced(call.target):
                options.append([REPLICATE, *self._candidate_shards(call, i)])
            elif self.sequence and isinstance(placement, Partial):
                options.append([placement, *sequence_shards(call.inputs[i].shape, self.length, self.program.world)])
            else:
                options.append([placement])
        for combination in product(*options):
            for strategy in rule(call, combination):
                if self._fits(call, strategy) and self._keeps_units(step, call, strategy):
                    yield share(call, strategy)

    def _copies_in_place(self, step: Step, call: Call, inputs: tuple[InputPlacement, ...]) -> Iterable[Strategy]:
        """A sharded input (a KV cache) overwritten by a full tensor: every rank writes its shard."""
        placement = inputs[0] if inputs else None
        if call.target is not torch.ops.aten.copy_.default or not isinstance(placement, Shard) or not placement.layouts:
            return
        target, source = call.inputs
        same_shape = target.ndim == source.ndim and all(map(same_size, target.shape, source.shape))
        if step.inputs[0].node.op == "placeholder" and same_shape:
            yield Strategy((placement, placement), (placement,))

    def _candidate_shards(self, call: Call, index: int) -> list[Placement]:
        dims = range(call.inputs[index].ndim)
        return [Shard.of(d, x) for d in dims for x in call.layouts.get((index, d), ())]

    def _fits(self, call: Call, strategy: Strategy) -> bool:
        pairs = [*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)]
        return all(x.fits(tensor.shape[d]) for tensor, p in pairs if isinstance(p, Shard) for d, x in p.layouts)

    def _keeps_units(self, step: Step, call: Call, strategy: Strategy) -> bool:
        """Whether no quantized parameter is cut inside of what cannot be separated, such as two codes of a byte."""
        for value, tensor, placement in zip(step.inputs, call.inputs, strategy.inputs, strict=True):
            encoded = self.program.encodings.get(value)
            if encoded is None or not isinstance(placement, Shard):
                continue
            for dim, layout in placement.layouts:
                unit = encoded.units.get(dim, (1, 1))[0]
                if unit > 1 and not is_granular(layout, tensor.shape[dim], unit):
                    return False
        return True

    # -- prices ------------------------------------------------------------------------------------------------

    def _priced(self, step: Step, call: Call, strategy: Strategy, before: tuple[InputPlacement, ...]) -> Choice:
        cost = self.model.run(call, strategy)
        after: dict[Value, Placement] = {}
        for value, placement, tensor, need in zip(step.inputs, before, call.inputs, strategy.inputs, strict=True):
            now = after.get(value, placement)  # the second use of an input sees the placement that the first has left
            if isinstance(now, Unplaced):
                stored = REPLICATE if need in (PARTIAL, SHARED) else need
                after[value] = stored
                if value not in self.program.placements:
                    cost += self.model.store(tensor, stored, self._can_shard(value, tensor.shape))
            else:
                for charge in self._charges(value, tensor, now, need):
                    cost += charge
                after[value] = settled(now, need)
        return Choice(strategy, before, tuple(after[v] for v in step.inputs), cost)

    def _charges(self, value: Value, tensor: Tensor, now: Placement, need: Placement) -> Iterator[float]:
        """What it costs to bring an input from its placement to the one that a strategy needs."""
        yield self.model.move(now, need, nbytes(tensor))
        if isinstance(now, Partial) and need in (REPLICATE, SHARED):
            yield self.unscattered(tensor)
        if now != need and value in self.program.weights and isinstance(now, Shard):
            yield self.model.gather_weight(tensor)
        if self.model.backward and value in self.program.learned:
            yield self.model.return_gradient(now, need, nbytes(tensor), self.uses[value])

    def unscattered(self, tensor: Tensor) -> float:
        """The price of an all-reduce where the activation should be scattered on the sequence."""
        if not self.sequence or tensor.ndim < 2 or is_one(tensor.shape[-1]):
            return 0.0
        return self.model.unscattered

    def _can_shard(self, value: Value, shape: tuple[Any, ...]) -> bool:
        if value not in self._shardable:
            self._shardable[value] = any(self.candidates.layouts(value, d, n) for d, n in enumerate(shape))
        return self._shardable[value]
