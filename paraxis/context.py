"""The runtime side of a parallelization: its ranks, its device, and what it has made so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from .distributed.exit import wait_at_exit
from .distributed.input_check import InputCheck
from .distributed.mesh import Groups, groups_of

if TYPE_CHECKING:
    from .data_parallel.grad_reducer import GradReducer
    from .plan import Plan
    from .runtime.early_launch import EarlyLaunches


@dataclass
class EngineState:
    """What the engine notes between its stages.

    Attributes:
        planning: Whether a plan is being made: graphs that are compiled now add to it.
        searching: Whether that is done without running anything: no parameter has a placement or storage.
        simulated: Whether the ranks are simulated, without weights.
        aliases: For parameters that several modules share: all their names, by the first.
        repeats: How many parameters of the model one that is planned stands for, where blocks are planned once.
        decided: While a plan is searched with several calls, the placements that earlier ones decided, by name.
        conversions: Parameters that the checkpoint stores in another form.
        grad_reducer: What averages gradients over data-parallel ranks, where there are any.
        pass_seconds: Seconds spent in each pass, by its name.
        input_check: What compares the inputs of calls between tensor-parallel ranks; None where nothing does.
        first_blocks: Whether the graph that is compiled now is that of a model's first blocks, for all of them.
        graph_pool: The memory pool that the CUDA graphs of this context share, once there is one.
        generating: An object that stands for the call of ``generate`` that is running; None if there is none.
        early_launches: What launches the prefill of a repeated ``generate`` early, on a GPU.
        transformed: Whether a call inside of a transform of ``torch.func`` was warned of.
    """

    planning: bool = False
    searching: bool = False
    simulated: bool = False
    aliases: dict[str, list[str]] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    decided: dict[str, Any] = field(default_factory=dict)
    conversions: list[Any] = field(default_factory=list)
    grad_reducer: GradReducer | None = None
    pass_seconds: dict[str, float] = field(default_factory=dict)
    input_check: InputCheck | None = None
    first_blocks: bool = False
    graph_pool: Any = None
    early_launches: EarlyLaunches | None = None
    generating: Any = None
    transformed: bool = False


@dataclass
class ParallelExecutionCtx:
    """Where a model runs in parallel, and what was made for it so far.

    Attributes:
        tp_group: The tensor-parallel process group; a one-dimensional ``DeviceMesh`` (``mesh["tp"]``) is taken too.
        current_device: The device of this process.
        mesh: Instead of ``tp_group``, a ``DeviceMesh`` with a dimension ``tp`` and, for ranks that train on other data,
            one that is called ``dp``: ``init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp", "tp"))``.
        example_inputs: The inputs the last graph was captured with; parameters as they are, other tensors without data.
        parallel_layer_cache: Parallel layers by the parameters and flags they were made for.
        param_cache: Parameters by name.
        weight_map: Parameter name to the file that holds it.
        last_optimized_graph_module: The local program of the last compilation.
        compile_times: How many graphs were compiled for execution.
        plan: The solved plan, once there is one.
        timings: Seconds spent in each stage: capture, decompose, search, rewrite, load.
        state: What the engine notes between its stages; not for users.
    """

    tp_group: dist.ProcessGroup = None  # type: ignore[assignment]
    current_device: torch.device = None  # type: ignore[assignment]
    mesh: DeviceMesh | None = None
    example_inputs: list[Any] = field(default_factory=list)
    parallel_layer_cache: dict[Any, nn.Module] = field(default_factory=dict)
    param_cache: dict[str, nn.Parameter] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    last_optimized_graph_module: GraphModule | None = None
    compile_times: int = 0
    plan: Plan | None = None
    timings: dict[str, float] = field(default_factory=dict)
    state: EngineState = field(default_factory=lambda: EngineState(), init=False, repr=False)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the body takes to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - started

    def __post_init__(self) -> None:
        wait_at_exit()
        self._groups: Groups | None = None
        if isinstance(self.mesh, DeviceMesh):
            self._groups = groups_of(self.mesh)
            if self.tp_group not in (None, self._groups.tp):
                raise ValueError("give either tp_group or mesh: a mesh has a dimension 'tp' for the group")
            self.tp_group = self._groups.tp
        if isinstance(self.tp_group, DeviceMesh):
            if self.tp_group.ndim != 1:
                raise ValueError(
                    f"tp_group is a DeviceMesh with {self.tp_group.ndim} dimensions "
                    f"{self.tp_group.mesh_dim_names}; pass it as mesh=, or one of them, for example mesh['tp']."
                )
            self.tp_group = self.tp_group.get_group()
        if self.current_device is None:
            raise TypeError("current_device is missing: give the device of this process, as in torch.device('cuda', 0)")
        self.current_device = torch.device(self.current_device)

    @property
    def rank(self) -> int:
        """This process's rank within the tensor-parallel group."""
        return dist.get_rank(self.tp_group)

    @property
    def world_size(self) -> int:
        """The number of ranks a tensor is split over."""
        return dist.get_world_size(self.tp_group)

    @property
    def groups(self) -> Groups:
        """The process groups: tensor-parallel ranks, data-parallel ranks, and all of them."""
        if self._groups is None:
            places = tuple((0, rank) for rank in range(self.world_size))
            self._groups = Groups(self.tp_group, None, self.tp_group, places)
        return self._groups

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks that work on the model: those of the mesh."""
        return self.groups.world_group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return dist.get_rank(self.world_group) == 0

    @property
    def dp_rank(self) -> int:
        """This process's rank among those that hold the same part of the model and work on other data."""
        return dist.get_rank(self.groups.dp) if self.groups.dp is not None else 0

    @property
    def dp_size(self) -> int:
        """The number of ranks that hold the same part of the model and work on other data."""
        return dist.get_world_size(self.groups.dp) if self.groups.dp is not None else 1
