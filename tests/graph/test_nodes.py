"""Questions about nodes, and removing what a rewrite left unused."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from paraxis.graph.nodes import argument, captured_module_of, is_impure, module_of, shape_of, tidied

aten = torch.ops.aten


def test_arguments_by_position_and_by_name() -> None:
    graph = Graph()
    node = graph.call_function(aten.sum.dim_IntList, (graph.placeholder("x"), [0]), {"keepdim": True})
    assert argument(node, 1, "dim", None) == [0] and argument(node, 2, "keepdim", False) is True
    assert argument(node, 3, "dtype", "default") == "default"


def test_shape_is_that_of_the_fake_tensor() -> None:
    node = Graph().placeholder("x")
    assert shape_of(node) is None
    node.meta["val"] = torch.empty(2, 3, device="meta")
    assert shape_of(node) == (2, 3)


def test_module_is_named_as_in_the_model() -> None:
    origin, node = Graph().placeholder("a"), Graph().placeholder("b")
    assert module_of(origin) == "" and captured_module_of(node) == captured_module_of(None) == ""
    origin.meta["nn_module_stack"] = {"1": ("L['self']", None), "2": ("L['self'].layers.0.mlp", None)}
    node.meta["origin"] = origin
    assert module_of(origin) == captured_module_of(node) == "layers.0.mlp"


def test_tidied_removes_what_nobody_uses_but_writes() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(aten.neg.default, (x,))
    write = graph.call_function(torch.add, (x, y))
    write.meta["writes"] = True
    graph.output(x)
    module = GraphModule({}, graph)
    assert is_impure(write) and tidied(module, 0) == 0 and len(module.graph.nodes) == 5, "nothing was replaced"
    assert tidied(module, 2) == 2
    assert [node.op for node in module.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
