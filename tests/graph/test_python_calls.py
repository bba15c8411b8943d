"""Operators that are called as Python code calls them compute the same, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from paraxis.graph.python_calls import FUNCTIONS, METHODS, OF_TWO, taking_list, with_python_calls

aten = torch.ops.aten
X, Y, SQUARE = torch.rand(2, 3) + 0.5, torch.rand(2, 3) + 0.5, torch.rand(3, 3)
BATCH = torch.rand(2, 3, 3)

ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    **{target: (X, Y) for target in OF_TWO},
    **{target: (X,) for target in FUNCTIONS},
    aten.add.Scalar: (X, 2),
    aten.sub.Scalar: (X, 0.5),
    aten.mul.Scalar: (X, 3),
    aten.div.Scalar: (X, 3),
    aten.pow.Tensor_Scalar: (X, 3),
    aten.bmm.default: (BATCH, BATCH),
    aten.mm.default: (X, SQUARE),
    aten.matmul.default: (X, SQUARE),
    aten.addmm.default: (Y, X, SQUARE),
    aten.linear.default: (X, SQUARE, None),
    aten.embedding.default: (SQUARE, torch.tensor([0, 2])),
    aten.cat.default: ([X, Y], -1),
    aten.mean.dim: (X, [-1], True),
    aten.where.self: (X > Y, X, Y),
    aten.layer_norm.default: (X, [3], Y[0], None, 1e-5),
    aten.scaled_dot_product_attention.default: (BATCH[None], BATCH[None], BATCH[None], None, 0.0, True),
    aten.view.default: (X, [3, -1]),
    aten.reshape.default: (X.t(), [6]),
    aten.permute.default: (X, [1, 0]),
    aten.transpose.int: (X, 0, 1),
    aten.t.default: (X,),
    aten.unsqueeze.default: (X, 1),
    aten.squeeze.dim: (X[:1], 0),
    aten.expand.default: (X[None], [4, 2, 3]),
    aten.clone.default: (X,),
    aten.index_copy_.default: (X.clone(), 0, torch.tensor([1]), Y[:1]),
}


def program_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph that calls an operator, and the tensors to call it with."""
    graph, tensors = Graph(), []

    def leaf(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return [leaf(x) for x in value]
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(map(leaf, args)), kwargs)
    graph.output((node,))
    return GraphModule({}, graph), tensors


@pytest.mark.parametrize("target", [*OF_TWO, *FUNCTIONS, *METHODS], ids=str)
def test_the_same_results_and_gradients(target: Any) -> None:
    results = []
    module, tensors = program_of(target, ARGUMENTS[target], {})
    changed = with_python_calls(module)
    assert all(node.target is not target for node in changed.graph.nodes)
    assert any(node.target is target for node in module.graph.nodes), "the program itself stays as it is"
    for each in (module, changed):
        inputs = [x.clone().requires_grad_(x.is_floating_point() and "_" not in str(target)[-10:-7]) for x in tensors]
        inputs = [x.detach() for x in inputs] if target is aten.index_copy_.default else inputs
        (result,) = each(*inputs)
        if result.requires_grad:
            result.sum().backward()
        results.append((result, [x.grad for x in inputs]))
    (first, gradients), (second, others) = results
    assert first.dtype == second.dtype and torch.equal(first, second)
    for a, b in zip(gradients, others, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("target", FUNCTIONS, ids=str)
def test_functions_that_somebody_patches_are_called_as_they_were(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the program is made or after: what a model calls was captured with the patch in it."""
    module, tensors = program_of(target, ARGUMENTS[target], {})
    (expected,) = module(*tensors)
    before = with_python_calls(module)
    for owner in (torch, F):
        for name in {FUNCTIONS[target].__name__} & vars(owner).keys():
            monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    for program in (before, with_python_calls(module)):
        assert torch.equal(program(*tensors)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_do_not_promote(dtype: torch.dtype) -> None:
    module, _ = program_of(aten.mul.Tensor, (X.to(dtype), 2.5), {})
    assert with_python_calls(module)(X.to(dtype))[0].dtype == dtype


def test_what_stays_as_it_is() -> None:
    """Arguments that an expression does not have."""
    module, _ = program_of(aten.add.Tensor, (X, Y), {"alpha": 2})
    changed = with_python_calls(module)
    assert [n.target for n in changed.graph.nodes if n.op == "call_function"] == [aten.add.Tensor]
    assert torch.equal(changed(X, Y)[0], X + 2 * Y)


def test_conversions_are_methods_and_still_copy() -> None:
    """A conversion is a method; to the same dtype it must still copy."""
    module, _ = program_of(aten._to_copy.default, (X,), {"dtype": torch.float64})
    changed = with_python_calls(module)
    assert "call_method" in {n.op for n in changed.graph.nodes} and changed(X)[0].dtype == torch.float64
    module, _ = program_of(aten._to_copy.default, (X,), {"dtype": torch.float32})
    assert with_python_calls(module)(X)[0] is not X


@pytest.mark.parametrize("function", [with_python_calls, taking_list])
def test_code_is_generated_once(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    module, _ = program_of(aten.add.Tensor, (X, Y), {})
    made: list[Any] = []
    recompile = GraphModule.recompile
    monkeypatch.setattr(GraphModule, "recompile", lambda self: made.append(self) or recompile(self))
    function(module)
    assert len(made) == 1
