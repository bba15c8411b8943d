"""The options of a parallelization, which do not change at run time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

if TYPE_CHECKING:
    from .passes.base import PassPipeline
    from .plan import Plan
    from .solver import Machine

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
        constraints: Constraints about parameters: ``{"*.mlp.down_proj": "row", "lm_head": "not whole"}``.
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
        keep_plans: Keep the plans of transformers' models on the disk, for the next time (:mod:`paraxis.plan.cache`).
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
