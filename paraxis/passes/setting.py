"""What a program is built for: device, gradients, compiler, ranks. Passes say when they apply in these terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from ..compat.inductor import options_of_mode
from ..config import AUTO, Config
from ..context import ParallelExecutionCtx
from ..data_parallel.shard import shards_parameters
from ..distributed.collectives import backend_of
from ..graph.local_program import INFO, ProgramInfo, draws_random


@dataclass(frozen=True)
class Setting:
    """The circumstances of one build of a local program.

    Attributes:
        searching: A plan is being searched: no parameter has a placement, and nothing will run.
        simulated: The ranks are simulated: there are no weights, and nothing will run.
        grad: Autograd records the program.
        compiled: Inductor compiles the program.
        device: The type of the device: ``"cpu"``, ``"cuda"``.
        cuda_graphs: The program is captured as a CUDA graph. Whether sizes are dynamic is known after lifting.
        dp_sharded: Data-parallel ranks shard parameters (FSDP), so that a program gathers them.
        random: The program draws random numbers.
        ranks: The number of tensor-parallel ranks.
        first_blocks: The program is that of a model's first blocks, and will run for all blocks: nothing may be merged
            across the borders of blocks.
    """

    searching: bool = False
    simulated: bool = False
    grad: bool = False
    compiled: bool = False
    device: str = "cpu"
    cuda_graphs: bool = False
    dp_sharded: bool = False
    random: bool = False
    ranks: int = 2
    first_blocks: bool = False

    @property
    def runs(self) -> bool:
        """Whether the program will run, on weights."""
        return not self.searching and not self.simulated

    @property
    def eager(self) -> bool:
        """Whether Python runs the program, operator by operator."""
        return not self.compiled

    @property
    def inference(self) -> bool:
        """Whether autograd does not record the program."""
        return not self.grad

    @property
    def lifts(self) -> bool:
        """Whether the program is lifted to plain tensors: for Inductor, or to be called for all blocks."""
        return self.for_inductor or (self.first_blocks and self.inference and not self.random)

    @property
    def for_inductor(self) -> bool:
        """Whether the program is lifted to plain tensors and Inductor compiles it.

        Programs that draw random numbers are not: a rank draws from a state of its own for sharded tensors and from a
        common one for replicated tensors, which Inductor's generator cannot express.
        """
        return self.compiled and not self.random


def setting_of(graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> Setting:
    """The setting in which a graph is rewritten now."""
    compiled = compiles(ctx, config)
    info = graph_module.meta.get(INFO)
    static = not (isinstance(info, ProgramInfo) and info.dynamic)
    return Setting(
        searching=ctx.state.searching,
        simulated=ctx.state.simulated,
        grad=torch.is_grad_enabled(),
        compiled=compiled,
        device=ctx.current_device.type,
        cuda_graphs=compiled and static and bool(inductor_options(ctx, config).get("triton.cudagraphs")),
        dp_sharded=shards_parameters(ctx, config),
        random=draws_random(graph_module),
        ranks=ctx.world_size,
        first_blocks=ctx.state.first_blocks,
    )


def compiles(ctx: ParallelExecutionCtx, config: Config) -> bool:
    """Whether Inductor compiles the programs that are made now.

    By default it does on a GPU, where no gradients are computed. On the CPU the program runs on our own kernels, which
    are about as fast at once.
    """
    if config.compile == AUTO:
        return ctx.current_device.type == "cuda" and not torch.is_grad_enabled()
    return config.compile is not None


def inductor_options(ctx: ParallelExecutionCtx, config: Config) -> dict[str, object]:
    """Inductor's options for ``config.mode``, without CUDA graphs where they are impossible: see :func:`obstacle`."""
    options = options_of_mode(config.mode or ("reduce-overhead" if config.compile == AUTO else "default"))
    if options.get("triton.cudagraphs") and obstacle(ctx, config):
        del options["triton.cudagraphs"]
    return options


def obstacle(ctx: ParallelExecutionCtx, config: Config) -> str:
    """Why programs cannot be captured as CUDA graphs; empty if they can."""
    group: dist.ProcessGroup = ctx.tp_group
    if group.size() > 1 and ctx.current_device.type == "cuda" and backend_of(group, ctx.current_device) == "gloo":
        return "gloo's collectives cannot be captured"
    if shards_parameters(ctx, config):
        return "unsharded weights have another address in every call"
    return ""
