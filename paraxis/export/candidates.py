"""What of a plan another library could run: modules that are exact by themselves, and groups that belong together.

A module that ends in a gather or begins with a split (``column-gathered``, ``row-split``, ``vocab``) is exact whatever
the code around it does. A *group* is faster: its columns leave their results split, the code between works on a rank's
part, its rows sum. Whether that code can is not for this module to say; :mod:`.choose` runs it.
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
from .styles import COLUMN, EXPERTS, GATHERED, PACKED, ROW, ROW_SPLIT, VOCAB, cut_style, parse_cut


def generic(name: str) -> str:
    """A name with its block numbers left open, as transformers does it."""
    return re.sub(r"\.\d+(\.|$)", lambda match: ".*" + match.group(1), name)


@dataclass
class Group:
    """Modules that are split together or not at all.

    Attributes:
        where: The module that they are in.
        ways: How each is split, by names with block numbers left open.
        others: Other ways to split them, to be tried if this one is not right.
        instead: How each is split by itself if the group cannot be; what is missing stays whole.
        reason: Why a module is alone in its group, where the plan has it together with others.
    """

    where: str
    ways: dict[str, str]
    others: list[dict[str, str]] = field(default_factory=list)
    instead: dict[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Candidates:
    """All that could be split, and why the rest is not.

    ``own`` are layers with a forward of their own: they may be split if that runs.
    """

    groups: list[Group] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def drop(self, reasons: dict[str, str]) -> None:
        """Leave the groups whole that have one of these modules."""
        for group in [g for g in self.groups if set(g.ways) & set(reasons)]:
            self.groups.remove(group)
            named: dict[str, list[str]] = {}
            for pattern in (p for p in group.ways if p in reasons):
                named.setdefault(reasons[pattern], []).append(pattern)
            why = "; ".join(f"{', '.join(patterns)}: {reason}" for reason, patterns in named.items())
            shared = f"goes with what stays whole ({why})"
            for pattern, way in group.ways.items():
                if pattern in reasons or pattern not in group.instead:
                    self.whole[pattern] = reasons.get(pattern, shared)
                elif parse_cut(way) is None:
                    self.groups.append(Group(pattern, {pattern: group.instead[pattern]}, reason=why))


@dataclass
class _Piece:
    """All modules of one name with the numbers left open."""

    pattern: str
    alone: str | None
    together: str | None
    reason: str = ""
    shapes: frozenset[tuple[int, ...]] = frozenset()
    order: int = 0


def find_candidates(model: nn.Module, plan: Plan) -> Candidates:
    """Groups and single modules of a plan, for a model whose parameters may be on ``meta``."""
    layers: dict[str, LayerPlan] = {layer.name: layer for layer in plan.layers}
    order = {generic(layer.name): i for i, layer in reversed(list(enumerate(plan.layers)))}
    modules: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if any(p.ndim > 1 for p in module.parameters(recurse=False)):
            modules.setdefault(generic(name), []).append((name, module))
    found, pieces = Candidates(), {}
    for pattern, several in modules.items():
        if all(isinstance(m, (nn.Linear, nn.Embedding)) for _, m in several):
            pieces[pattern] = _piece(pattern, several, layers, plan)
            pieces[pattern].order = order.get(pattern, 0)
            pieces[pattern].shapes = frozenset(_shape(module) for _, module in several)
            if any(type(m).forward not in (nn.Linear.forward, nn.Embedding.forward) for _, m in several):
                found.own.add(pattern)
        else:
            experts = _experts(pattern, several, plan)
            if isinstance(experts, Group):
                found.groups.append(experts)
            else:
                found.whole[pattern] = experts
    tied = _tied(model, pieces, found)
    free = {p: piece for p, piece in pieces.items() if p not in tied}
    grouped = _groups(free)
    grouped += _usual(free, {pattern for group in grouped for pattern in group.ways}, plan.world_size)
    found.groups += grouped
    taken = {pattern for group in grouped for pattern in group.ways}
    for pattern, piece in free.items():
        if pattern in taken:
            continue
        if piece.alone is not None:
            found.groups.append(Group(pattern, {pattern: piece.alone}, reason=piece.reason))
        else:
            found.whole[pattern] = piece.reason
    return found


# -- single modules -------------------------------------------------------------------------------------------------


def _piece(pattern: str, several: list[tuple[str, nn.Module]], layers: dict[str, LayerPlan], plan: Plan) -> _Piece:
    """How the modules of one name can be split, alone and in a group."""
    world = plan.world_size
    planned = [layers.get(name) for name, _ in several]
    if any(layer is None for layer in planned):
        return _Piece(pattern, None, None, "the planned forward does not run all of them as a layer")
    axes = {layer.axis for layer in planned if layer is not None}
    if None in axes:
        return _Piece(pattern, None, None, _plan_reason(plan, [name for name, _ in several]))
    shapes = {_shape(module) for _, module in several}
    rows_divide = all(shape[0] % world == 0 for shape in shapes)
    sizes = " and ".join(sorted("×".join(map(str, shape)) for shape in shapes))
    if isinstance(several[0][1], nn.Embedding):
        if rows_divide:
            return _Piece(pattern, VOCAB, None)
        return _Piece(pattern, None, None, f"its rows do not divide by {world} ({sizes})")
    columns_divide = all(shape[1] % world == 0 for shape in shapes)
    options = [GATHERED] * rows_divide + [ROW_SPLIT] * columns_divide
    if axes == {"row"}:
        options.reverse()
    if not options:
        return _Piece(pattern, None, None, f"neither of its sizes divides by {world} ({sizes})")
    together, reason = None, ""
    if axes == {"column"} and not any(layer.gather_output for layer in planned if layer is not None):
        together, reason = _column(several, plan)
    elif axes == {"row"} and all(layer.input_is_parallel for layer in planned if layer is not None):
        together, reason = _row(several, plan)
    return _Piece(pattern, options[0], together, reason)


def _column(several: list[tuple[str, nn.Module]], plan: Plan) -> tuple[str | None, str]:
    ways = set()
    for name, module in several:
        kind = _kind(_placement(plan, f"{name}.weight"), 0, _shape(module)[0], plan.world_size)
        ways.add(kind if kind != "packed" or getattr(module, "bias", None) is None else "packed, with a bias")
    if ways == {"even"}:
        return COLUMN, ""
    if ways == {"packed"}:
        return PACKED, ""
    return None, f"its outputs are split as {' or '.join(sorted(ways - {'even'}))}, for which there is no style"


def _row(several: list[tuple[str, nn.Module]], plan: Plan) -> tuple[str | None, str]:
    ways = {
        _kind(_placement(plan, f"{name}.weight"), 1, _shape(module)[1], plan.world_size) for name, module in several
    }
    if ways == {"even"}:
        return ROW, ""
    return None, f"its inputs are split as {' or '.join(sorted(ways - {'even'}))}, for which there is no style"


def _kind(placement: Placement | None, dim: int, size: int, world: int) -> str:
    """What a placement cuts along one dimension alone: ``even``, ``packed`` (two halves), or what it is instead."""
    if not isinstance(placement, Shard) or set(placement.dims) != {dim}:
        return "nothing"
    layout = placement.dims[dim]
    if layout.has_copies:
        return "parts of which some are on several ranks"
    if layout == Layout.even(size, world) and size % world == 0:
        return "even"
    if not layout.is_even:
        return "parts of unequal size"
    half = size // 2
    if size % (2 * world) == 0 and layout == Layout.concat([(half, Layout.even(half, world))] * 2):
        return "packed"
    return "several packed segments"


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight: Any = module.weight
    return tuple(weight.shape)


def _placement(plan: Plan, name: str) -> Placement | None:
    known = plan.parameters.get(name)
    return None if known is None else known.placement


def _plan_reason(plan: Plan, names: Iterable[str]) -> str:
    reasons = dict(plan.replicated)
    for name in names:
        for key in (f"{name}.weight", name):
            if key in reasons:
                return f"whole in the plan: {reasons[key]}"
    return "whole in the plan"


# -- groups -----------------------------------------------------------------------------------------------------------


def _groups(pieces: dict[str, _Piece]) -> list[Group]:
    """Columns and the rows that they lead to: those that are in the same module, the smallest one that has both."""
    open_ = {p: piece for p, piece in pieces.items() if piece.together is not None}
    parents = {parent for pattern in open_ for parent in _parents(pattern)}
    found = []
    for parent in sorted(parents, key=lambda p: (-p.count("."), p)):
        inside = {p: piece for p, piece in open_.items() if p.startswith(f"{parent}.")}
        direct = {p: piece for p, piece in inside.items() if p.rpartition(".")[0] == parent}
        inside = direct if _complete(direct) else inside
        if not _complete(inside):
            continue
        ways = {p: str(piece.together) for p, piece in inside.items()}
        instead = {p: str(piece.alone) for p, piece in inside.items()}
        found.append(Group(parent, ways, instead=instead))
        for p in inside:
            del open_[p]
    order = {p: i for i, p in enumerate(pieces)}
    return sorted(found, key=lambda group: min(order[p] for p in group.ways))


def _complete(pieces: dict[str, _Piece]) -> bool:
    """Whether there are columns, and a row that they lead to."""
    ways = {piece.together for piece in pieces.values()}
    return ROW in ways and bool({COLUMN, PACKED} & ways)


def _usual(pieces: dict[str, _Piece], taken: set[str], world: int) -> list[Group]:
    """Where the plan has something else: modules whose last Linear takes in what the others put out, as usual.

    A search may prefer to gather a small tensor; the usual way needs no gather that another library does not have.
    """
    by_parent: dict[str, dict[str, _Piece]] = {}
    for pattern, piece in pieces.items():
        if pattern not in taken and "*" in pattern and piece.alone in (GATHERED, ROW_SPLIT):
            by_parent.setdefault(pattern.rpartition(".")[0], {})[pattern] = piece
    found = []
    for parent, inside in by_parent.items():
        *columns, row = sorted(inside.values(), key=lambda piece: piece.order)
        taken_in = {shape[1] for shape in row.shapes}
        if any(size % world for size in taken_in):
            continue
        puts_out = [{shape[0] for shape in piece.shapes} for piece in columns if piece.together != PACKED]
        if taken_in in puts_out and not any(size % world for sizes in puts_out for size in sizes):
            ways = {piece.pattern: COLUMN for piece in columns if piece.together != PACKED} | {row.pattern: ROW}
            found.append(Group(parent, ways, instead={p: str(inside[p].alone) for p in ways}))
    return found


def _parents(pattern: str) -> list[str]:
    """The modules that a module is in, down to its block."""
    parts = pattern.split(".")
    first = parts.index("*") + 1 if "*" in parts else 1
    return [".".join(parts[:n]) for n in range(first, len(parts))]


# -- weights that several modules share ----------------------------------------------------------------------------


def _tied(model: nn.Module, pieces: dict[str, _Piece], found: Candidates) -> set[str]:
    """Groups of modules with one weight: they are cut alike, by rows, or stay whole. Returns their names."""
    taken: set[str] = set()
    for patterns in _sharing(model):
        taken |= set(patterns)
        found.groups = [group for group in found.groups if not set(group.ways) & set(patterns)]
        ways, reasons = {}, {}
        for pattern in patterns:
            piece = pieces.get(pattern)
            if piece is not None and piece.alone in (VOCAB, GATHERED):
                ways[pattern] = str(piece.alone)
            elif piece is not None and piece.alone is not None:
                reasons[pattern] = "it shares its weight, and is not cut by rows"
            elif piece is not None:
                reasons[pattern] = piece.reason
            else:
                reasons[pattern] = found.whole.get(pattern) or "it has a parameter of its own that it shares"
        if reasons:
            why = "; ".join(f"{pattern}: {reason}" for pattern, reason in reasons.items())
            found.whole.update(
                {p: reasons.get(p) or f"shares its weight with what stays whole ({why})" for p in patterns}
            )
        else:
            found.groups.append(Group(" and ".join(patterns), ways))
    return taken


def _sharing(model: nn.Module) -> list[list[str]]:
    """Modules that share weights with one another, directly or through a third, with block numbers left open."""
    names = {id(module): name for name, module in model.named_modules()}
    sets: list[set[str]] = []
    for several in tied_names(model).values():
        owners = {names[id(model.get_submodule(name.rpartition(".")[0]))] for name in several}
        if len(owners) > 1:
            joined = {generic(owner) for owner in owners}
            for other in [s for s in sets if s & joined]:
                sets.remove(other)
                joined |= other
            sets.append(joined)
    return [sorted(s) for s in sets]


# -- modules that hold weights of their own ------------------------------------------------------------------------


def _experts(pattern: str, several: list[tuple[str, nn.Module]], plan: Plan) -> Group | str:
    """A module with parameters of three dimensions, cut as the plan cuts them; or why it stays whole."""
    kind = type(several[0][1]).__name__
    own = [dict(module.named_parameters(recurse=False)) for _, module in several]
    if not any(p.ndim == 3 for params in own for p in params.values()) or any(set(p) != set(own[0]) for p in own):
        return f"{kind} is neither nn.Linear nor nn.Embedding: there is no style for it"
    ways: dict[str, str] = {}
    known = True
    for key in own[0]:
        found = set()
        for (name, _), params in zip(several, own, strict=True):
            found.add(_cut(_placement(plan, f"{name}.{key}"), tuple(params[key].shape), plan.world_size))
        known = known and len(found) == 1 and "no" not in found
        if len(found) == 1 and found != {""}:
            ways[f"{pattern}.{key}"] = found.pop()
    if not ways:
        return _plan_reason(plan, [f"{name}.{key}" for name, _ in several for key in own[0]])
    usual = _usual_cuts(pattern, [{key: tuple(p.shape) for key, p in each.items()} for each in own], plan.world_size)
    several_ways = ([{pattern: EXPERTS, **ways}] if known else []) + usual
    if not several_ways:
        return "its weights are cut in a way for which there is no style"
    return Group(pattern, several_ways[0], several_ways[1:])


def _usual_cuts(pattern: str, shapes: list[dict[str, tuple[int, ...]]], world: int) -> list[dict[str, str]]:
    """The ways to cut experts' weights by width: the last one by what the others put out, stored either way round."""
    keys = [key for key, shape in shapes[0].items() if len(shape) == 3]
    found = []
    for out, into in ((-2, -1), (-1, -2)):
        for segments in (2, 1):
            cuts = {key: (out, segments) for key in keys[:-1]} | {key: (into, 1) for key in keys[-1:]}
            divide = all(each[key][dim] % (world * n) == 0 for each in shapes for key, (dim, n) in cuts.items())
            if len(keys) > 1 and divide:
                ways = {f"{pattern}.{key}": cut_style(dim, n) for key, (dim, n) in cuts.items()}
                found.append({pattern: EXPERTS, **ways})
    return found


def _cut(placement: Placement | None, shape: tuple[int, ...], world: int) -> str:
    """The way of a parameter: empty if it is whole, ``no`` if there is none."""
    if not isinstance(placement, Shard) or not placement.dims:
        return ""
    if len(placement.dims) != 1:
        return "no"
    (dim,) = placement.dims
    back = dim - len(shape)
    if back not in (-1, -2):
        return "no"
    kind = _kind(placement, dim, shape[dim], world)
    return {"even": cut_style(back, 1), "packed": cut_style(back, 2)}.get(kind, "no")
