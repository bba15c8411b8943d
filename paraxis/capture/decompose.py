"""From a captured graph to ATen operators, with provenance.

The graph that Dynamo captures calls anything that Python may call on a tensor: too many functions to have a rule each.
Traced again, it becomes a graph of ATen operators. It is traced *before* autograd, and composite operators with good
kernels (linear, attention, normalization, the loss) are not decomposed: the same graph is analysed, then rewritten,
executed and differentiated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..compat.flex_attention import FLEX_ATTENTION
from ..compat.torch import (
    FakeTensor,
    FakeTensorMode,
    core_aten_decompositions,
    higher_order_name,
    is_data_of_tensor,
    operator_name,
    schema_of,
)
from ..errors import CaptureError
from ..tensor.sharded_tensor import ShardedTensor
from .custom_functions import trace_custom_function
from .flex_attention import trace_flex_attention
from .vmap import find_sections

KEEP = {
    "linear",
    "matmul",
    "addmm",
    "baddbmm",
    "scaled_dot_product_attention",
    "cross_entropy_loss",
    "layer_norm",
    "rms_norm",
    "embedding",
    "dropout",
    "silu",
    "gelu",
    "softmax",
    "log_softmax",
    "detach",
}
"""Operators that are not decomposed: one rule each, and torch's own fast kernels and derivatives. (``detach`` would
become ``alias``, through which gradients flow.)"""


DECOMPOSE = (
    ("einsum", "bilinear", "tensordot", "view_as", "reshape_as", "expand_as", "broadcast_to", "ravel", "narrow")
    + ("adjoint", "mH", "matrix_H", "moveaxis", "atleast_1d", "atleast_2d", "atleast_3d", "hsplit", "vsplit", "dsplit")
    + ("linalg_diagonal", "resolve_conj", "resolve_neg")
)
"""Composite operators that torch does not decompose before autograd: matmuls and views, which have rules."""


@lru_cache(maxsize=1)
def _table() -> dict[Any, Callable[..., Any]]:
    table = {
        op: function
        for op, function in dict(core_aten_decompositions()).items()
        if operator_name(op).removeprefix("aten::").removesuffix("_") not in KEEP
    }
    packets = [getattr(torch.ops.aten, name) for name in DECOMPOSE]
    composite = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return {**table, **{op: op.decompose for op in composite if not schema_of(op).is_mutable}}


class _Recorder(Interpreter):
    """Interprets the captured graph, with the metadata of each node set while its operators are traced.

    A graph inside it (``inner``) is traced as part of the node that contains it, whose metadata are set already.
    """

    def __init__(self, graph_module: GraphModule, inner: bool = False) -> None:
        super().__init__(graph_module)
        self._inner = inner
        self._sections = find_sections(graph_module.graph)
        self._results: dict[Node, Any] = {}

    def run_node(self, node: Node) -> Any:
        with nullcontext() if self._inner else fx_traceback.set_current_meta(node):
            section = self._sections.get(node)
            if section is None:
                return super().run_node(node)
            if node is section.nodes[0]:
                values = {n: self.env[n] for n in section.inputs()}
                self._results.update(section.run(self.module, values))  # type: ignore[arg-type]
            return self._results.get(node)

    def _set_current_node(self, node: Node) -> Any:
        """The interpreter records the current node; not for nodes of an inner graph."""
        return nullcontext() if self._inner else super()._set_current_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_data_of_tensor(target):  # which make_fx does not trace
            return args[0].detach()
        if higher_order_name(target) == "autograd_function_apply":
            return trace_custom_function(target, args, kwargs)
        if higher_order_name(target) == FLEX_ATTENTION:
            return trace_flex_attention(args, kwargs)
        if higher_order_name(target) == "tag_activation_checkpoint":
            body, *rest = args  # inlined here; optimize.activation_checkpointing makes a region of it again
            return _Recorder(body, inner=True).run(*rest)
        with _unpatched(target) if type(target) is FunctionType else nullcontext():
            return super().call_function(target, args, kwargs)


@contextmanager
def _unpatched(function: FunctionType) -> Iterator[None]:
    """Inside, a function of torch is found under its name, whatever somebody has put there.

    While a graph is traced, ``F.silu`` asks for what its own name stands for now, and a patch that calls ``F.silu``
    would be applied once by the captured graph and once more here.
    """
    module, name = sys.modules.get(function.__module__), function.__name__
    patch = getattr(module, name, function)
    if patch is function or not function.__module__.startswith("torch."):
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, patch)


def to_aten(graph_module: GraphModule, fake_inputs: list[Any] | None = None) -> GraphModule:
    """The ATen graph of a captured graph, with the same placeholders in the same order.

    Every node's ``meta["origin"]`` is the captured node it came from.
    """
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    values = fake_inputs or [n.meta.get("example_value", n.meta.get("val")) for n in placeholders]
    mode = next((v.fake_mode for v in map(_inner, values) if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    values = [_plain(v, mode) for v in values]
    recorder = _Recorder(graph_module)

    def run(*args: Any) -> Any:
        return recorder.run(*args)

    with fx_traceback.preserve_node_meta(), mode:
        traced = make_fx(run, decomposition_table=_table(), pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    by_name = {n.name: n for n in graph_module.graph.nodes}
    captured = iter(placeholders)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            node.meta["origin"] = next(captured)
        else:
            node.meta["origin"] = _origin(node, by_name)
    _match_attributes(graph_module, traced)
    _check_constants(traced)
    return traced


def _check_constants(traced: GraphModule) -> None:
    """A fake tensor among the constants is a value whose computation was not traced: running it would be wrong."""
    for node in traced.graph.nodes:
        value = getattr(traced, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, FakeTensor):
            raise CaptureError(
                f"the computation of a tensor {tuple(value.shape)} could not be traced; it is used by "
                f"{', '.join(str(user.target) for user in node.users)}. {node.meta.get('stack_trace', '')}"
            )


def _match_attributes(captured: GraphModule, traced: GraphModule) -> None:
    """A captured graph may have parameters as attributes; tracing renames them, but they are the same objects."""

    def attribute(root: Any, node: Node) -> Any:
        for part in str(node.target).split("."):
            root = getattr(root, part, None)
        return root

    by_id = {id(attribute(captured, n)): n for n in captured.graph.nodes if n.op == "get_attr"}
    for node in traced.graph.nodes:
        if node.op == "get_attr" and id(attribute(traced, node)) in by_id:
            node.meta["origin"] = by_id[id(attribute(traced, node))]


def _origin(node: Node, by_name: dict[str, Node]) -> Node | None:
    for source in reversed(node.meta.get("from_node", [])):
        name = source[0] if isinstance(source, tuple) else source.name
        if name in by_name:
            return by_name[name]
    return None


def _inner(value: Any) -> Any:
    return value.local if isinstance(value, ShardedTensor) else value


def _plain(value: Any, mode: FakeTensorMode) -> Any:
    """Analysis sees global shapes only: a sharded tensor becomes a plain fake one.

    None of them requires gradients: the operators are the same, and some transforms (``vmap``) lose tensors that do.
    The graph is differentiated when it runs.
    """
    if isinstance(value, ShardedTensor):
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.Tensor):
        fake = value if isinstance(value, FakeTensor) else mode.from_tensor(value)
        return fake.detach() if fake.requires_grad else fake
    return value
