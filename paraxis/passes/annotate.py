"""Annotating: what the solution means for the layers of the captured graph."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from ..core import Config, ParallelExecutionCtx
from ..placement import Shard
from .base import AnalyzeBase
from .layers import Layer, find_layers, is_gathered, uses
from .solve import RESULT, Solved


class ParallelLayerAnnotatePass(AnalyzeBase):
    """Write the solution on every Linear, Embedding and CrossEntropy node of the captured graph.

    ``node.meta`` gets ``axis`` ("column": weight split on its output dimension, "row": on its input dimension, "vocab":
    a table, or the classes of a loss, split by token id; None: computed whole), ``gather_output`` (column: somebody
    needs the whole result; row and vocab: always, since the partial sums are reduced), ``input_is_parallel`` (the
    input arrives split) and ``sequence_parallel``. The same fields are the pass's marker.

    A layer is a matrix product or look-up with a parameter, in whatever form the model writes it (``linear``, ``addmm``
    on a transposed weight, ``x @ w.T``).
    """

    FIELDS = ("axis", "gather_output", "input_is_parallel", "sequence_parallel")

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        solved: Solved | None = graph_module.meta.get(RESULT)
        if solved is None:
            raise RuntimeError("ParallelLayerAnnotatePass needs a solution: run ParallelAxisSolverPass first")
        users = uses(solved)
        produced = {
            value: placement
            for step, strategy in solved.solution.strategies.items()
            for value, placement in zip(step.outputs, strategy.outputs, strict=True)
        }
        for layer in find_layers(solved):
            origin = layer.step.node.meta.get("origin")
            if origin is None:
                continue
            info = self._describe(layer, solved, users, produced)
            origin.meta.update(info)
            self.clear_marker_per_node(origin)
            self.place_marker_per_node(origin, dict(info))
        return graph_module

    def _describe(self, layer: Layer, solved: Solved, users: Any, produced: Any) -> dict[str, Any]:
        parallel = isinstance(produced.get(layer.data), Shard)
        axis = layer.axis
        if axis in ("row", "vocab") and layer.kind != "cross_entropy":
            gather = True
        elif axis == "column":
            gather = is_gathered(layer.step.outputs[0], solved.solution, users)
        else:
            gather = False
        return {
            "axis": axis,
            "gather_output": gather,
            "input_is_parallel": parallel and axis in ("row", "vocab"),
            "sequence_parallel": False,
        }
