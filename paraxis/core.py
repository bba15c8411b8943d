"""What a parallelization carries around: its options, its runtime context, and what is known of each parameter."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from .distributed.mesh import Groups, groups_of
from .placement import Placement

if TYPE_CHECKING:
    from .distributed.averaging import Averager
    from .distributed.splitting import Split
    from .passes.base import PassPipeline
    from .plan import Plan
    from .solver import Machine


@dataclass(frozen=True)
class HashableSlice:
    """A slice that can be a dictionary key."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def to_slice(self) -> slice:
        return slice(self.start, self.stop, self.step)


@dataclass
class ParameterSlice:
    """A piece of a tensor in the checkpoint: ``index`` on dimension ``ParameterMeta.dim`` of tensor ``source``."""

    source: str | None = None
    index: slice | None = None


@dataclass(eq=False)
class ParameterMeta:
    """What is known of one parameter, before and after it has storage.

    It travels with the parameter (``param.meta_info``) and is compared by identity: the compiled code is guarded on
    *which* parameter it sees, so a plan may still fill in the placement after the first capture.

    Attributes:
        name: Its first qualified name in the model.
        shape: The global shape.
        dtype: The dtype it will have.
        is_tied: Whether several modules share it.
        is_parallel: Whether it is split over the ranks.
        is_modified_meta: Whether the plan has fixed its placement.
        need_initialize: Whether it still has to be loaded or initialized.
        init_fn: Initialization function; overrides ``Config.weight_init_fn``.
        dim: The dimension that ``mapping`` slices.
        mapping: From slices of the local shard, along ``dim``, to slices of tensors in the checkpoint.
        placement: Where its elements live; ``None`` until the plan is solved.
        group: The tensor-parallel ranks, over which it is placed.
        source: A materialized tensor to slice it from, for modules that came with their weights.
        split: How data-parallel ranks split the shard between them, if they do.
        everybody: All ranks that hold parts or copies of it: those of the mesh.
        averager: What averages its gradient over data-parallel ranks that have copies of it.
    """

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    is_tied: bool = False
    is_parallel: bool = False
    is_modified_meta: bool = False
    need_initialize: bool = False
    init_fn: Callable[..., Any] | None = None
    dim: int = 0
    mapping: dict[HashableSlice, ParameterSlice] = field(default_factory=dict)
    placement: Placement | None = None
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    source: torch.Tensor | None = field(default=None, repr=False)
    split: Split | None = field(default=None, repr=False)
    everybody: dist.ProcessGroup | None = field(default=None, repr=False)
    averager: Averager | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterMeta:
        # Dynamo copies the metadata it guards on; identity must survive that.
        return self


@dataclass
class ParallelExecutionCtx:
    """The runtime side of a parallelization: where it runs and what it has made so far.

    Attributes:
        tp_group: The tensor-parallel process group; a one-dimensional ``DeviceMesh`` (``mesh["tp"]``) is taken too.
        current_device: The device of this process.
        mesh: Instead of ``tp_group``, a ``DeviceMesh`` with a dimension ``tp`` and, for ranks that train on other data,
            one that is called ``dp``: ``init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp", "tp"))``.
        example_inputs: The inputs the last graph was captured with; parameters as they are, other tensors without data.
        parallel_layer_cache: Parallel layers by the parameters and flags they were made for.
        param_cache: Parameters by name.
        weight_map: Parameter name to the file that holds it.
        conversions: Parameters that the checkpoint stores in another form.
        last_optimized_graph_module: The local program of the last compilation.
        compile_times: How many graphs were compiled for execution.
        plan: The solved plan, once there is one.
        planning: Whether the plan is still being made: graphs that are compiled now add to it.
        timings: Seconds spent in each stage: capture, decompose, search, rewrite, load.
        aliases: For parameters that several modules share: all their names, by the first.
        repeats: How many parameters of the model one that is planned stands for, where blocks are planned once.
        averager: What averages gradients over data-parallel ranks, where there are any.
    """

    tp_group: dist.ProcessGroup = None  # type: ignore[assignment]
    current_device: torch.device = None  # type: ignore[assignment]
    mesh: DeviceMesh | None = None
    example_inputs: list[Any] = field(default_factory=list)
    parallel_layer_cache: dict[Any, nn.Module] = field(default_factory=dict)
    param_cache: dict[str, nn.Parameter] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    conversions: list[Any] = field(default_factory=list)
    last_optimized_graph_module: GraphModule | None = None
    compile_times: int = 0
    plan: Plan | None = None
    planning: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    averager: Averager | None = None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the body takes to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - started

    def __post_init__(self) -> None:
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
    def everybody(self) -> dist.ProcessGroup:
        """All ranks that work on the model: those of the mesh."""
        return self.groups.everybody

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return dist.get_rank(self.everybody) == 0

    @property
    def dp_rank(self) -> int:
        """This process's rank among those that hold the same part of the model and work on other data."""
        return dist.get_rank(self.groups.dp) if self.groups.dp is not None else 0

    @property
    def dp_size(self) -> int:
        """The number of ranks that hold the same part of the model and work on other data."""
        return dist.get_world_size(self.groups.dp) if self.groups.dp is not None else 1


OBJECTIVES = ("prefill", "decode", "training")
DATA_PARALLEL = ("replicate", "shard")


@dataclass
class Config:
    """Options that do not change at run time.

    Attributes:
        lint_and_recompile: Lint and recompile the graph after every pass.
        clean_markers_after_all_passes: Remove the analysis results from ``node.meta`` when the pipeline is done.
        weight_init_fn: Initializes weights that no checkpoint provides; called as ``weight_init_fn(tensor)``.
        enable_sequence_parallel: Shard the regions between parallel layers on the sequence; ``"auto"`` does so where it
            is the cheaper way.
        machine: What the ranks run on, for the costs: a preset ("h100", "h200", "a100", "pcie", "nodes", "cpu"), a file
            that ``paraxis calibrate`` wrote, or a :class:`paraxis.Machine`.
        objective: What the plan is to be cheap for: ``"prefill"``, ``"decode"`` or ``"training"``; by default one
            forward pass of the example inputs. Example inputs that are not given are made up accordingly.
        constraints: Wishes about parameters: ``{"*.mlp.down_proj": "row", "lm_head": "not whole"}``.
        memory_limit: Bytes that the parameters of a rank may take. Parameters are then kept whole where that is faster
            and there is room; without a limit they are split wherever they can be.
        compile: How a rank's local program runs: as it is (``None``) or compiled (``"inductor"``).
        mode: Inductor's mode: ``"default"``, ``"reduce-overhead"`` (CUDA graphs), ``"max-autotune"``, ...
        gather_outputs: Whether tensors returned to the caller are made whole.
        data_parallel: What the ranks of the mesh's dimension ``dp`` keep: ``"replicate"`` (the default), each all of
            its tensor-parallel shards, gradients being averaged; or ``"shard"``, a part of them, of the gradients and
            of the optimizer's state each, gathered when they are used.
        init_seed: Seed of the initialization of weights; ``None`` takes torch's current seed of the first rank.
        show_progress: Show what is going on, and a bar while weights are loaded, on the first rank.
        check_finite: Look for NaN and infinity in the weights that are loaded, and warn of them by name.
        plan: A plan to run by instead of making one: a :class:`paraxis.Plan` or a file with one.
        keep_plans: Keep the plans of transformers' models on the disk, for the next time (:mod:`paraxis.kept`).
        plan_by_blocks: Plan a deep model by its first blocks where the others are like them.
        pipeline: The passes to run; by default those of ``build_parallel_pass_pipeline()``.
        sync_timeout: Seconds the ranks wait for one another before a compilation is given up as diverged.
    """

    lint_and_recompile: bool = True
    clean_markers_after_all_passes: bool = True
    weight_init_fn: Callable[..., Any] = partial(nn.init.normal_, std=0.02)  # noqa: RUF009 -- immutable
    enable_sequence_parallel: bool | Literal["auto"] = False
    machine: str | os.PathLike[str] | Machine | None = None
    objective: str | None = None
    constraints: Mapping[str, str | Sequence[str]] | None = None
    memory_limit: int | None = None
    compile: str | None = None
    mode: str | None = None
    gather_outputs: bool = True
    data_parallel: str | None = None
    init_seed: int | None = None
    show_progress: bool = True
    check_finite: bool = False
    plan: Plan | str | os.PathLike[str] | None = None
    keep_plans: bool = True
    plan_by_blocks: bool = True
    pipeline: PassPipeline | None = None
    sync_timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.data_parallel not in (None, *DATA_PARALLEL):
            known = " or ".join(map(repr, DATA_PARALLEL))
            raise ValueError(f"data_parallel={self.data_parallel!r} is not known: use {known}")
        if self.objective not in (None, *OBJECTIVES):
            raise ValueError(f"objective={self.objective!r} is not known: use one of {', '.join(OBJECTIVES)}")
        if self.compile not in (None, "inductor"):
            raise ValueError(f"compile={self.compile!r} is not known: leave it out, or use compile='inductor'")
        if self.mode is not None and self.compile is None:
            raise ValueError(f"mode={self.mode!r} is a mode of the compiler: use it with compile='inductor'")
