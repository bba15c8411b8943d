"""FSDP: which parameters are sharded, and where a program unshards them."""

from __future__ import annotations

from typing import Any

import torch
from data_parallel.parameters import make_parameters
from models.meshes import mesh_context
from torch.fx import Graph, GraphModule

from paraxis import Config
from paraxis.data_parallel import shards_parameters, unshard_at_first_use
from paraxis.tensor.sharded_tensor import unwrap


def test_unsharding_moves_to_the_first_use() -> None:
    graph = Graph()
    first, second, x = (graph.placeholder(name) for name in ("first", "second", "x"))
    early = [graph.call_function(unwrap, (p,)) for p in (first, second)]
    y = graph.call_function(torch.relu, (x,))
    z = graph.call_function(torch.mm, (y, early[1]))
    graph.output(graph.call_function(torch.mm, (z, early[0])))
    program = GraphModule({}, graph)
    unshard_at_first_use(program)
    program.graph.lint()
    order = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert order == [torch.relu, unwrap, torch.mm, unwrap, torch.mm]


def sharded() -> tuple[list[bool], dict[str, bool]]:
    ctx, parameters, _ = make_parameters("shard")
    single = mesh_context(1, 4)
    kinds = [shards_parameters(c, Config(data_parallel=k)) for c, k in ((ctx, "shard"), (ctx, None), (single, "shard"))]
    return kinds, {name: p.dp_shard is not None for name, p in parameters.items()}


def test_matrices_are_sharded_and_small_vectors_replicated(ranks: Any) -> None:
    for kinds, found in ranks(4).run(sharded):
        assert kinds == [True, False, False]
        assert {name for name, is_sharded in found.items() if not is_sharded} == {"vector", "sharded vector"}
