"""The passes by hand on captured graphs: what they write on Linear, Embedding and CrossEntropy nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import long
from models.compare import batch, context
from models.tiny import CONFIGS, build
from torch.fx import GraphModule, Node

from paraxis import Config
from paraxis.passes import ParallelAxisSolverPass, ParallelLayerAnnotatePass

FIELDS = ("axis", "gather_output", "input_is_parallel", "sequence_parallel")


def captured(name: str, labels: bool) -> GraphModule:
    """The graph of a plain model, as ``torch.compile`` hands it to a backend."""
    from paraxis.capture import ignore_loggers

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    ignore_loggers()
    model = build(name)
    ids, targets = batch(256)
    torch.compile(model, fullgraph=True, backend=keep)(input_ids=ids, labels=targets if labels else None)
    return graphs[0]


def is_layer(node: Node) -> str | None:
    """What a reader of the captured graph would call a layer."""
    name = getattr(node.target, "__name__", str(node.target))
    if node.op != "call_function":
        return None
    weights = [a for a in node.args if isinstance(a, Node) and "_parameters_" in str(a.target)]
    turned = [
        a
        for a in node.args
        if isinstance(a, Node) and a.op in ("call_function", "call_method") and "_parameters_" in str(a.args[:1])
    ]
    if name in ("linear", "addmm") or (name == "matmul" and turned):
        return "linear"
    if name == "embedding" and weights:
        return "embedding"
    return "cross_entropy" if name == "cross_entropy" else None


def annotate(name: str, labels: bool) -> list[dict[str, Any]]:
    graph, ctx, config = captured(name, labels), context(), Config()
    graph = ParallelAxisSolverPass().run(graph, ctx, config)
    graph = ParallelLayerAnnotatePass().run(graph, ctx, config)
    found = []
    for node in graph.graph.nodes:
        kind = is_layer(node)
        if kind is not None:
            where = list(node.meta.get("nn_module_stack", {}).values())
            info = {field: node.meta[field] for field in FIELDS}
            found.append({"kind": kind, "module": where[-1][0] if where else "", **info})
    return found


@pytest.mark.parametrize("name", list(CONFIGS))
def test_annotations(name: str, ranks: Any) -> None:
    results = ranks(2).run(annotate, name, True)
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


@long
def test_annotations_do_not_depend_on_the_number_of_ranks(ranks: Any) -> None:
    """One head of keys, more ranks than that, and one rank alone."""
    found = [ranks(world).run(annotate, "falcon", True)[0] for world in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def test_the_passes_need_one_another() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="ParallelAxisSolverPass"):
        ParallelLayerAnnotatePass().run(graph, None, Config())  # type: ignore[arg-type]
