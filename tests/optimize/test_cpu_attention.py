"""Attention on a CPU: causal attention of a prefill and attention of a decode step run in the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.graphs import targets
from torch.fx import Graph, GraphModule

from paraxis.kernels.cpu.build import load_kernel
from paraxis.optimize.cpu_attention import use_decode_attention, use_prefill_attention
from paraxis.optimize.kv_cache_append import append, attend_extended

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
needs_compiler = pytest.mark.skipif(load_kernel("decode_attention") is None, reason="needs a C++ compiler")


class Builder:
    """Builds a graph whose nodes have values."""

    def __init__(self, **inputs: torch.Tensor) -> None:
        self.graph = Graph()
        self.nodes: dict[str, Any] = {}
        for name, value in inputs.items():
            self.nodes[name] = self.graph.placeholder(name)
            self.nodes[name].meta["val"] = value

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, with its value; a mask counts as none."""
        node = self.graph.call_function(target, args, kwargs)
        plain = [x.meta["val"] if hasattr(x, "meta") else x for x in args]
        node.meta["val"] = target(*plain, **{k: v for k, v in kwargs.items() if k != "attn_mask"})
        return node

    def repeat_heads(self, node: Any) -> Any:
        """Every head twice, as models repeat key and value heads."""
        batch, heads, length, features = node.meta["val"].shape
        apart = self.call(aten.unsqueeze.default, node, 2)
        expanded = self.call(aten.expand.default, apart, [batch, heads, 2, length, features])
        return self.call(aten.reshape.default, expanded, [batch, 2 * heads, length, features])

    def build(self, *results: Any) -> GraphModule:
        """The graph module."""
        self.graph.output(results)
        return GraphModule({}, self.graph)


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({"is_causal": True}, torch.float32, 1),
        ({"is_causal": True, "scale": 0.5}, torch.float32, 1),
        ({}, torch.float32, 0),
        ({"is_causal": True, "dropout_p": 0.1}, torch.float32, 0),
        ({"is_causal": True}, torch.bfloat16, 0),
    ],
)
def test_causal_attention_runs_in_the_prefill_kernel(
    options: dict[str, Any], dtype: torch.dtype, expected: int
) -> None:
    torch.manual_seed(0)
    shapes = {"query": 4, "keys": 2, "values": 2}
    values = {name: torch.randn(1, heads, 9, 16).to(dtype) for name, heads in shapes.items()}
    builder = Builder(**values)
    states = [builder.repeat_heads(builder.nodes[name]) for name in ("keys", "values")]
    module = builder.build(builder.call(ATTENTION, builder.nodes["query"], *states, **options))
    before = module(*values.values())
    assert use_prefill_attention(module) == expected
    module.graph.lint()
    assert (torch.ops.paraxis.prefill_attention.default in targets(module)) == bool(expected)
    if "dropout_p" not in options:
        torch.testing.assert_close(module(*values.values()), before)


def returned(cache: torch.Tensor) -> torch.Tensor:
    """What returns a cache to the caller."""
    return cache


def decode_step(
    queries: int = 1, masked: bool = False, early: bool = False, causal: bool = False, compiled: bool = True
) -> GraphModule:
    """Attention of two query heads for each key head of a KV cache, which grows in place."""
    builder = Builder(
        query=torch.empty(1, 4, queries, 16),
        keys=torch.empty(1, 2, 5, 16),
        values=torch.empty(1, 2, 5, 16),
        key=torch.empty(1, 2, queries, 16),
        value=torch.empty(1, 2, queries, 16),
    )
    nodes = builder.nodes
    longer = [
        builder.call(torch.ops.paraxis.append_rows.default, nodes[past], nodes[new])
        if compiled
        else builder.call(append, nodes[past], nodes[new], 2)
        for past, new in (("keys", "key"), ("values", "value"))
    ]
    results = [builder.call(returned, longer[0])] if early else []
    states = [builder.repeat_heads(cache) for cache in longer]
    options = {"attn_mask": builder.graph.placeholder("mask")} if masked else {"is_causal": causal}
    attended = builder.call(ATTENTION, nodes["query"], *states, **options)
    results += [builder.call(returned, cache) for cache in (longer[1:] if early else longer)]
    return builder.build(attended, *results)


@needs_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_append_and_attention_run_in_the_decode_kernel(compiled: bool) -> None:
    module = decode_step(compiled=compiled)
    inputs = [torch.randn(1, n, k, 16) for n, k in ((4, 1), (2, 5), (2, 5), (2, 1), (2, 1))]
    with torch.no_grad():
        before = module(*inputs)
        assert use_decode_attention(module, compiled) == 1
        module.graph.lint()
        left = set(targets(module))
        assert (torch.ops.paraxis.attend_appended.default if compiled else attend_extended) in left
        assert not left & {torch.ops.paraxis.append_rows.default, append, ATTENTION}
        torch.testing.assert_close(module(*inputs), before)


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{"queries": 2}, {"masked": True}, {"early": True}, {"causal": True}],
    ids=["two queries", "mask", "cache that is used before", "causal"],
)
def test_other_attention_on_a_cache_stays(options: dict[str, Any]) -> None:
    module = decode_step(**options)
    assert use_decode_attention(module) == 0
    module.graph.lint()


@needs_compiler
def test_cache_may_be_used_much_later() -> None:
    """A chain of two thousand users: nothing recurses along it."""
    module = decode_step()
    graph = module.graph
    (results,) = graph.output_node().args
    last = results[1]
    with graph.inserting_before(graph.output_node()):
        for _ in range(2000):
            last = graph.call_function(aten.neg.default, (last,))
    graph.output_node().args = ((*results, last),)
    assert use_decode_attention(module) == 1
    module.graph.lint()
