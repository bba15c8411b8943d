"""Finding layers in the ATen graph: a matmul or a look-up with a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..placement import Replicate, Shard
from ..rules import Strategy, rule_for
from ..solver import Solution, Step, Value
from .solve import Solved

aten = torch.ops.aten
_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.permute.default, aten.transpose.int, aten.mT.default}


@dataclass(eq=False)
class Layer:
    """A layer of the model in the graph.

    Attributes:
        step: The operator that computes it.
        kind: "linear", "embedding" or "cross_entropy".
        strategy: The placements that the solver has chosen for the operator.
        data: The input that is no parameter.
        weight: The node of the weight, a parameter.
        bias: The node of the bias, a parameter.
        transposed: Whether the weight is stored as [in, out].
    """

    step: Step
    kind: str
    strategy: Strategy
    data: Value
    weight: Node | None = None
    bias: Node | None = None
    transposed: bool = False

    @property
    def axis(self) -> str | None:
        """ "column", "row", "vocab", or None if it is replicated."""
        return self.strategy.kind or None


def find_layers(solved: Solved) -> list[Layer]:
    """Every Linear, Embedding and CrossEntropy of the program, in order."""
    found = []
    for step in solved.program.steps:
        layer = _layer(step, solved)
        if layer is not None:
            found.append(layer)
    return found


def _layer(step: Step, solved: Solved) -> Layer | None:
    """The layer that an operator computes; None if it is no layer."""
    if step.call is None:
        return None
    target, node = step.call.target, step.node
    strategy = solved.solution.strategies[step]
    if target is aten.cross_entropy_loss.default:
        return Layer(step, "cross_entropy", strategy, step.inputs[0])
    if target is aten.embedding.default:
        weight, _ = _parameter(node.args[0], solved)
        return Layer(step, "embedding", strategy, step.inputs[1], weight) if weight is not None else None
    bias = None
    if target is aten.linear.default:
        x, operand, transposed = 0, node.args[1], False
        bias = node.args[2] if len(node.args) > 2 else None
    elif target is aten.addmm.default:
        x, operand, transposed, bias = 1, node.args[2], True, node.args[0]
    elif target in (aten.matmul.default, aten.mm.default):
        x, operand, transposed = 0, node.args[1], True
    else:
        return None
    weight, flipped = _parameter(operand, solved)
    if weight is None or len(solved.parameters[weight].shape) != 2:
        return None
    bias = bias if isinstance(bias, Node) and bias in solved.parameters else None
    return Layer(step, "linear", strategy, step.inputs[x], weight, bias, transposed != flipped)


def _parameter(node: object, solved: Solved) -> tuple[Node | None, bool]:
    """The parameter that an operand is, or is a transpose of, and whether it is transposed."""
    flipped = False
    while isinstance(node, Node) and node.target in _TRANSPOSES and node not in solved.parameters:
        node, flipped = node.args[0], not flipped
    return (node, flipped) if isinstance(node, Node) and node in solved.parameters else (None, False)


def uses(solved: Solved) -> dict[Value, list[tuple[Step | None, int]]]:
    """For every value the steps that use it, with the position of the argument; None is the return of the program."""
    result: dict[Value, list[tuple[Step | None, int]]] = {}
    for step in solved.program.steps:
        for i, value in enumerate(step.inputs):
            result.setdefault(value, []).append((step if step.call is not None else None, i))
    return result


def _is_elementwise(step: Step) -> bool:
    """Whether a step has the rule of elementwise operators."""
    return step.call is not None and rule_for(step.call.target) is rule_for(aten.relu.default)


def is_gathered(value: Value, solution: Solution, users: dict[Value, list[tuple[Step | None, int]]]) -> bool:
    """Whether a consumer needs all of a sharded value, looking through elementwise operators of one input (a cast)."""
    for step, i in users.get(value, []):
        if step is None:
            if isinstance(solution.results[i], Replicate):
                return True
            continue
        strategy = solution.strategies[step]
        need = strategy.inputs[i]
        if isinstance(need, Replicate) or (isinstance(need, Shard) and not need.layouts):
            return True
        if len(step.inputs) == 1 and need == strategy.outputs[0] and _is_elementwise(step):
            if is_gathered(step.outputs[0], solution, users):
                return True
    return False
