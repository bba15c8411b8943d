"""Replacing: from the solution to the local program of this rank."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.nodes import captured_module_of
from ..placement import REPLICATE, Layout, Partial, Placement, Replicate, Shard, local_shape
from ..plan import LayerPlan, Plan
from ..rules import rule_for
from ..solver import Value
from ..tensor.sharded_tensor import ShardedTensor
from .annotate import OWN, ParallelLayerAnnotatePass
from .base import PassBase
from .layers import Layer, find_layers
from .partition import Partitioner
from .solve import RESULT, Solved


class ParallelLayerReplacePass(PassBase):
    """Rewrite the captured global program into the one this rank runs.

    Linears, embeddings and the loss become parallel layers, every edge whose placements differ a redistribution, and
    sizes written into the program (a number of heads in a view) become local. The first time, the parameters get their
    placements, and the plan is written down; later captures find both fixed. Layers come from
    ``ctx.parallel_layer_cache``, so no parameter is ever made twice.
    """

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        solved: Solved | None = graph_module.meta.get(RESULT)
        if solved is None:
            raise RuntimeError("ParallelLayerReplacePass needs a solution: run ParallelAxisSolverPass first")
        self._place_parameters(solved, ctx)
        with ctx.timed("rewrite"):
            partitioner = Partitioner(solved, ctx, grad=torch.is_grad_enabled())
            local = partitioner.run()
        if ctx.plan is None or ctx.planning:
            ctx.plan = ctx.plan or Plan(ctx.world_size)
            extend_plan(ctx.plan, solved, partitioner)
            if not ctx.planning:
                finish_plan(ctx)
        return local

    def _place_parameters(self, solved: Solved, ctx: ParallelExecutionCtx) -> None:
        for node, parameter in solved.parameters.items():
            meta = parameter.meta
            if meta is None or meta.placement is not None:
                continue
            placement = solved.solution.parameters.get(Value(node), REPLICATE)
            if isinstance(placement, Partial) or (isinstance(placement, Shard) and not placement.layouts):
                placement = REPLICATE
            meta.placement, meta.group, meta.is_modified_meta = placement, ctx.tp_group, True
            meta.is_parallel = isinstance(placement, Shard)
            if isinstance(placement, Shard):
                meta.dim = placement.layouts[0][0]
        for value in ctx.example_inputs or []:
            if isinstance(value, ShardedTensor) and getattr(value._spec, "name", None):
                ctx.param_cache.setdefault(value._spec.name, value)  # type: ignore[union-attr,arg-type]


def extend_plan(plan: Plan, solved: Solved, partitioner: Partitioner) -> None:
    """Write the solution of a graph down in terms of the model; the same on every rank, with shapes of the first."""
    plan.cost += solved.solution.cost
    plan.seconds += solved.account.seconds
    plan.communication += solved.account.communication
    plan.optimal &= solved.solution.optimal
    used = {p.name: Value(node) for node, p in solved.parameters.items()}
    for node, parameter in solved.parameters.items():
        name, shape = parameter.name, parameter.shape
        if name in plan.parameters:
            continue  # an earlier graph has placed it
        placement = solved.solution.parameters.get(Value(node), REPLICATE)
        whole = not isinstance(placement, Shard) or not placement.layouts
        plan.add_parameter(name, REPLICATE if whole else placement, shape, rank=0)
        if whole:
            plan.replicated.append((name, _reason(name, shape, used, solved)))
    plan.collectives += partitioner.collectives
    plan.layers += [_layer_plan(layer, solved) for layer in find_layers(solved)]
    plan.gathered += _gathered(solved)


def finish_plan(ctx: ParallelExecutionCtx) -> None:
    """Place the parameters that no planned graph uses."""
    place_unused(ctx, set(map(id, ctx.param_cache.values())))


def place_unused(ctx: ParallelExecutionCtx, which: set[int]) -> None:
    """Place those of these parameters (by id) that no graph has placed: split for memory, where sizes allow it."""
    assert ctx.plan is not None
    for name, parameter in ctx.param_cache.items():
        spec = getattr(parameter, "_spec", None)
        if id(parameter) not in which or spec is None or spec.placement is not None:
            continue
        spec.placement = _spread(tuple(parameter.shape), ctx.world_size)
        spec.group, spec.is_modified_meta = ctx.tp_group, True
        spec.is_parallel = isinstance(spec.placement, Shard)
        ctx.plan.add_parameter(name, spec.placement, tuple(parameter.shape), rank=0)
        ctx.plan.unplanned.append(name)
        if not spec.is_parallel:
            ctx.plan.replicated.append((name, "not used by a graph that was planned, and too small to split"))


def _spread(shape: tuple[int, ...], world: int) -> Placement:
    """A matrix split on a dimension that divides, or else on a long one; a vector whole."""
    if len(shape) < 2 or world == 1:
        return REPLICATE
    divisible = [d for d, n in enumerate(shape) if n and n % world == 0]
    dims = divisible or [d for d, n in enumerate(shape) if n > world]
    return Shard.of(dims[0], Layout.even(shape[dims[0]], world)) if dims else REPLICATE


def _layer_plan(layer: Layer, solved: Solved) -> LayerPlan:
    found = layer.step.node.meta.get(OWN, {})
    fields = {name: found.get(name) for name in ParallelLayerAnnotatePass.FIELDS}
    if layer.weight is None:
        call = layer.step.call
        assert call is not None
        shape = tuple(n if isinstance(n, int) else -1 for n in call.inputs[0].shape)
        placement = layer.strategy.inputs[0]
        name = captured_module_of(layer.step.node) or layer.kind
    else:
        parameter = solved.parameters[layer.weight]
        shape, name = parameter.shape, parameter.name.rpartition(".")[0]
        if parameter.meta is not None and parameter.meta.is_tied:
            name = (
                captured_module_of(layer.step.node) or name
            )  # the weight has several owners; this is the one that uses it
        placement = solved.solution.parameters[Value(layer.weight)]
    return LayerPlan(
        name=name,
        kind=layer.kind,
        axis=fields["axis"],
        gather_output=bool(fields["gather_output"]),
        input_is_parallel=bool(fields["input_is_parallel"]),
        sequence_parallel=bool(fields["sequence_parallel"]),
        global_shape=shape,
        local_shape=local_shape(placement, shape, 0),
    )


def _reason(name: str, shape: tuple[int, ...], used: dict[str, Value], solved: Solved) -> str:
    """Why a parameter stays whole."""
    if len(shape) < 2:
        return "a vector, used with whole activations: splitting it saves little and would cost a collective"
    value = used[name]
    users = [step for step in solved.program.steps if value in step.inputs and step.call is not None]
    for step in users:
        if step.call is not None and rule_for(step.call.target) is None:
            return f"no rule for {step.call.target} on a sharded tensor"
    for dim, size in enumerate(shape):
        structure = solved.candidates.structures(value, dim, size)[0]
        if all(n == unit for n, unit in structure) and solved.program.world > 1:
            parts = " + ".join(str(n) for n, _ in structure)
            return f"dimension {dim} is used in whole units of {parts}, which cannot be split"
    return "every way to split it costs more"


def _gathered(solved: Solved) -> list[tuple[str, str]]:
    """Where a tensor that was sharded had to be made whole because nothing is known of the operator."""
    notes = []
    produced = {
        value: placement
        for step, strategy in solved.solution.strategies.items()
        for value, placement in zip(step.outputs, strategy.outputs, strict=True)
    }
    for step in solved.solution.strategies:
        if step.call is None or (rule_for(step.call.target) is not None and not step.impure):
            continue
        taken = [produced.get(v, REPLICATE) for v in step.inputs]
        if any(not isinstance(p, Replicate) for p in taken):
            why = "writes into memory that others see" if step.impure else "no rule"
            notes.append(
                (captured_module_of(step.node), f"{step.call.target} on a sharded tensor: {why}, computed whole")
            )
    return notes
