"""Planning without ranks, weights or devices: from a configuration alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from ..capture.dummy_inputs import SIZES, example_call, text_call
from ..capture.repeated_blocks import Repeated, without_repeats
from ..compat.distributed import simulated_store
from ..config import Config, split_config
from ..context import ParallelExecutionCtx
from ..errors import CaptureError
from ..passes.base import PassBase
from ..passes.build import build_program
from ..passes.pipeline import build_parallel_pass_pipeline
from ..passes.solve import Solved
from ..utils.memory import gc_paused
from ..weights.build import attach, build_on_meta, quantize_by_configuration
from .activations import Usage, call_inputs, measure_usage
from .apply import apply_plan
from .make import NotOneGraph, Searched, search_plan
from .memory import CacheTensors, Sizes, measure_cache, memory_of, operator_ratio, resize_inputs
from .plan import Plan

LOCAL_PROGRAM = "merge_all_reduces"
"""The pass after which a program is the one that the plan describes, before optimizations for a device."""

MAX_OPERATOR_RATIO = 8
"""How many times as long as the planned program the one may be whose memory is counted: models that process a prompt
token by token have programs that nobody wants to wait for."""


@gc_paused()
def plan_model(
    model: str | os.PathLike[str] | Any,
    tp_size: int,
    *,
    torch_dtype: Any = None,
    batch: int = 1,
    context: int | None = None,
    train: bool = False,
    **kwargs: Any,
) -> Plan:
    """The plan of a model over ``tp_size`` ranks, without any: no weights, no process group, no GPU.

    Args:
        model: A Hub id, a directory with a ``config.json``, a transformers configuration, or a module.
        tp_size: The number of ranks.
        torch_dtype: Dtype of the parameters; by default what the config says.
        batch, context: Sequences and tokens to compute the memory of KV cache and activations for; without a context
            these are left out.
        train: Whether the memory is that of training.
        kwargs: As for :func:`paraxis.parallelize_model`.
    """
    with plan_offline(model, tp_size, torch_dtype, kwargs, Sizes(batch, context, train)) as planned:
        return planned.plan


@dataclass
class Planned:
    """A plan that was made without ranks, with all that it came from, for those who explain, print or draw it."""

    plan: Plan
    ctx: ParallelExecutionCtx
    config: Config
    searched: Searched

    @property
    def solved(self) -> Solved:
        """The solution of the graph that was planned."""
        return self.searched.solved

    @property
    def repeated(self) -> list[Repeated]:
        """The blocks that were left out of the graph because they repeat others."""
        return self.searched.repeated

    def program(self, after: str = LOCAL_PROGRAM) -> GraphModule:
        """The program of the simulated rank after a pass: the local program, unless asked otherwise.

        Raises:
            ValueError: there is no such pass, or it does not apply to this program.
        """
        pipeline = self.config.pipeline or build_parallel_pass_pipeline()
        pipeline.index(after)
        found: list[GraphModule] = []
        ran: list[str] = []

        def observe(step: PassBase, program: GraphModule) -> None:
            ran.append(step.title)
            if step.title == after:
                found.append(program)
                raise _Reached

        config = replace(self.config, pipeline=pipeline)
        try:
            with torch.no_grad(), gc_paused():
                build_program(self.searched.captured, self.searched.inputs, self.ctx, config, observe)
        except _Reached:
            return found[0]
        if after == LOCAL_PROGRAM:  # a single rank has none
            assert self.ctx.last_optimized_graph_module is not None
            return self.ctx.last_optimized_graph_module
        raise ValueError(f"the pass {after!r} does not apply to this program; these do: {', '.join(ran)}")


class _Reached(Exception):
    """The pass after which the program was asked for has run."""


@contextmanager
def plan_offline(
    model: Any, tp_size: int, torch_dtype: Any, kwargs: dict[str, Any], sizes: Sizes | None = None, rank: int = 0
) -> Iterator[Planned]:
    """Plan a model over simulated ranks; they exist as long as the context is open.

    With ``sizes`` the plan says what memory it takes.
    """
    config, kwargs = split_config(kwargs)
    examples = kwargs.pop("example_inputs", None)
    if config.plan is not None:
        raise ValueError("plan= is for running by a plan; leave it out to make one")
    with simulated_group(tp_size, rank) as group:
        ctx = ParallelExecutionCtx(tp_group=group, current_device=torch.device("cpu"))
        ctx.state.simulated = True
        if not isinstance(model, nn.Module):
            with ctx.timed("build"):
                model = build_on_meta(model, torch_dtype, kwargs)
        attach(model, ctx)
        quantize_by_configuration(model, ctx, known_only=True)
        searched = search_plan(model, ctx, config, examples)
        if isinstance(searched, NotOneGraph):
            raise CaptureError(
                f"{searched.reason}. Such a model is planned by running it: call parallelize_model, with its weights."
            )
        apply_plan(searched.plan, ctx)
        memory = None
        if sizes is not None:
            with ctx.timed("memory"):
                usage, tensors = _measure(model, examples, sizes, ctx, config, searched.repeated)
            memory = memory_of(searched.plan, ctx.param_cache, model, searched.solved, usage, tensors, sizes)
        assert ctx.plan is not None
        ctx.plan = replace(
            ctx.plan, memory=memory, timings=dict(ctx.timings), pass_timings=dict(ctx.state.pass_seconds)
        )
        yield Planned(ctx.plan, ctx, config, searched)


def _measure(
    model: nn.Module, examples: Any, sizes: Sizes, ctx: ParallelExecutionCtx, config: Config, repeated: list[Repeated]
) -> tuple[Usage | str, CacheTensors | str]:
    """The memory that a rank's program allocates when it runs or, where that cannot be measured, the tensors of the
    model's KV cache; texts where neither is known."""
    if sizes.context is None:
        return "", ""
    device = torch.device("cpu")
    if examples is None:  # the memory is that of a context of text
        planned = text_call(model, device, config.objective)
    else:
        _, planned = example_call(model, examples, device, config.objective)
    ids = planned.get("input_ids")  # some models take several rows for each sequence
    each = len(ids) // SIZES[config.objective][0] if examples is None and ids is not None else 1
    inputs = resize_inputs(planned, sizes.batch * each, sizes.context)
    if isinstance(inputs, str):
        return inputs, inputs
    with without_repeats(model, repeated):
        ratio = operator_ratio(model, planned, inputs)
    if ratio > MAX_OPERATOR_RATIO:
        usage: Usage | str = f"it takes {ratio:.0f} times as many operators for so many tokens, too many to simulate"
    else:
        usage = measure_usage(model, call_inputs(model, inputs, sizes.train), sizes.train, ctx, config, repeated)
    return usage, measure_cache(model, planned, inputs) if isinstance(usage, str) and not sizes.train else ""


@contextmanager
def simulated_group(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A process group of which only this process exists, as one of its ranks."""
    if dist.is_initialized():
        raise RuntimeError(
            "plan_model simulates ranks of its own, but torch.distributed is initialized: call it before "
            "init_process_group, or use the plan of parallelize_model (ctx.plan)."
        )
    dist.init_process_group("fake", rank=rank, world_size=size, store=simulated_store())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
