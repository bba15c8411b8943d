"""The graph as the solver sees it: steps, values, parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from solver.programs import traced
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.solver import Program, Value
from paraxis.solver.program import hint, is_tensor, tensor_of, value_of

aten = torch.ops.aten


def program_of_two() -> Program:
    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = F.linear(x, w.t().neg()).topk(2)
        return values * 2, indices

    return traced(run, [torch.empty(4, 8)], [torch.empty(8, 6)], 2)


def test_steps_take_and_make_values() -> None:
    program = program_of_two()
    targets = [step.call.target for step in program.steps if step.call is not None]
    assert targets == [aten.t.default, aten.neg.default, aten.linear.default, aten.topk.default, aten.mul.Tensor]
    topk, scale, result = program.steps[-3:]
    assert topk.call is not None and [t.shape for t in topk.call.outputs] == [(4, 2), (4, 2)]
    assert scale.inputs == (Value(topk.node, 0),) and scale.outputs == (Value(scale.node),)
    assert result.call is None and result.inputs == (Value(scale.node), Value(topk.node, 1))
    assert not topk.impure and topk.home is None


def test_weights_and_what_depends_on_them() -> None:
    program = program_of_two()
    (parameter,) = program.parameters
    transposed, negated, linear, *_ = program.steps
    assert program.weights == {parameter, *transposed.outputs, *negated.outputs}
    assert program.learned > program.weights and linear.outputs[0] in program.learned
    assert program.leaves[0] not in program.learned


def test_nodes_and_tensors() -> None:
    graph = make_fx(lambda x: x.sort()[1], tracing_mode="fake")(torch.empty(4, 6))
    x, sort, *items = (n for n in graph.graph.nodes if n.op != "output")
    second = next(n for n in items if n.args[1] == 1)
    assert is_tensor(x) and not is_tensor(4) and tuple(tensor_of(x).shape) == (4, 6)
    assert value_of(second) == Value(sort, 1) and value_of(x) == Value(x)


def test_hints_of_sizes() -> None:
    assert hint(4) == 4
    graph = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.empty(4, 6))
    symbolic = next(iter(graph.graph.nodes)).meta["val"].shape[0]
    assert not isinstance(symbolic, int) and hint(symbolic) == 4
