"""The options of ``parallelize_model`` and ``plan_model``; they do not change at run time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

if TYPE_CHECKING:
    from .passes.base import PassPipeline
    from .plan import Plan
    from .solver import Machine

OBJECTIVES = ("prefill", "decode", "training")
AUTO = "auto"
"""For ``Config.compile``: what is fastest on the device."""
DATA_PARALLEL = ("replicate", "shard")

RENAMED = {"keep_plans": "cache_plans"}
"""Former names of options. They work until the next version, with a ``DeprecationWarning``."""

_Class = TypeVar("_Class", bound=type)


def _accept_former_names(cls: _Class) -> _Class:
    """Let a dataclass take the former names of its fields as keywords."""
    target: Any = cls  # mypy has no type for a class whose constructor is replaced
    init = target.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for old in RENAMED.keys() & kwargs.keys():
            warnings.warn(f"{old}= is deprecated: use {RENAMED[old]}=", DeprecationWarning, stacklevel=2)
            kwargs[RENAMED[old]] = kwargs.pop(old)
        init(self, *args, **kwargs)

    target.__init__ = __init__
    return cls


@_accept_former_names
@dataclass
class Config:
    """Options of a parallelized model.

    Attributes:
        lint_and_recompile: Lint and recompile the graph after every pass that changes it.
        clean_markers_after_all_passes: Remove the analysis results from ``node.meta`` when the pipeline is done.
        weight_init_fn: Initializes weights that no checkpoint provides; called as ``weight_init_fn(tensor)``.
        enable_sequence_parallel: Sequence parallelism: shard the activations between parallel layers on the sequence
            dimension. ``"auto"`` does so where the cost model finds it faster.
        machine: The hardware that the cost model assumes: a preset ("h100", "h200", "a100", "pcie", "nodes", "cpu"), a
            file written by ``paraxis calibrate``, or a :class:`paraxis.Machine`.
        objective: The workload to minimize the cost of: ``"prefill"``, ``"decode"`` or ``"training"``; by default one
            forward pass on the example inputs. Dummy inputs, where there are no example inputs, have its sizes.
        constraints: Placements to require or forbid, by parameter or module name (patterns allowed):
            ``{"*.mlp.down_proj": "row", "lm_head": "sharded"}``.
        memory_limit: Bytes that the parameters of one rank may take. Below the limit, parameters stay replicated where
            that is faster; without a limit every parameter that can be sharded is.
        compile: Runs each rank's local program: ``"auto"`` as is fastest on the device (on a GPU through TorchInductor
            with CUDA graphs, unless gradients are computed; on the CPU without a compiler, on kernels of our own),
            ``None`` without a compiler, ``"inductor"`` through TorchInductor.
        mode: Inductor's mode: ``"default"``, ``"reduce-overhead"`` (CUDA graphs), ``"max-autotune"``, ...
        gather_outputs: All-gather tensors that the model returns; otherwise they stay sharded.
        data_parallel: What the ranks of the mesh's ``dp`` dimension hold: ``"replicate"`` (DDP, the default): a replica
            of the tensor-parallel shards, gradients are all-reduced; ``"shard"`` (FSDP): a shard of parameters,
            gradients and optimizer state, unsharded for use.
        init_seed: Seed for initializing weights; ``None`` takes rank 0's current torch seed.
        show_progress: Show the current step, and a progress bar while weights load, on rank 0.
        check_finite: Check loaded weights for NaN and infinity, and warn with their names.
        plan: A plan to use instead of searching for one: a :class:`paraxis.Plan` or a file written by ``Plan.save``.
        cache_plans: Cache the plans of transformers models on disk for later runs (:mod:`paraxis.plan.cache`).
        plan_by_blocks: Plan a deep model from its first blocks, if the other blocks repeat them.
        pipeline: The passes to run; by default those of ``build_parallel_pass_pipeline()``.
        sync_timeout: Seconds that a rank waits for another one that is not in the same call (planning, loading,
            compiling, ``generate``, saving) before it raises. Collectives of a forward wait as long as the process
            group says.
        check_ranks: Compare the inputs of every call, and the replicated parameters when they are saved, between the
            ranks, and raise if they differ.
    """

    lint_and_recompile: bool = True
    clean_markers_after_all_passes: bool = True
    weight_init_fn: Callable[..., Any] = partial(nn.init.normal_, std=0.02)  # noqa: RUF009 -- immutable
    enable_sequence_parallel: bool | Literal["auto"] = False
    machine: str | os.PathLike[str] | Machine | None = None
    objective: str | None = None
    constraints: Mapping[str, str | Sequence[str]] | None = None
    memory_limit: int | None = None
    compile: str | None = "auto"
    mode: str | None = None
    gather_outputs: bool = True
    data_parallel: str | None = None
    init_seed: int | None = None
    show_progress: bool = True
    check_finite: bool = False
    plan: Plan | str | os.PathLike[str] | None = None
    cache_plans: bool = True
    plan_by_blocks: bool = True
    pipeline: PassPipeline | None = None
    sync_timeout: float = 120.0
    check_ranks: bool = True

    def __post_init__(self) -> None:
        if self.data_parallel not in (None, *DATA_PARALLEL):
            known = " or ".join(map(repr, DATA_PARALLEL))
            raise ValueError(f"unknown data_parallel={self.data_parallel!r}: use {known}")
        if self.objective not in (None, *OBJECTIVES):
            raise ValueError(f"unknown objective={self.objective!r}: use one of {', '.join(OBJECTIVES)}")
        if self.compile not in (None, AUTO, "inductor"):
            raise ValueError(f"unknown compile={self.compile!r}: leave it out, or use None or 'inductor'")
        if self.mode is not None and self.compile != "inductor":
            raise ValueError(f"mode={self.mode!r} needs compile='inductor'")

    @property
    def keep_plans(self) -> bool:
        """The former name of :attr:`cache_plans`."""
        warnings.warn("Config.keep_plans is deprecated: use cache_plans", DeprecationWarning, stacklevel=2)
        return self.cache_plans


def names_of_config() -> set[str]:
    """The names of the options that :class:`Config` takes."""
    return {*(f.name for f in fields(Config)), *RENAMED}


def split_config(kwargs: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The fields of :class:`Config` among keyword arguments, and the others."""
    names = names_of_config()
    config = Config(**{k: v for k, v in kwargs.items() if k in names})
    return config, {k: v for k, v in kwargs.items() if k not in names}
