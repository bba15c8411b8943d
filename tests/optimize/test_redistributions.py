"""A single rank communicates nothing: redistributions are removed."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from paraxis.distributed.operators import REDISTRIBUTIONS, all_gather, all_reduce, all_reduce_coalesced, share
from paraxis.optimize.redistributions import drop_redistributions


def test_redistributions_of_one_rank_become_their_input() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    shared = graph.call_function(share, (x, "0"))
    reduced = graph.call_function(all_reduce, (graph.call_function(torch.relu, (shared,)), "sum", "0"))
    graph.output(graph.call_function(all_gather, (reduced, "shard(0: 0-2 of 2)", [2], "0")))
    module = GraphModule({}, graph)
    assert drop_redistributions(module) == 3
    assert not any(node.target in REDISTRIBUTIONS for node in module.graph.nodes)
    assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_merged_all_reduces_stay() -> None:
    """They return a list, and one rank has none."""
    graph = Graph()
    graph.output(graph.call_function(all_reduce_coalesced, ([graph.placeholder("x")], "sum", "0")))
    assert drop_redistributions(GraphModule({}, graph)) == 0
