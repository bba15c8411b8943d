"""Annotating: what the solution means for the layers of the captured graph."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..placement import Partial, Placement, Replicate, Shard
from ..solver import Value
from .base import AnalyzeBase
from .layers import Layer, find_layers, is_gathered, uses
from .solve import Solved, solved_of

OWN = "layer"
"""In ``node.meta`` of the ATen graph: the annotations of the layer that the node is."""


class ParallelLayerAnnotatePass(AnalyzeBase):
    """Write the solution on every Linear, Embedding and CrossEntropy node of the captured graph.

    ``node.meta`` gets ``axis`` ("column": the weight is sharded on its output dimension; "row": on its input dimension;
    "vocab": an embedding, or the classes of a loss, sharded by token id; None: replicated), ``gather_output`` (column:
    a consumer needs the full result; row and vocab: always, since partial results are all-reduced),
    ``input_is_parallel`` (the input arrives sharded) and ``sequence_parallel``. The same fields are the pass's marker.

    A layer is a matmul or look-up with a parameter, however the model writes it (``linear``, ``addmm`` on a transposed
    weight, ``x @ w.T``).
    """

    name = "annotate"
    FIELDS = ("axis", "gather_output", "input_is_parallel", "sequence_parallel")

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Mark every layer of the captured graph."""
        solved = solved_of(graph_module)
        users = uses(solved)
        produced = {
            value: placement
            for step, strategy in solved.solution.strategies.items()
            for value, placement in zip(step.outputs, strategy.outputs, strict=True)
        }
        sequence = _SequenceShards(solved, users, produced)
        for layer in find_layers(solved):
            origin = layer.step.node.meta.get("origin")
            if origin is None:
                continue
            info = self._describe(layer, solved, users, produced)
            if config.enable_sequence_parallel and layer.kind != "cross_entropy" and layer.axis is not None:
                column = layer.axis == "column"
                info["sequence_parallel"] = (
                    sequence.before(layer.data) if column else sequence.after(layer.step.outputs[0])
                )
            origin.meta.update(info)
            layer.step.node.meta[OWN] = info  # one captured call may be several layers, such as attention
            self.clear_marker_per_node(origin)
            self.place_marker_per_node(origin, dict(info))
        return graph_module

    def _describe(self, layer: Layer, solved: Solved, users: Any, produced: Any) -> dict[str, Any]:
        """The annotations of a layer, without sequence parallelism."""
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


class _SequenceShards:
    """Which layers communicate with values that are sharded on the sequence.

    A column-parallel layer all-gathers its input, a row-parallel or vocab-parallel one reduce-scatters its output.
    """

    def __init__(self, solved: Solved, users: Any, produced: dict[Value, Placement]) -> None:
        self.strategies, self.users, self.produced = solved.solution.strategies, users, produced
        self.producers = {value: step for step in self.strategies for value in step.outputs}

    def before(self, value: Value) -> bool:
        """Whether an input is sharded on the sequence, looking back through views and casts."""
        placement, step = self.produced.get(value), self.producers.get(value)
        if step is None:
            return False
        if _is_on_sequence(placement, step.call.outputs[value.index].ndim):  # type: ignore[union-attr]
            return True
        return isinstance(placement, (Replicate, Shard)) and len(step.inputs) == 1 and self.before(step.inputs[0])

    def after(self, value: Value) -> bool:
        """Whether a partial output is reduce-scattered on the sequence, looking ahead through views and casts."""
        for step, i in self.users.get(value, []):
            if step is None:
                continue
            strategy = self.strategies[step]
            if _is_on_sequence(strategy.inputs[i], step.call.inputs[i].ndim):
                return True
            if len(step.inputs) == 1 and isinstance(strategy.outputs[0], Partial) and self.after(step.outputs[0]):
                return True
        return False


def _is_on_sequence(placement: Placement | None, ndim: int) -> bool:
    """Whether a placement shards the sequence dimension, the last but one, and nothing else."""
    return isinstance(placement, Shard) and ndim > 1 and set(placement.dims) == {ndim - 2}
