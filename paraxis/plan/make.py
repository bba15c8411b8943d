"""Making the plan: of a model that is about to run, or from a configuration alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..capture import CaptureError, GraphBreak, capture
from ..capture.dummy_inputs import SIZES, example_call
from ..capture.repeated_blocks import Repeated, find_repeated, only_first
from ..capture.trace import gc_paused, install_output_hooks
from ..config import Config
from ..context import ParallelExecutionCtx
from ..distributed.consensus import all_gather_object, on_all_ranks, rank0_only
from ..passes import without_loading
from ..passes.repeated_blocks import copies, own, spread
from ..passes.replace import finish_plan
from ..passes.solve import RESULT, Solved
from ..runtime.backend import CompiledCall, plan_in_pieces, run_pipeline
from ..solver.constraints import check_names, parse
from ..utils.progress import stage
from ..weights.materialize import materialize_parameters
from ..weights.meta_init import tied_names
from .apply import place, use_plan
from .cache import described, fingerprint, keep, recall
from .memory import Kinds, Sizes, growth, kept_tensors, memory_of, resized
from .plan import Plan

if TYPE_CHECKING:
    from .activations import Used

LONGER = 8
"""How many times as long as the planned program the one may be whose memory is counted: models that go through a prompt
token by token have programs that nobody wants to wait for."""

PATIENCE = 600.0
"""Seconds that ranks wait for the first one to plan a model for them."""

Graph = tuple[Any, list[Any]]


def make_plan(call: CompiledCall, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> None:
    """Find the plan of a model and load its weights, all ranks together.

    With ``config.plan``, or a plan that was kept from an earlier run, there is nothing to capture or to solve.
    """
    ctx.aliases = tied_names(call.module)
    if config.plan is not None:
        use_plan(config.plan, ctx)
    else:
        key = fingerprint(call.module, ctx, config, examples) if ctx.is_first else None
        if not recall(key, ctx):
            if not _first_for_all(call, ctx, config, examples):
                find_plan(call, ctx, config, examples)
            keep(key, ctx)
    materialize_parameters(ctx, config)


def _first_for_all(call: CompiledCall, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> bool:
    """Let the first rank plan the model, and the others take its plan over; False, on all ranks, if that cannot be.

    Planning uses one core, and ranks often have to share theirs. It has to be the same model for all of them, which can
    be told of transformers' own. One that has to be run to be planned takes all ranks, and so does one that cannot be
    planned: each says why.
    """
    mine = described(call.module, ctx, config, examples, code=False)
    answers = all_gather_object(ctx.world_group, mine, "planning the model")
    if mine is None or len(answers) == 1 or set(answers) != {mine}:
        return False
    data = None
    if ctx.is_first:
        try:
            with rank0_only():
                find_plan(call, ctx, config, examples, load=False)
            assert ctx.plan is not None
            data = ctx.plan.to_json()
        except Exception:  # it is met again by all
            ctx.plan = None
            _forget_places(ctx)
    data = all_gather_object(ctx.world_group, data, "planning the model", max(config.sync_timeout, PATIENCE))[0]
    if data is not None and not ctx.is_first:
        place(Plan.from_json(data), ctx)
    return data is not None


def _forget_places(ctx: ParallelExecutionCtx) -> None:
    """Begin again with parameters that have no place."""
    ctx.parallel_layer_cache.clear()
    for parameter in ctx.param_cache.values():
        spec: Any = getattr(parameter, "_spec", None)
        if spec is not None:
            spec.placement, spec.group, spec.is_modified_meta, spec.is_parallel = None, ctx.tp_group, False, False


def find_plan(
    call: CompiledCall, ctx: ParallelExecutionCtx, config: Config, examples: Any, load: bool = True
) -> tuple[Solved | None, list[Repeated]]:
    """Capture the model and search for its plan; without ``load``, read no weights.

    A deep model is planned by its first blocks where the others are like them. One that cannot be captured as one graph
    is planned by running it: each of its graphs is solved, and its parameters are loaded, when it is met.

    Returns the solution of the model's graph, if it is one, and the blocks that were left out of it.
    """
    ctx.aliases = tied_names(call.module)
    install_output_hooks(call.module)  # on all blocks, not only on those that are captured now
    args, kwargs = example_call(call.module, examples, ctx.current_device, config.objective)
    check_names(parse(config.constraints), {name: ctx.aliases.get(name, [name]) for name in ctx.param_cache})
    if not load:
        config = without_loading(config)
    obstacle, shown = "", config.show_progress and ctx.rank == 0
    with ctx.timed("capture"), stage("Capturing the model", shown):
        graph, repeated = _first_blocks(call.module, args, kwargs, ctx, config)
        if graph is None:
            graph, obstacle = _whole_model(call.module, args, kwargs, ctx, config)
    if graph is None and not load:
        raise CaptureError(f"{obstacle}. Such a model is planned by running it: give parallelize_model its weights.")
    ctx.planning = True
    ctx.repeats = copies(repeated, ctx.param_cache)
    try:
        with torch.no_grad(), gc_paused(), stage("Searching for a plan", shown):
            if graph is None:
                plan_in_pieces(call, args, kwargs, ctx, obstacle)
            else:
                run_pipeline(*graph, ctx, config)
    finally:
        ctx.planning = False
    if graph is not None:
        spread(ctx, repeated, graph[0].meta[RESULT])
    finish_plan(ctx)
    return (graph[0].meta[RESULT] if graph is not None else None), repeated


def _first_blocks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, config: Config
) -> tuple[Graph | None, list[Repeated]]:
    """The graph of a deep model without the blocks that are like others, and these; None if there is none."""
    repeated = find_repeated(model) if config.plan_by_blocks else []
    if not _wanted_alike(repeated, config, ctx):
        repeated = []
    graphs: list[Graph] = []
    failed = "" if repeated else "no blocks"
    try:
        with torch.no_grad(), only_first(model, repeated):
            if repeated:
                capture(model, args, kwargs, lambda graph, inputs: graphs.append((graph, inputs)))
    except Exception as error:  # the forward counts on all its blocks, or cannot be captured at all
        failed = f"{type(error).__name__}: {error}"
    if any(all_gather_object(ctx.world_group, failed, "capturing the first blocks", config.sync_timeout)):
        return None, []
    return graphs[0], repeated


def _wanted_alike(repeated: list[Repeated], config: Config, ctx: ParallelExecutionCtx) -> bool:
    """Whether the constraints ask the same of every block as of the one it is like."""
    return all(
        wish.matches([name]) == wish.matches([each.renamed(name, index)])
        for wish in parse(config.constraints)
        for each in repeated
        for index in each.like
        for name in own(each, each.like[index], ctx.param_cache)
    )


def _whole_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: ParallelExecutionCtx, config: Config
) -> tuple[Graph | None, str]:
    """The graph of the model, or what stands in the way of capturing it as one."""
    graphs: list[Graph] = []
    obstacle = None
    with on_all_ranks(ctx.world_group, "capturing the model", config.sync_timeout), torch.no_grad():
        try:
            capture(model, args, kwargs, lambda graph, inputs: graphs.append((graph, inputs)))
        except GraphBreak as error:
            obstacle = str(error)
    obstacles = [
        x for x in all_gather_object(ctx.world_group, obstacle, "capturing the model", config.sync_timeout) if x
    ]
    return (None, obstacles[0]) if obstacles else (graphs[0], "")


# -- without ranks, weights or devices ---------------------------------------------------------------------------


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
        batch, context: Sequences and tokens that the memory of a cache is given for; without a context it is not.
        train: Whether the memory is that of training.
        kwargs: As for :func:`paraxis.parallelize_model`.
    """
    with plan_offline(model, tp_size, torch_dtype, kwargs, Sizes(batch, context, train)) as planned:
        return planned.plan


@dataclass
class Planned:
    """A plan that was made without ranks, with all that it came from."""

    plan: Plan
    ctx: ParallelExecutionCtx
    config: Config
    solved: Solved
    repeated: list[Repeated]


@contextmanager
def plan_offline(
    model: Any, tp_size: int, torch_dtype: Any, kwargs: dict[str, Any], sizes: Sizes | None = None, rank: int = 0
) -> Iterator[Planned]:
    """Plan a model over ranks that do not exist; they are there as long as the context is open.

    With ``sizes`` the plan says what memory it takes.
    """
    from .. import api

    config, kwargs = api.split_config(kwargs)
    examples = kwargs.pop("example_inputs", None)
    if config.plan is not None:
        raise ValueError("plan= is for running by a plan; leave it out to make one")
    with simulated_group(tp_size, rank) as group:
        ctx = ParallelExecutionCtx(tp_group=group, current_device=torch.device("cpu"))
        if not isinstance(model, nn.Module):
            with ctx.timed("build"):
                model = api.build_on_meta(model, torch_dtype, kwargs)
        parallelized = api.attach(model, ctx, None)
        solved, repeated = find_plan(CompiledCall(parallelized, ctx, config), ctx, config, examples, load=False)
        assert ctx.plan is not None and solved is not None
        if sizes is not None:
            with ctx.timed("memory"):
                used, kinds = _used(parallelized, examples, sizes, ctx, config, repeated)
            ctx.plan.memory = memory_of(ctx.plan, ctx.param_cache, parallelized, solved, used, kinds, sizes)
        ctx.plan.timings = dict(ctx.timings)
        yield Planned(ctx.plan, ctx, config, solved, repeated)


def _used(
    model: nn.Module, examples: Any, sizes: Sizes, ctx: ParallelExecutionCtx, config: Config, repeated: list[Repeated]
) -> tuple[Used | str, Kinds | str]:
    """What a rank's program makes when it runs or, where that cannot be counted, what the model keeps between calls;
    texts where neither is known."""
    if sizes.context is None:
        return "", ""
    _, planned = example_call(model, examples, torch.device("cpu"), config.objective)
    ids = planned.get("input_ids")  # some models take several rows for each sequence
    each = len(ids) // SIZES[config.objective][0] if examples is None and ids is not None else 1
    inputs = resized(planned, sizes.batch * each, sizes.context)
    if isinstance(inputs, str):
        return inputs, inputs
    from .activations import as_called, count

    with only_first(model, repeated):
        longer = growth(model, planned, inputs)
    if longer > LONGER:
        used: Used | str = f"it takes {longer:.0f} times as many operators for so many tokens, too many to look at"
    else:
        used = count(model, as_called(model, inputs, sizes.train), sizes.train, ctx, config, repeated)
    return used, kept_tensors(model, planned, inputs) if isinstance(used, str) and not sizes.train else ""


@contextmanager
def simulated_group(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A process group of which only this process exists, as one of its ranks."""
    if dist.is_initialized():
        raise RuntimeError(
            "plan_model imagines ranks of its own, but torch.distributed is initialized: call it before "
            "init_process_group, or use the plan of parallelize_model (ctx.plan)."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
