"""From a captured graph to the program that this rank runs: the pipeline, with all ranks in step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..compat.torch import FakeTensor
from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import on_all_ranks
from .agree import AgreeOnProgramPass
from .base import Observer
from .lift import LIFTED
from .pipeline import build_parallel_pass_pipeline


def build_program(
    captured: GraphModule,
    example_inputs: list[Any],
    ctx: ParallelExecutionCtx,
    config: Config,
    observer: Observer | None = None,
) -> GraphModule:
    """Run the pipeline. A pass that fails before the ranks have agreed on the program fails on all of them."""
    ctx.example_inputs = example_inputs
    pipeline = config.pipeline or build_parallel_pass_pipeline()
    group = ctx.world_group if ctx.state.planning else ctx.tp_group
    with on_all_ranks(group, "compiling the model", config.sync_timeout):
        program = pipeline.run(captured, ctx, config, stop=AgreeOnProgramPass, observer=observer)
    if AgreeOnProgramPass in pipeline:
        program = pipeline.run(program, ctx, config, start=AgreeOnProgramPass, observer=observer)
    if config.clean_markers_after_all_passes:
        pipeline.clean(captured)
    lifted = program.meta.get(LIFTED)
    ctx.last_optimized_graph_module = program if lifted is None else lifted.source
    ctx.example_inputs = [_without_data(x) for x in example_inputs]
    return program


def _without_data(value: Any) -> Any:
    """An input without its data: otherwise the KV cache of the first call would never be freed."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (nn.Parameter, FakeTensor)):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
