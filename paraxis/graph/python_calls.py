"""The last step for a program that Python runs: operators are called as Python code calls them.

A captured program calls ``torch.ops.aten.mul.Tensor(a, b)``. That parses its arguments by the operator's schema, which
takes longer than ``a * b`` takes in all; and a decode step has thousands of them. Both are the same operator: same
results, same gradients.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from ..compat.torch import linear, scaled_dot_product_attention

aten = torch.ops.aten

LIST = "arguments_list"
"""The argument of a forward that takes a list."""

OF_TWO: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.div.Scalar: operator.truediv,
    aten.pow.Tensor_Scalar: operator.pow,
}
"""Operators that are an expression, if they have two arguments."""

FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.neg.default: operator.neg,
    aten.bmm.default: torch.bmm,
    aten.mm.default: torch.mm,
    aten.matmul.default: torch.matmul,
    aten.addmm.default: torch.addmm,
    aten.linear.default: linear,
    aten.embedding.default: torch.embedding,
    aten.cat.default: torch.cat,
    aten.mean.dim: torch.mean,
    aten.rsqrt.default: torch.rsqrt,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.exp.default: torch.exp,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.where.self: torch.where,
    aten.layer_norm.default: torch.layer_norm,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
}
"""Operators that are a function with the same arguments."""


class _Functions:
    """torch's functions, under their names."""


_BOUND = _Functions()
vars(_BOUND).update({f.__name__: f for f in FUNCTIONS.values() if getattr(torch, f.__name__, None) is f})
_CALLS = re.compile(rf"(?<![\w.])torch\.({'|'.join(vars(_BOUND))})\(")

METHODS: Mapping[Any, str] = {
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten.permute.default: "permute",
    aten.transpose.int: "transpose",
    aten.t.default: "t",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.expand.default: "expand",
    aten.clone.default: "clone",
    aten.index_copy_.default: "index_copy_",
}
"""Operators that are a method with the same arguments."""


def with_python_calls(module: GraphModule) -> GraphModule:
    """The same program, on the same submodules, with operators called from Python."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    result = GraphModule(module, graph, class_name=module._get_name())
    result.meta = module.meta
    for node in copies.values():
        if node.op == "call_function":
            _call_from_python(node)
    _generate(result, _Bound())
    return result


class _Bound(CodeGen):
    """Generates calls of torch's functions themselves, where torch.fx looks them up by their names in each call: what
    somebody has patched there is in the captured program already."""

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), ("_torch_functions", _BOUND)]


class _TakesList(_Bound):
    """Generates a forward that takes a list of its arguments and empties it.

    A caller that passes arguments holds them until the call returns, and a piece of a program could not free its inputs
    when it has read them last.
    """

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        names = [name.split(":")[0].strip() for name in free_vars if name != "self"]
        head = super().gen_fn_def(["self", LIST] if "self" in free_vars else [LIST], *args, **kwargs)
        unpacked = f"\n    {', '.join(names)}, = {LIST}" if names else ""
        return f"{head}{unpacked}\n    {LIST}.clear()"


def taking_list(module: GraphModule) -> Callable[[list[Any]], Any]:
    """The forward of :func:`with_python_calls`, which takes a list of the arguments and empties it."""
    result = with_python_calls(module)
    _generate(result, _TakesList())
    return result.forward


def _generate(module: GraphModule, code: CodeGen) -> None:
    """Generate the module's forward by ``code``."""
    module.graph.set_codegen(code)
    module.graph.on_generate_code(lambda _: lambda body: [_CALLS.sub(r"_torch_functions.\1(", line) for line in body])
    module.recompile()


def _call_from_python(node: Node) -> None:
    target = node.target
    if target in METHODS:
        if not node.kwargs and isinstance(node.args[0], Node):
            node.op, node.target = "call_method", METHODS[target]
    elif target in OF_TWO:
        if len(node.args) == 2 and not node.kwargs:
            node.target = OF_TWO[target]
    elif target in FUNCTIONS:
        node.target = FUNCTIONS[target]
    elif target is aten._to_copy.default and set(node.kwargs) == {"dtype"} and len(node.args) == 1:
        value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
        if isinstance(value, torch.Tensor) and value.dtype != node.kwargs["dtype"]:  # otherwise no copy
            node.op, node.target, node.args, node.kwargs = "call_method", "to", (*node.args, node.kwargs["dtype"]), {}
