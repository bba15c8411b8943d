"""From the local program of a rank to the steps that a picture shows.

A step is a layer, a collective, or the operators of one module that run between them. Operators that only rearrange a
tensor belong to the step that made it. Steps of one block of the model are drawn together, and blocks that are alike
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..graph.nodes import module_of
from ..placement import Partial, Placement, Replicate, Shard, local_shape
from ..plan import block_of
from ..plan.listing import COLLECTIVES
from ..plan.make import Planned
from ..tensor.sharded_tensor import unwrap

aten = torch.ops.aten
REARRANGING = {
    aten.reshape.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.to.dtype,
}


@dataclass
class Step:
    """What is one box in the picture."""

    number: int
    module: str
    kind: str
    """``column``, ``row``, ``vocab``, ``whole layer``, ``collective`` or ``operators``."""
    title: str = ""
    nodes: list[Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    """The steps whose results it takes."""
    split: str = "whole"
    """How its result lies: ``whole``, ``split`` or ``partial``."""
    placement: str = ""
    whole: tuple[Any, ...] = ()
    local: tuple[Any, ...] = ()
    dtype: str = ""
    reason: str = ""


@dataclass
class Section:
    """Steps that are drawn together: a block, or what lies before, between or after blocks."""

    title: str
    steps: list[Step]
    count: int = 1
    """How many blocks are like it."""
    given: list[Step] = field(default_factory=list)
    """Steps of other sections whose results it takes."""


def steps_of(planned: Planned) -> list[Step]:
    """The steps of the program, in an order in which every step comes after its sources."""
    module = planned.ctx.last_optimized_graph_module
    assert module is not None
    axes = {layer.name: layer.axis or "whole layer" for layer in planned.plan.layers}
    reasons = {(c.kind, c.module): c.reason for c in planned.plan.collectives}
    steps: list[Step] = []
    place: dict[Node, int] = {}
    latest: dict[str, int] = {}

    def new(path: str, kind: str) -> Step:
        steps.append(Step(len(steps), path, kind))
        return steps[-1]

    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op in ("placeholder", "get_attr", "output") or node.target is unwrap or name == "keep_sharded":
            continue
        made = [place[n] for n in node.all_input_nodes if n in place]
        path = module_path(node)
        if name in COLLECTIVES:
            source = node.all_input_nodes[0]
            step = new(module_path(source), "collective")
            step.title = "all-reduce of both" if name == "sum_together" else name.replace("_", "-")
            step.reason = reasons.get((name, module_path(source)), "") or _joined(reasons, module_path(source))
        elif node.op == "call_module":
            step = new(str(node.target), axes.get(str(node.target), "whole layer"))
        elif (node.target in REARRANGING or name == "_item") and len(made) == 1:
            step = steps[made[0]]
        elif path in latest and all(number <= latest[path] for number in made):
            step = steps[latest[path]]
        else:
            step = new(path, "operators")
            latest[path] = step.number
        step.nodes.append(node)
        step.sources |= {number for number in made if number != step.number}
        place[node] = step.number
    for step in steps:
        _describe(step, planned, place)
    return steps


def _joined(reasons: dict[tuple[str, str], str], module: str) -> str:
    """Why, for a collective that does the work of two."""
    return next((why for (_, where), why in reasons.items() if module in where.split(" + ")), "")


def _results(step: Step, place: dict[Node, int]) -> list[Node]:
    """The operators of a step, those first whose tensors other steps use, the largest before the others."""

    def size(node: Node) -> tuple[bool, int, int]:
        value = node.meta.get("val")
        used = any(place.get(user, step.number) != step.number for user in node.users)
        numel = prod(n for n in value.shape if isinstance(n, int)) if isinstance(value, torch.Tensor) else 0
        return used, numel, step.nodes.index(node)

    return sorted(step.nodes, key=size, reverse=True)


def _describe(step: Step, planned: Planned, place: dict[Node, int]) -> None:
    """What its result is: what its layer or collective gives, or else the largest tensor that it makes for others."""
    for node in step.nodes if step.kind != "operators" else _results(step, place):
        value, placements = node.meta.get("val"), node.meta.get("placement")
        if step.kind == "collective":
            value = node.all_input_nodes[0].meta.get("val")
        if isinstance(value, torch.Tensor) and placements:
            placement: Placement = placements[0]
            step.split = (
                "partial"
                if isinstance(placement, Partial)
                else "split"
                if isinstance(placement, Shard) and placement.layouts
                else "whole"
            )
            step.placement = in_words(placement, tuple(value.shape))
            step.whole = tuple(str(n) for n in value.shape)
            step.local = tuple(str(n) for n in local_shape(placement, tuple(value.shape), planned.ctx.rank))
            step.dtype = str(value.dtype).removeprefix("torch.")
            break
    if not step.title:
        own = [short(node) for node in step.nodes if node.target not in REARRANGING]
        last = step.module.rpartition(".")[2]
        step.title = last if last and not last.isdigit() else ", ".join(dict.fromkeys(own[:3])) or "the model"


def in_words(placement: Placement, shape: tuple[Any, ...]) -> str:
    """Where a tensor is, for someone who sees it for the first time."""
    if isinstance(placement, Replicate):
        return "every rank has all of it"
    if isinstance(placement, Partial):
        return "every rank has a term of a sum"
    if not placement.layouts:
        return "every rank has all of it, and uses its own part"
    parts = []
    for dim, layout in placement.layouts:
        how = (
            "in even parts" if str(layout) == "even" else "in parts of unequal size" if str(layout) == "uneven" else ""
        )
        if not how:
            how = "some of it on several ranks" if layout.has_copies else "piece by piece"
        size = f" ({shape[dim]} long)" if dim < len(shape) else ""
        parts.append(f"dimension {dim}{size} {how}")
    return "split along " + " and ".join(parts)


def short(node: Node) -> str:
    """What an operator is called."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._opname)
    return str(getattr(node.target, "__name__", node.target))


def module_path(node: Node) -> str:
    """The module that a node comes from; what has none belongs where its first input does."""
    while not node.meta.get("nn_module_stack") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return module_of(node)


def sections_of(steps: list[Step], planned: Planned) -> list[Section]:
    """Blocks that are alike once, and the rest where it runs."""
    groups: dict[str, list[Step]] = {}
    seen_block = False
    for step in steps:
        block = block_of(step.module)
        seen_block |= bool(block)
        groups.setdefault(block or ("after" if seen_block else "before"), []).append(step)
    counts = {name: 1 for name in groups}
    for each in planned.repeated:
        for like in each.like.values():
            name = f"{each.path}.{like}"
            counts[name] = counts.get(name, 1) + 1
    found: dict[Any, Section] = {}
    for name, members in groups.items():
        rest = {"before": "Before the blocks", "after": "After the blocks"}
        alike = tuple((s.title, s.kind, s.placement, s.whole) for s in members) if name not in rest else name
        title = rest.get(name, name) if len(groups) > 1 else "The model"
        if alike in found:
            found[alike].count += counts[name]
        else:
            found[alike] = Section(title, members, counts[name])
    for section in found.values():
        inside = {step.number for step in section.steps}
        outside = {number for step in section.steps for number in step.sources} - inside
        section.given = [steps[number] for number in sorted(outside)]
    return sorted(found.values(), key=lambda section: section.title == "After the blocks")
