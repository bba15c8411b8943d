"""What annotation writes on the Linear, Embedding and CrossEntropy nodes of captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import batch, context
from models.tiny import CONFIGS, build
from torch.fx import GraphModule, Node

from paraxis import Config
from paraxis.passes import ParallelAxisSolverPass, ParallelLayerAnnotatePass
from paraxis.plan.offline import Planned

FIELDS = ("axis", "gather_output", "input_is_parallel", "sequence_parallel")


def captured(name: str) -> GraphModule:
    """The graph of an unsharded model with labels, as ``torch.compile`` passes it to a backend."""
    from paraxis.capture import ignore_loggers

    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    ignore_loggers()
    model = build(name)
    ids, labels = batch(256)
    torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=labels)
    return graphs[0]


def kind_of(node: Node) -> str | None:
    """What a reader of the captured graph would call a layer."""
    name = getattr(node.target, "__name__", str(node.target))
    if node.op != "call_function":
        return None
    weights = [a for a in node.args if isinstance(a, Node) and "_parameters_" in str(a.target)]
    transposed_weights = [
        a
        for a in node.args
        if isinstance(a, Node) and a.op in ("call_function", "call_method") and "_parameters_" in str(a.args[:1])
    ]
    if name in ("linear", "addmm") or (name == "matmul" and transposed_weights):
        return "linear"
    if name == "embedding" and weights:
        return "embedding"
    return "cross_entropy" if name == "cross_entropy" else None


def annotate(name: str) -> list[dict[str, Any]]:
    """Every layer of the captured graph, with its annotations."""
    graph, ctx, config = captured(name), context(), Config()
    graph = ParallelAxisSolverPass().run(graph, ctx, config)
    graph = ParallelLayerAnnotatePass().run(graph, ctx, config)
    found = []
    for node in graph.graph.nodes:
        kind = kind_of(node)
        if kind is not None:
            where = list(node.meta.get("nn_module_stack", {}).values())
            info = {field: node.meta[field] for field in FIELDS}
            found.append({"kind": kind, "module": where[-1][0] if where else "", **info})
    return found


@pytest.mark.parametrize("name", list(CONFIGS))
def test_layers_of_an_architecture_have_megatrons_axes(name: str, ranks: Any) -> None:
    results = ranks(2).run(annotate, name)
    assert results[0] == results[1]
    layers = results[0]
    kinds = [layer["kind"] for layer in layers]
    assert kinds.count("embedding") >= 1 and kinds.count("cross_entropy") == 1 and kinds.count("linear") >= 9
    for layer in layers:
        assert layer["axis"] in ("column", "row", "vocab"), layer
        assert layer["sequence_parallel"] is False
        if layer["kind"] == "linear":
            assert layer["axis"] in ("column", "row")
            head = layer["module"].endswith(("lm_head", "embed_out"))
            assert layer["gather_output"] is (layer["axis"] == "row" or head)
            assert layer["input_is_parallel"] is (layer["axis"] == "row")
        else:
            assert layer["axis"] == "vocab"


@pytest.mark.long
def test_annotations_do_not_depend_on_the_number_of_ranks(ranks: Any) -> None:
    """With a single key head, more ranks than that, and one rank."""
    found = [ranks(world).run(annotate, "falcon")[0] for world in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def test_annotations_are_also_the_marker_of_the_pass(offline: Planned) -> None:
    marked = {}
    for node in offline.searched.captured.graph.nodes:
        if ParallelLayerAnnotatePass.already_executed_per_node(node):
            marked[node.name] = ParallelLayerAnnotatePass.get_stored_field_info(node, "axis")
            assert all(node.meta[f] == ParallelLayerAnnotatePass.get_stored_field_info(node, f) for f in FIELDS)
    assert list(marked.values()) == ["vocab", "column", "row", "column", "vocab"]


def test_annotating_requires_a_solution() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="ParallelAxisSolverPass"):
        ParallelLayerAnnotatePass().run(graph, None, Config())  # type: ignore[arg-type]
