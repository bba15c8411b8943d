"""The part of a plan that another library could run: modules that are exact on their own, and groups of modules.

A module that ends with an all-gather or starts from a replicated input (``column-gathered``, ``row-split``, ``vocab``)
is exact whatever the code around it does. A *group* is faster: column-parallel modules leave their outputs sharded, the
code between runs on shards, and row-parallel modules all-reduce. Whether that code can run on shards is not decided
here: :mod:`.choose` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..placement import Layout, Placement, Shard
from ..plan import LayerPlan, Plan
from ..weights.meta_init import tied_names
from .styles import (
    COLUMN,
    EXPERTS,
    GATHERED,
    PACKED,
    ROW,
    ROW_SPLIT,
    VOCAB,
    parameter_style,
    parse_parameter_style,
)

Modules = list[tuple[str, nn.Module]]
"""The modules that have one generic name, with their names."""


def generic(name: str) -> str:
    """A name with ``*`` for its block numbers, as transformers writes it."""
    return re.sub(r"\.\d+(\.|$)", lambda match: ".*" + match.group(1), name)


@dataclass
class Group:
    """Modules that are sharded together or not at all.

    Attributes:
        where: The module that contains them.
        styles: The style of each, by generic names.
        alternatives: Other styles for the group, to try if these are not exact.
        separate: The style of each on its own, if the group cannot be sharded; the others are replicated then.
        reason: Why a module is in a group of its own, if the plan has it in a group with others.
    """

    where: str
    styles: dict[str, str]
    alternatives: list[dict[str, str]] = field(default_factory=list)
    separate: dict[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Candidates:
    """The groups that could be sharded.

    Attributes:
        groups: The groups.
        replicated: The other modules, with the reason.
        custom_forward: Linears and Embeddings with their own forward, which must be shown to run on shards.
    """

    groups: list[Group] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)
    custom_forward: set[str] = field(default_factory=set)

    def drop(self, reasons: dict[str, str]) -> None:
        """Replicate these modules; the others of their groups are sharded separately, if they can be."""
        for group in [g for g in self.groups if set(g.styles) & set(reasons)]:
            self.groups.remove(group)
            dropped: dict[str, list[str]] = {}
            for pattern in (p for p in group.styles if p in reasons):
                dropped.setdefault(reasons[pattern], []).append(pattern)
            why = "; ".join(f"{', '.join(patterns)}: {reason}" for reason, patterns in dropped.items())
            for pattern, style in group.styles.items():
                if pattern in reasons or pattern not in group.separate:
                    self.replicated[pattern] = reasons.get(pattern, f"its group is replicated ({why})")
                elif parse_parameter_style(style) is None:
                    self.groups.append(Group(pattern, {pattern: group.separate[pattern]}, reason=why))


@dataclass
class _Candidate:
    """The modules of one generic name, and their styles.

    ``separate`` is their style on their own and ``grouped`` the one in a group; None if there is none, with the reason.
    """

    pattern: str
    separate: str | None
    grouped: str | None
    reason: str = ""
    shapes: frozenset[tuple[int, ...]] = frozenset()
    order: int = 0


def find_candidates(model: nn.Module, plan: Plan) -> Candidates:
    """The groups of a plan, for a model whose parameters may be on ``meta``."""
    layers: dict[str, LayerPlan] = {layer.name: layer for layer in plan.layers}
    order = {generic(layer.name): i for i, layer in reversed(list(enumerate(plan.layers)))}
    found, candidates = Candidates(), {}
    for pattern, modules in _modules_with_weights(model).items():
        if all(isinstance(m, (nn.Linear, nn.Embedding)) for _, m in modules):
            candidate = candidates[pattern] = _candidate(pattern, modules, layers, plan)
            candidate.order = order.get(pattern, 0)
            candidate.shapes = frozenset(_shape(module) for _, module in modules)
            if any(type(m).forward not in (nn.Linear.forward, nn.Embedding.forward) for _, m in modules):
                found.custom_forward.add(pattern)
        else:
            experts = _experts(pattern, modules, plan)
            if isinstance(experts, Group):
                found.groups.append(experts)
            else:
                found.replicated[pattern] = experts
    tied = _add_tied(model, candidates, found)
    untied = {p: candidate for p, candidate in candidates.items() if p not in tied}
    groups = _groups(untied)
    groups += _standard_groups(untied, {pattern for group in groups for pattern in group.styles}, plan.world_size)
    found.groups += groups
    grouped = {pattern for group in groups for pattern in group.styles}
    for pattern, candidate in untied.items():
        if pattern in grouped:
            continue
        if candidate.separate is not None:
            found.groups.append(Group(pattern, {pattern: candidate.separate}, reason=candidate.reason))
        else:
            found.replicated[pattern] = candidate.reason
    return found


def _modules_with_weights(model: nn.Module) -> dict[str, Modules]:
    """The modules that hold matrices, by generic names."""
    found: dict[str, Modules] = {}
    for name, module in model.named_modules():
        if any(p.ndim > 1 for p in module.parameters(recurse=False)):
            found.setdefault(generic(name), []).append((name, module))
    return found


# -- single modules -------------------------------------------------------------------------------------------------


def _candidate(pattern: str, modules: Modules, layers: dict[str, LayerPlan], plan: Plan) -> _Candidate:
    """The styles of the Linears or Embeddings of one name."""
    world = plan.world_size
    planned = [layers[name] for name, _ in modules if name in layers]
    if len(planned) < len(modules):
        return _Candidate(pattern, None, None, "the planned forward does not call all of these modules")
    axes = {layer.axis for layer in planned}
    if None in axes:
        return _Candidate(pattern, None, None, _plan_reason(plan, [name for name, _ in modules]))
    shapes = {_shape(module) for _, module in modules}
    rows_divide = all(shape[0] % world == 0 for shape in shapes)
    sizes = " and ".join(sorted("×".join(map(str, shape)) for shape in shapes))
    if isinstance(modules[0][1], nn.Embedding):
        if rows_divide:
            return _Candidate(pattern, VOCAB, None)
        return _Candidate(pattern, None, None, f"its rows are not divisible by {world} ({sizes})")
    columns_divide = all(shape[1] % world == 0 for shape in shapes)
    options = [GATHERED] * rows_divide + [ROW_SPLIT] * columns_divide
    if axes == {"row"}:
        options.reverse()
    if not options:
        return _Candidate(pattern, None, None, f"neither of its sizes is divisible by {world} ({sizes})")
    grouped, reason = None, ""
    if axes == {"column"} and not any(layer.gather_output for layer in planned):
        grouped, reason = _column_style(modules, plan)
    elif axes == {"row"} and all(layer.input_is_parallel for layer in planned):
        grouped, reason = _row_style(modules, plan)
    return _Candidate(pattern, options[0], grouped, reason)


def _column_style(modules: Modules, plan: Plan) -> tuple[str | None, str]:
    """The style in a group of column-parallel modules, or the reason why there is none."""
    kinds = set()
    for name, module in modules:
        kind = _kind(_placement(plan, f"{name}.weight"), 0, _shape(module)[0], plan.world_size)
        kinds.add(kind if kind != "packed" or getattr(module, "bias", None) is None else "packed, with a bias")
    if kinds == {"even"}:
        return COLUMN, ""
    if kinds == {"packed"}:
        return PACKED, ""
    return None, f"there is no style for outputs sharded as {' or '.join(sorted(kinds - {'even'}))}"


def _row_style(modules: Modules, plan: Plan) -> tuple[str | None, str]:
    """The style in a group of row-parallel modules, or the reason why there is none."""
    kinds = {
        _kind(_placement(plan, f"{name}.weight"), 1, _shape(module)[1], plan.world_size) for name, module in modules
    }
    if kinds == {"even"}:
        return ROW, ""
    return None, f"there is no style for inputs sharded as {' or '.join(sorted(kinds - {'even'}))}"


def _kind(placement: Placement | None, dim: int, size: int, world: int) -> str:
    """How a placement shards one dimension: ``even``, ``packed`` (two halves), or a description of anything else."""
    if not isinstance(placement, Shard) or set(placement.dims) != {dim}:
        return "nothing"
    layout = placement.dims[dim]
    if layout.has_copies:
        return "shards of which some are on several ranks"
    if layout == Layout.even(size, world) and size % world == 0:
        return "even"
    if not layout.is_even:
        return "uneven shards"
    half = size // 2
    if size % (2 * world) == 0 and layout == Layout.concat([(half, Layout.even(half, world))] * 2):
        return "packed"
    return "several packed segments"


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight: Any = module.weight
    return tuple(weight.shape)


def _placement(plan: Plan, name: str) -> Placement | None:
    parameter = plan.parameters.get(name)
    return None if parameter is None else parameter.placement


def _plan_reason(plan: Plan, names: Iterable[str]) -> str:
    """Why the plan replicates these modules."""
    reasons = dict(plan.replicated)
    for name in names:
        for key in (f"{name}.weight", name):
            if key in reasons:
                return f"replicated in the plan: {reasons[key]}"
    return "replicated in the plan"


# -- groups -----------------------------------------------------------------------------------------------------------


def _groups(candidates: dict[str, _Candidate]) -> list[Group]:
    """Column-parallel modules and the row-parallel ones that follow: those in the smallest module that has both."""
    remaining = {p: candidate for p, candidate in candidates.items() if candidate.grouped is not None}
    parents = {parent for pattern in remaining for parent in _parents(pattern)}
    found = []
    for parent in sorted(parents, key=lambda p: (-p.count("."), p)):
        inside = {p: candidate for p, candidate in remaining.items() if p.startswith(f"{parent}.")}
        direct = {p: candidate for p, candidate in inside.items() if p.rpartition(".")[0] == parent}
        inside = direct if _is_complete(direct) else inside
        if not _is_complete(inside):
            continue
        styles = {p: str(candidate.grouped) for p, candidate in inside.items()}
        separate = {p: str(candidate.separate) for p, candidate in inside.items()}
        found.append(Group(parent, styles, separate=separate))
        for p in inside:
            del remaining[p]
    order = {p: i for i, p in enumerate(candidates)}
    return sorted(found, key=lambda group: min(order[p] for p in group.styles))


def _is_complete(candidates: dict[str, _Candidate]) -> bool:
    """Whether there are column-parallel modules and a row-parallel one."""
    styles = {candidate.grouped for candidate in candidates.values()}
    return ROW in styles and bool({COLUMN, PACKED} & styles)


def _standard_groups(candidates: dict[str, _Candidate], grouped: set[str], world: int) -> list[Group]:
    """Megatron's groups where the plan has others: modules whose last Linear reads the outputs of the others.

    The search may prefer to gather a small tensor; these groups need no gather that the other library lacks.
    """
    by_parent: dict[str, dict[str, _Candidate]] = {}
    for pattern, candidate in candidates.items():
        if pattern not in grouped and "*" in pattern and candidate.separate in (GATHERED, ROW_SPLIT):
            by_parent.setdefault(pattern.rpartition(".")[0], {})[pattern] = candidate
    found = []
    for parent, inside in by_parent.items():
        *columns, row = sorted(inside.values(), key=lambda candidate: candidate.order)
        inputs = {shape[1] for shape in row.shapes}
        if any(size % world for size in inputs):
            continue
        unpacked = [candidate for candidate in columns if candidate.grouped != PACKED]
        outputs = [{shape[0] for shape in candidate.shapes} for candidate in unpacked]
        if inputs in outputs and not any(size % world for sizes in outputs for size in sizes):
            styles = {candidate.pattern: COLUMN for candidate in unpacked} | {row.pattern: ROW}
            found.append(Group(parent, styles, separate={p: str(inside[p].separate) for p in styles}))
    return found


def _parents(pattern: str) -> list[str]:
    """The modules that contain a module, down to its block."""
    parts = pattern.split(".")
    first = parts.index("*") + 1 if "*" in parts else 1
    return [".".join(parts[:n]) for n in range(first, len(parts))]


# -- tied weights --------------------------------------------------------------------------------------------------


def _add_tied(model: nn.Module, candidates: dict[str, _Candidate], found: Candidates) -> set[str]:
    """Add modules with tied weights: all are sharded on the rows, or replicated. Returns their names."""
    tied: set[str] = set()
    for patterns in _tied_modules(model):
        tied |= set(patterns)
        found.groups = [group for group in found.groups if not set(group.styles) & set(patterns)]
        styles, reasons = {}, {}
        for pattern in patterns:
            candidate = candidates.get(pattern)
            if candidate is not None and candidate.separate in (VOCAB, GATHERED):
                styles[pattern] = str(candidate.separate)
            elif candidate is not None and candidate.separate is not None:
                reasons[pattern] = "its weight is tied, and it is not sharded on the rows"
            elif candidate is not None:
                reasons[pattern] = candidate.reason
            else:
                reasons[pattern] = found.replicated.get(pattern) or "it has a parameter of its own that is tied"
        if reasons:
            why = "; ".join(f"{pattern}: {reason}" for pattern, reason in reasons.items())
            found.replicated.update(
                {p: reasons.get(p) or f"its weight is tied to a replicated one ({why})" for p in patterns}
            )
        else:
            found.groups.append(Group(" and ".join(patterns), styles))
    return tied


def _tied_modules(model: nn.Module) -> list[list[str]]:
    """Generic names of modules that share weights with one another, directly or through a third."""
    names = {id(module): name for name, module in model.named_modules()}
    sets: list[set[str]] = []
    for parameters in tied_names(model).values():
        owners = {names[id(model.get_submodule(name.rpartition(".")[0]))] for name in parameters}
        if len(owners) > 1:
            joined = {generic(owner) for owner in owners}
            for other in [s for s in sets if s & joined]:
                sets.remove(other)
                joined |= other
            sets.append(joined)
    return [sorted(s) for s in sets]


# -- MoE experts: modules with parameters of their own -------------------------------------------------------------


def _experts(pattern: str, modules: Modules, plan: Plan) -> Group | str:
    """A group for modules with 3-D parameters, sharded as the plan shards them; or the reason why they are not."""
    kind = type(modules[0][1]).__name__
    own = [dict(module.named_parameters(recurse=False)) for _, module in modules]
    if not any(p.ndim == 3 for params in own for p in params.values()) or any(set(p) != set(own[0]) for p in own):
        return f"{kind} is neither nn.Linear nor nn.Embedding: there is no style for it"
    styles: dict[str, str] = {}
    expressible = True
    for key in own[0]:
        found = set()
        for (name, _), params in zip(modules, own, strict=True):
            found.add(_parameter_style(_placement(plan, f"{name}.{key}"), tuple(params[key].shape), plan.world_size))
        expressible = expressible and len(found) == 1 and "no" not in found
        if len(found) == 1 and found != {""}:
            styles[f"{pattern}.{key}"] = found.pop()
    if not styles:
        return _plan_reason(plan, [f"{name}.{key}" for name, _ in modules for key in own[0]])
    shapes = [{key: tuple(p.shape) for key, p in params.items()} for params in own]
    options = [{pattern: EXPERTS, **styles}] if expressible else []
    options += _standard_expert_styles(pattern, shapes, plan.world_size)
    if not options:
        return "there is no style for the placements of its weights"
    return Group(pattern, options[0], options[1:])


def _standard_expert_styles(pattern: str, shapes: list[dict[str, tuple[int, ...]]], world: int) -> list[dict[str, str]]:
    """The ways to shard the width of experts: the last weight on its inputs, the others on their outputs.

    Either dimension may be the outputs, and the outputs may be packed (``[gate|up]``).
    """
    keys = [key for key, shape in shapes[0].items() if len(shape) == 3]
    found = []
    for outputs, inputs in ((-2, -1), (-1, -2)):
        for segments in (2, 1):
            dims = {key: (outputs, segments) for key in keys[:-1]} | {key: (inputs, 1) for key in keys[-1:]}
            divisible = all(each[key][dim] % (world * n) == 0 for each in shapes for key, (dim, n) in dims.items())
            if len(keys) > 1 and divisible:
                styles = {f"{pattern}.{key}": parameter_style(dim, n) for key, (dim, n) in dims.items()}
                found.append({pattern: EXPERTS, **styles})
    return found


def _parameter_style(placement: Placement | None, shape: tuple[int, ...], world: int) -> str:
    """The style of a parameter: empty if it is replicated, ``no`` if there is none."""
    if not isinstance(placement, Shard) or not placement.dims:
        return ""
    if len(placement.dims) != 1:
        return "no"
    (dim,) = placement.dims
    from_end = dim - len(shape)
    if from_end not in (-1, -2):
        return "no"
    kind = _kind(placement, dim, shape[dim], world)
    return {"even": parameter_style(from_end, 1), "packed": parameter_style(from_end, 2)}.get(kind, "no")
