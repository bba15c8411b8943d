"""Refusing sizes that cannot be split evenly, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from ..placement import Replicate, Shard, ensure_divisibility
from ..rules import Call
from ..solver import Candidates, Program, Solution, Step, Value


def check_divisibility(program: Program, solution: Solution, candidates: Candidates, names: Mapping[Node, str]) -> None:
    """Raise if a matrix had to stay whole, or to be split where it costs a collective, only because of its sizes."""
    fixed = set(program.placements)
    for step in program.steps:
        call = step.call
        if call is None:
            continue
        for i, value in enumerate(step.inputs):
            if value in program.parameters and value not in fixed and call.inputs[i].ndim >= 2:
                dim = _used_dim(call, i, solution, step, value)
                if dim is not None and not _is_small_head(step, call, program):
                    _refuse(value, dim, call.inputs[i].shape, candidates, program.world, names)


SMALL = 64


def _is_small_head(step: Step, call: Call, program: Program) -> bool:
    """Whether this is a layer with few outputs that no other layer reads: not worth refusing a model for."""
    features = call.out.shape[-1]
    if not isinstance(features, int) or features >= SMALL:
        return False
    derived = set(step.outputs)
    for later in program.steps[program.steps.index(step) + 1 :]:
        if later.call is None or not derived & set(later.inputs):
            continue
        if any(v in program.parameters and t.ndim > 1 for v, t in zip(later.inputs, later.call.inputs, strict=True)):
            return False
        derived |= set(later.outputs)
    return True


def _used_dim(call: Call, i: int, solution: Solution, step: Step, value: Value) -> int | None:
    """The dimension on which the parameter should have been split, if it was not."""
    strategy = solution.strategies[step]
    rows = {"aten::linear": (1, 0), "aten::addmm": (2, 1), "aten::embedding": (0, 0)}.get(call.target._schema.name)
    if rows is None or rows[0] != i:
        return None
    kept = solution.parameters[value]
    whole = isinstance(kept, Replicate)
    if call.target._schema.name == "aten::embedding":
        return 0 if whole else None
    if isinstance(kept, Shard) and strategy.kind == "column" and not kept.dims[rows[1]].is_even:
        return rows[1]  # tied to a table that did not mind
    data = step.inputs[1 if call.target._schema.name == "aten::addmm" else 0]
    sliced = strategy.kind == "row" and not isinstance(_produced(data, solution), Shard)
    return rows[1] if whole or sliced else None


def _produced(value: Value, solution: Solution) -> object:
    for step, strategy in solution.strategies.items():
        if value in step.outputs:
            return strategy.outputs[step.outputs.index(value)]
    return None


def _refuse(
    value: Value,
    dim: int,
    shape: tuple[int, ...],
    candidates: Candidates,
    world: int,
    names: Mapping[Node, str],
) -> None:
    obstacle = candidates.obstacle(value, dim, shape[dim])
    if obstacle is None or obstacle.size < world:
        return
    name = names[value.node]
    made = f" = {obstacle.count} × {obstacle.unit}" if obstacle.unit > 1 else ""
    ensure_divisibility(obstacle.count, world, name.removesuffix(".weight"), f"dimension {dim} ({shape[dim]}{made})")
