"""The steps that a diagram shows, from the local program of a rank.

A step is a layer, a collective, or the operators of one module that run between them. Views and casts belong to the
step that computed their input. The steps of one block are drawn together; repeated blocks are drawn once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..compat.torch import OpOverload, packet_name
from ..distributed.operators import COLLECTIVES, all_reduce_coalesced
from ..graph.local_program import COLLECTIVE, FULL
from ..graph.nodes import module_of
from ..placement import Partial, Placement, Replicate, Shard, local_shape
from ..plan import block_of
from ..plan.offline import Planned
from ..tensor.graph_io import wrap_shard
from ..tensor.sharded_tensor import unwrap

aten = torch.ops.aten
VIEWS = {
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
    """One box of a diagram.

    Attributes:
        number: Its position in the program.
        module: The module it belongs to.
        kind: ``column``, ``row``, ``vocab``, ``replicated layer``, ``collective`` or ``operators``.
        title: The text in the box.
        nodes: Its nodes in the local program.
        sources: The steps whose outputs it reads.
        sharding: The placement of its output in one word: ``replicated``, ``sharded`` or ``partial``.
        placement: The placement of its output as text.
        global_shape: The global shape of its output.
        local_shape: The shape of its output on this rank.
        dtype: The dtype of its output.
        reason: Why a collective is needed.
    """

    number: int
    module: str
    kind: str
    title: str = ""
    nodes: list[Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    sharding: str = "replicated"
    placement: str = ""
    global_shape: tuple[Any, ...] = ()
    local_shape: tuple[Any, ...] = ()
    dtype: str = ""
    reason: str = ""


@dataclass
class Section:
    """Steps that are drawn together: a block, or the steps before or after the blocks.

    Attributes:
        title: The name of the block, or a description.
        steps: Its steps.
        count: How many blocks repeat it, itself included.
        external: Steps of other sections whose outputs it reads.
    """

    title: str
    steps: list[Step]
    count: int = 1
    external: list[Step] = field(default_factory=list)


def steps_of(planned: Planned) -> list[Step]:
    """The steps of the program, every step after its sources."""
    module = planned.program()
    axes = {layer.name: layer.axis or "replicated layer" for layer in planned.plan.layers}
    steps: list[Step] = []
    step_of: dict[Node, int] = {}
    latest: dict[str, int] = {}

    def new(path: str, kind: str) -> Step:
        steps.append(Step(len(steps), path, kind))
        return steps[-1]

    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target in (unwrap, wrap_shard):
            continue
        sources = [step_of[n] for n in node.all_input_nodes if n in step_of]
        path = module_path(node)
        if node.op == "call_function" and node.target in COLLECTIVES:
            step = new(module_path(node.all_input_nodes[0]), "collective")
            kind = COLLECTIVES[node.target].replace("_", "-")
            step.title = f"{kind} (merged)" if node.target is all_reduce_coalesced else kind
            step.reason = node.meta[COLLECTIVE].reason if COLLECTIVE in node.meta else ""
        elif node.op == "call_module":
            step = new(str(node.target), axes.get(str(node.target), "replicated layer"))
        elif (node.target in VIEWS or node.target is operator.getitem) and len(sources) == 1:
            step = steps[sources[0]]
        elif path in latest and all(number <= latest[path] for number in sources):
            step = steps[latest[path]]
        else:
            step = new(path, "operators")
            latest[path] = step.number
        step.nodes.append(node)
        step.sources |= {number for number in sources if number != step.number}
        step_of[node] = step.number
    for step in steps:
        _describe_output(step, planned, step_of)
    return steps


def _outputs_first(step: Step, step_of: dict[Node, int]) -> list[Node]:
    """The nodes of a step: those that other steps read before the others, the largest first."""

    def rank(node: Node) -> tuple[bool, int, int]:
        value = node.meta.get("val")
        is_output = any(step_of.get(user, step.number) != step.number for user in node.users)
        numel = prod(n for n in value.shape if isinstance(n, int)) if isinstance(value, torch.Tensor) else 0
        return is_output, numel, step.nodes.index(node)

    return sorted(step.nodes, key=rank, reverse=True)


def _describe_output(step: Step, planned: Planned, step_of: dict[Node, int]) -> None:
    """Fill in the output of a step: that of its layer or collective, or else its largest output."""
    for node in step.nodes if step.kind != "operators" else _outputs_first(step, step_of):
        value, placements = node.meta.get(FULL, node.meta.get("val")), node.meta.get("placement")
        if isinstance(value, torch.Tensor) and placements:
            placement: Placement = placements[0]
            step.sharding = _sharding(placement)
            step.placement = placement_text(placement, tuple(value.shape))
            step.global_shape = tuple(str(n) for n in value.shape)
            step.local_shape = tuple(str(n) for n in local_shape(placement, tuple(value.shape), planned.ctx.rank))
            step.dtype = str(value.dtype).removeprefix("torch.")
            break
    if not step.title:
        operators = [operator_name(node) for node in step.nodes if node.target not in VIEWS]
        last = step.module.rpartition(".")[2]
        step.title = last if last and not last.isdigit() else ", ".join(dict.fromkeys(operators[:3])) or "the model"


def _sharding(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "partial"
    return "sharded" if isinstance(placement, Shard) and placement.layouts else "replicated"


def placement_text(placement: Placement, shape: tuple[Any, ...]) -> str:
    """A placement as text, with the sizes of the sharded dimensions."""
    if isinstance(placement, Replicate):
        return "replicated"
    if isinstance(placement, Partial):
        return "partial: the ranks' tensors add up to the result"
    if not placement.layouts:
        return "replicated, each rank uses its own part"
    parts = []
    for dim, layout in placement.layouts:
        how = "in even shards" if str(layout) == "even" else "in uneven shards" if str(layout) == "uneven" else ""
        if not how:
            how = "with some shards on several ranks" if layout.has_copies else "in packed segments"
        size = f" (size {shape[dim]})" if dim < len(shape) else ""
        parts.append(f"dimension {dim}{size} {how}")
    return "sharded on " + " and ".join(parts)


def operator_name(node: Node) -> str:
    """The name of a node's operator."""
    if isinstance(node.target, OpOverload):
        return packet_name(node.target)
    return str(getattr(node.target, "__name__", node.target))


def module_path(node: Node) -> str:
    """The module that a node belongs to; a node without one belongs to the module of its first input."""
    while not node.meta.get("nn_module_stack") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return module_of(node)


def sections_of(steps: list[Step], planned: Planned) -> list[Section]:
    """One section per kind of block, and the steps before and after the blocks."""
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
        signature = tuple((s.title, s.kind, s.placement, s.global_shape) for s in members)
        key: Any = name if name in rest else signature
        title = rest.get(name, name) if len(groups) > 1 else "The model"
        if key in found:
            found[key].count += counts[name]
        else:
            found[key] = Section(title, members, counts[name])
    for section in found.values():
        own = {step.number for step in section.steps}
        external = {number for step in section.steps for number in step.sources} - own
        section.external = [steps[number] for number in sorted(external)]
    return sorted(found.values(), key=lambda section: section.title == "After the blocks")
