"""From models to ATen graphs: what stays whole, what becomes pure, and what is remembered of the source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from paraxis.capture import CaptureError, capture, mark_output, mark_output_op, simplify, to_aten
from paraxis.graph.mutation import IN_PLACE, written_input
from paraxis.rules import rule_for

aten = torch.ops.aten


class Model(nn.Module):
    """A module around a function, with a weight for it."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape or (4, 4)))

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def captured(model: nn.Module, *args: Any) -> GraphModule:
    graphs: list[GraphModule] = []
    capture(model, args, {}, lambda graph, inputs: graphs.append(graph))
    torch._dynamo.reset()
    return graphs[0]


def aten_of(function: Callable[..., Any], *args: Any, pure: bool = True) -> GraphModule:
    graph = to_aten(captured(Model(function), *args))
    return simplify(graph) if pure else graph


def targets(graph: GraphModule) -> list[Any]:
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


def names(graph: GraphModule) -> list[str]:
    found = [t._schema.name.split("::")[1] for t in targets(graph) if isinstance(t, torch._ops.OpOverload)]
    return [name for name in found if name != "whole"]


def node_of(graph: GraphModule, target: Any) -> Node:
    return next(n for n in graph.graph.nodes if n.target is target)


# -- decomposition -------------------------------------------------------------------------------------------------


def test_layers_stay_whole() -> None:
    def function(w: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = F.linear(F.layer_norm(x, (4,)), w).view(1, 2, 3, 4)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        h = F.silu(F.gelu(F.rms_norm(h, (4,)))).softmax(-1)
        return F.cross_entropy(h.view(6, 4), labels)

    found = names(aten_of(function, torch.ones(6, 4), torch.zeros(6, dtype=torch.long)))
    for name in ("linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "silu", "gelu", "softmax"):
        assert found.count(name) == 1, (name, found)
    assert found.count("cross_entropy_loss") == 1


def test_embedding_and_products_stay_whole() -> None:
    def function(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, w) @ w

    assert names(aten_of(function, torch.zeros(2, 3, dtype=torch.long))) == ["embedding", "matmul"]


def test_other_functions_are_decomposed() -> None:
    found = targets(aten_of(lambda w, x: F.hardswish(x) + torch.addcdiv(x, w, w + 1), torch.ones(4, 4)))
    assert all(isinstance(t, torch._ops.OpOverload) for t in found)
    assert aten.hardswish.default not in found or rule_for(aten.hardswish.default) is not None
    assert all(rule_for(t) is not None for t in found)


def test_placeholders_keep_their_order() -> None:
    graph = captured(Model(lambda w, x, y: x @ w + y), torch.ones(4, 4), torch.ones(4))
    before = [n for n in graph.graph.nodes if n.op == "placeholder"]
    after = [n for n in to_aten(graph).graph.nodes if n.op == "placeholder"]
    assert [n.meta["origin"] for n in after] == before


def test_every_node_knows_where_it_came_from() -> None:
    graph = captured(Model(lambda w, x: F.linear(torch.relu(x), w).view(2, 2, 4).softmax(-1)), torch.ones(4, 4))
    result = to_aten(graph)
    own = set(graph.graph.nodes)
    for node in result.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            assert node.meta["origin"] in own, node
    origin = node_of(result, aten.linear.default).meta["origin"]
    assert "linear" in str(origin.target)
    assert "F.linear" in origin.meta["stack_trace"] or "linear" in str(origin.meta.get("stack_trace"))


def test_the_module_of_a_node_is_known() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    result = to_aten(captured(Outer(), torch.ones(2, 4)))
    stack = node_of(result, aten.linear.default).meta["origin"].meta["nn_module_stack"]
    assert "inner" in str(list(stack.values())[-1])


def test_graph_computes_the_same() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y += 1
        y = y[:, [1, 2]]
        return F.dropout(y, 0.5, False).cumsum(0)

    x = torch.randn(4, 4)
    graph = captured(Model(function), x)
    inputs = [x if n.meta["example_value"].shape == x.shape and "weight" not in n.name else torch.ones(4, 4)
              for n in graph.graph.nodes if n.op == "placeholder"]  # fmt: skip
    (result,) = simplify(to_aten(graph))(*inputs)
    assert torch.allclose(result, function(torch.ones(4, 4), x))


# -- purity --------------------------------------------------------------------------------------------------------


def test_a_write_to_a_private_tensor_becomes_a_value() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.add_(1)
        y.mul_(w)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert names(graph) == ["matmul", "add", "mul", "relu"]
    assert not any(n.meta.get("impure") for n in graph.graph.nodes)
    assert node_of(graph, aten.relu.default).args[0] is node_of(graph, aten.mul.Tensor)


def test_a_view_of_the_written_value_may_be_written_later() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.add_(1)
        y[:, :2].mul_(3)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert {"add", "mul_"} <= set(names(graph))
    assert node_of(graph, aten.add.Tensor).meta.get("impure") and node_of(graph, aten.slice.Tensor).meta.get("impure")
    assert not node_of(graph, aten.matmul.default).meta.get("impure")


def test_uses_before_the_write_see_the_old_value() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        before = y.relu()
        y.add_(1)
        return before + y.sigmoid()

    graph = aten_of(function, torch.ones(4, 4))
    product, added = node_of(graph, aten.matmul.default), node_of(graph, aten.add.Tensor)
    assert node_of(graph, aten.relu.default).args[0] is product
    assert node_of(graph, aten.sigmoid.default).args[0] is added


def test_a_write_through_a_view_marks_the_whole_family() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        part = y[:, :2]
        part.add_(1)
        return y.relu()

    graph = aten_of(function, torch.ones(4, 4))
    impure = {str(n.target) for n in graph.graph.nodes if n.meta.get("impure")}
    assert {"aten.matmul.default", "aten.slice.Tensor", "aten.add_.Tensor"} <= impure
    assert not node_of(graph, aten.relu.default).meta.get("impure")


def test_a_write_while_a_view_is_in_use_stays_a_write() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        seen = y.view(2, 8)
        y.add_(1)
        return seen.relu()

    graph = aten_of(function, torch.ones(4, 4))
    assert aten.add_.Tensor in targets(graph)
    for target in (aten.matmul.default, aten.view.default, aten.add_.Tensor):
        assert node_of(graph, target).meta.get("impure"), target


def test_a_write_to_an_argument_stays_a_write() -> None:
    """It stands in the graph as the operator that returns the new value, with the one that writes beside it."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y = x @ w
        x.mul_(2)
        return y + x

    graph = aten_of(function, torch.ones(4, 4))
    for pure, writing in ((aten.add.Tensor, aten.add_.Tensor), (aten.mul.Tensor, aten.mul_.Tensor)):
        node = node_of(graph, pure)
        assert node.meta.get(IN_PLACE) is writing and not node.meta.get("impure")
        assert written_input(node) is not None


def test_a_write_that_an_older_view_sees_is_kept_as_it_is() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        view = x[:, :2]
        x.add_(1)
        return view @ w[:2]

    graph = aten_of(function, torch.ones(4, 4))
    node = node_of(graph, aten.add_.Tensor)
    assert node.meta.get("impure") and IN_PLACE not in node.meta


# -- simplification ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "expected"),
    [([1, 2], (1, 1, 3)), ([-1], (1, 3, 4)), ([0, 1, 2, 3], (1, 0, 4)), ([2, 1], None), ([0, 2], None)],
)
def test_consecutive_constant_indices_become_a_slice(index: list[int], expected: tuple[int, int, int] | None) -> None:
    graph = aten_of(lambda w, x: x[:, index] * 2, torch.ones(4, 4))
    if expected is None:
        assert aten.index.Tensor in targets(graph)
    else:
        assert aten.index.Tensor not in targets(graph)
        assert node_of(graph, aten.slice.Tensor).args[1:] == expected


def test_an_index_that_is_an_argument_stays() -> None:
    graph = aten_of(lambda w, x, i: x[:, i], torch.ones(4, 4), torch.tensor([1, 2]))
    assert aten.index.Tensor in targets(graph)


@pytest.mark.parametrize(("p", "train", "stays"), [(0.5, False, False), (0.0, True, False), (0.5, True, True)])
def test_idle_dropout_is_dropped(p: float, train: bool, stays: bool) -> None:
    graph = aten_of(lambda w, x: F.dropout(x @ w, p, train) + 1, torch.ones(4, 4))
    assert (aten.dropout.default in targets(graph)) == stays


def test_dead_code_goes_and_random_numbers_stay() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        _ = x.sin()
        _ = torch.rand_like(x)
        return x @ w

    found = names(aten_of(function, torch.ones(4, 4)))
    assert "sin" not in found and "rand_like" in found


# -- functions with their own backward -----------------------------------------------------------------------------


class _Double(torch.autograd.Function):
    """Its backward is not the derivative of its forward, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 5


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.amax(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize(("function", "pointwise"), [(_Double, True), (_Rows, False)])
def test_a_function_with_its_own_backward_is_one_node(function: Any, pointwise: bool) -> None:
    graph = aten_of(lambda w, x: function.apply(x @ w).relu(), torch.ones(4, 4))
    (custom,) = [t for t in targets(graph) if type(t).__name__ == "CustomFunction"]
    assert custom.pointwise is pointwise
    assert (rule_for(custom) is not None) == pointwise
    assert names(graph) == ["matmul", "relu"]


@pytest.mark.parametrize("depth", [1, 2])
def test_it_is_one_node_where_it_is_recomputed(depth: int) -> None:
    """Inside activation checkpointing too, where its inside would have no gradient."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return _Double.apply(x.sin()).relu()

    def again(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x, use_reentrant=False) if depth == 2 else body(x)

    graph = aten_of(lambda w, x: checkpoint(again, x @ w, use_reentrant=False), torch.ones(4, 4, requires_grad=True))
    assert [type(t).__name__ for t in targets(graph)].count("CustomFunction") == 1
    assert names(graph) == ["matmul", "sin", "relu"]


def test_its_backward_is_kept() -> None:
    graph = aten_of(lambda w, x: _Double.apply(x @ w), torch.ones(4, 4))
    (custom,) = [t for t in targets(graph) if type(t).__name__ == "CustomFunction"]
    x = torch.randn(4, 4, requires_grad=True)
    result = custom(x)
    result = result[0] if isinstance(result, (tuple, list)) else result
    assert torch.equal(result, x * 2)
    result.sum().backward()
    assert torch.allclose(x.grad, x.detach().cos() * 5)  # type: ignore[arg-type]


# -- what the caller reads -----------------------------------------------------------------------------------------


def test_results_are_marked() -> None:
    class Cache:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    inner = torch.ones(2)
    marked = mark_output({"a": torch.ones(2), "b": (torch.ones(2), [torch.ones(2)], None, 3), "c": Cache(inner)})
    assert torch.equal(marked["a"], torch.ones(2)) and marked["b"][2:] == (None, 3)
    assert marked["c"].tensor is inner, "what is no plain container is not entered"
    graph = aten_of(lambda w, x: {"y": x @ w, "z": (x + 1, x)}, torch.ones(4, 4))
    assert targets(graph).count(mark_output_op) == 3


def test_marking_changes_no_value_and_no_input() -> None:
    x = torch.randn(3)
    assert torch.equal(mark_output(x), x) and mark_output(x) is not x
    assert mark_output("text") == "text" and mark_output(None) is None


# -- errors --------------------------------------------------------------------------------------------------------


class _DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:  # the line to blame
            return x
        return -x


def test_capture_error_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(_DataDependent(), torch.ones(2))
    message = str(caught.value)
    assert "_DataDependent" in message and "test_capture.py:" in message
    assert "if x.sum().item() > 0" in message
    assert "data-dependent" in message


def test_errors_of_the_consumer_come_through() -> None:
    def consume(graph: GraphModule, inputs: list[Any]) -> None:
        raise ValueError("sizes that do not divide")

    with pytest.raises(ValueError, match="sizes that do not divide"):
        capture(Model(lambda w, x: x @ w), (torch.ones(4, 4),), {}, consume)
    torch._dynamo.reset()


def test_capture_does_not_run_the_model() -> None:
    model = Model(lambda w, x: x @ w)
    graph = captured(model, torch.full((4, 4), float("nan")))
    assert isinstance(graph, GraphModule)


class WritesParts(nn.Module):
    """Builds a tensor part by part, in place, as attention code does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(*x.shape[:-1], 10)
        out[..., :4].copy_(self.first(x))
        out[..., 4:] = self.second(x)
        out[0] = 1.0
        return out * 2


class WritesWhereOthersLook(nn.Module):
    """The part that is written to is read through a view taken before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3, 4)
        row = out[1]
        out[:, :2].copy_(x)
        return row + out.sum(0)


@pytest.mark.parametrize(
    ("make", "shape", "pure"), [(WritesParts, (2, 3, 8), True), (WritesWhereOthersLook, (3, 2), False)]
)
def test_writes_into_parts(make: Any, shape: tuple[int, ...], pure: bool) -> None:
    """A write into a part of a tensor is a new value of it, unless another view shows the difference."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    graphs: list[Any] = []
    capture(module, (x,), {}, lambda graph, inputs: graphs.append((graph, inputs)))
    graph, inputs = graphs[0]
    aten = simplify(to_aten(graph))
    impure = [n for n in aten.graph.nodes if n.meta.get("impure")]
    assert bool(impure) != pure, impure
    (result,) = aten(*inputs)
    assert torch.equal(result, module(x))


class Mapped(nn.Module):
    """``vmap`` over a function of the module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (self.weight @ row).tanh().cumsum(0))(x)


def test_vmap_is_taken_apart() -> None:
    torch.manual_seed(0)
    module, x = Mapped(), torch.randn(3, 4)
    graphs: list[Any] = []
    capture(module, (x,), {}, lambda graph, inputs: graphs.append((graph, inputs)))
    graph, inputs = graphs[0]
    aten = simplify(to_aten(graph))
    assert not any("batch_dim" in str(n.target) or "vmap" in str(n.target) for n in aten.graph.nodes)
    (result,) = aten(*inputs)
    assert torch.allclose(result, module(x), atol=1e-6)
