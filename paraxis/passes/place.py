"""Placing: the parameters of a graph that is compiled without a plan."""

from __future__ import annotations

from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..placement import REPLICATE
from ..solver import Value
from ..tensor.apply_placements import apply_placements, stored
from ..tensor.sharded_tensor import ShardedTensor
from .base import PassBase
from .setting import Setting
from .solve import solved_of


class PlaceParametersPass(PassBase):
    """Parameters that no plan has placed get the placement of the solution.

    ``parallelize_model`` applies a plan before any graph is compiled for execution, and leaves nothing to do here. This
    pass places the parameters of a model that a user compiles with :func:`paraxis.parallelize_backend`, and of one that
    must run to be planned, graph by graph.
    """

    name = "place"
    changes_graph = False

    def applies(self, setting: Setting) -> bool:
        """Not while a plan is searched."""
        return not setting.searching

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Place what has no placement yet."""
        for value in ctx.example_inputs or []:
            name = getattr(value.spec, "name", None) if isinstance(value, ShardedTensor) else None
            if name:
                ctx.param_cache.setdefault(name, value)  # type: ignore[arg-type]
        solved = solved_of(graph_module)
        found = solved.solution.parameters
        apply_placements(
            (
                (parameter.meta, stored(found.get(Value(node), REPLICATE)))
                for node, parameter in solved.parameters.items()
                if parameter.meta is not None
            ),
            ctx.tp_group,
        )
        return graph_module
