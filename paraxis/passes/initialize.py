"""Loading: every parameter gets its shard, from a checkpoint or by initialization."""

from __future__ import annotations

from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..weights import materialize_parameters
from .base import PassBase
from .setting import Setting


class InitializeOrLoadWeightsPass(PassBase):
    """Load or initialize the parameters that the plan has placed and that have no storage yet.

    Each rank reads only its slices of the checkpoint files (``ctx.weight_map``); what no file provides is initialized
    with ``config.weight_init_fn`` so that the global weights do not depend on the number of ranks. Parameters that have
    their shard are skipped, so later captures do nothing here.
    """

    name = "initialize"
    changes_graph = False

    def applies(self, setting: Setting) -> bool:
        """Only where the program will run."""
        return setting.runs

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Load what has no storage yet."""
        materialize_parameters(ctx, config)
        return graph_module
