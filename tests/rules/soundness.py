"""Ground truth for rules: run a strategy on shards, put the results together, compare with the whole.

Nothing here knows how a rule works. A call is given with real tensors; the rule is asked for its strategies under many
input placements; each strategy is carried out for every rank in turn, as the rewriter would emit it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Partial, Placement, Shard, local_shape
from paraxis.rules import FREE, Call, Given, Strategy, Tensor, accepts_free, rule_for

aten = torch.ops.aten


@dataclass
class Report:
    """What was tried for one call."""

    checked: set[tuple[tuple[str, ...], tuple[str, ...], str]] = field(default_factory=set)
    """Strategies that were carried out: placements of inputs, of outputs, kind."""
    wrong: list[str] = field(default_factory=list)

    @property
    def sharded(self) -> int:
        return len(self.checked)


# -- placements to try ---------------------------------------------------------------------------------------------


def layouts(size: int, world: int) -> list[Layout]:
    """Ways to cut a dimension of this size, from the plain to the odd; none that every rank holds whole."""
    found: list[Layout] = []
    if size < 2:
        return found
    if size >= world or world % size == 0:
        found.append(Layout.even(size, world))  # uneven, or with copies, as the size has it
    if size >= 4:
        a = size // 2  # packed from two segments, in general unequal ones
        if min(a, size - a) >= world or world % a == 0:
            parts = [(n, Layout.even(n, world)) for n in (a, size - a) if n >= world or world % n == 0]
            if len(parts) == 2:
                found.append(Layout.concat(parts))
        found.append(Layout.concat([(2, Layout.full(world)), (size - 2, Layout.even(size - 2, world))])
                     if size - 2 >= world else Layout.even(size, world))  # fmt: skip
    if size % (2 * world) == 0:
        found.append(Layout.even(2 * world, world))  # interleaved
    if world == 4 and size % 2 == 0:
        found.append(Layout.even(size, 4, unit=size // 2))  # two groups on two ranks each
    found.append(Layout.of(size, [[(0, size)], *[[]] * (world - 1)]))  # all of it on the first rank
    found.append(Layout.of(size, [[(1, size)], [(0, 1)], *[[(0, 2)]] * (world - 2)]))
    return [x for x in dict.fromkeys(found) if not x.is_full]


def placements(shape: Sequence[int], world: int) -> list[Placement]:
    """Boxes with one sharded dimension, some with two, and the shared one."""
    found: list[Placement] = [Shard.of(d, x) for d, n in enumerate(shape) for x in layouts(n, world)]
    pairs = [(a, b) for a in range(len(shape)) for b in range(a + 1, len(shape))]
    for a, b in pairs:
        if world == 4 and shape[a] % 2 == 0 and shape[b] % 2 == 0:
            outer = Layout.even(shape[a], 4, unit=shape[a] // 2)
            half = shape[b] // 2
            inner = Layout.of(shape[b], [[(r % 2 * half, (r % 2 + 1) * half)] for r in range(4)])
            found.append(Shard.of({a: outer, b: inner}))
    return [*found, SHARED]


def givens(call: Call, world: int, limit: int = 400) -> list[tuple[Given, ...]]:
    """Combinations of input placements: one placed and the others whole, all alike, and some mixtures."""
    per_input = [placements(t.shape, world) for t in call.inputs]
    whole: list[Given] = [REPLICATE] * len(call.inputs)
    found: list[tuple[Given, ...]] = []
    for i, options in enumerate(per_input):
        for p in [*options, PARTIAL]:
            found.append(tuple([*whole[:i], p, *whole[i + 1 :]]))
    if len(call.inputs) > 1:
        found.append((PARTIAL,) * len(call.inputs))
        for p in dict.fromkeys(p for options in per_input for p in options):
            found.append(tuple(p if p in o else REPLICATE for o in per_input))
        random = torch.Generator().manual_seed(len(call.inputs))
        for _ in range(40):
            picks = [torch.randint(len(o), (), generator=random) for o in per_input]
            found.append(tuple(o[k] for o, k in zip(per_input, picks)))
    if accepts_free(call.target):
        for i, t in enumerate(call.inputs):
            for d, n in enumerate(t.shape):
                call.layouts[i, d] = tuple(layouts(n, world))
        bound = [[REPLICATE, PARTIAL, *per_input[i][:6]] if i == 0 else [FREE] for i in range(len(call.inputs))]
        found += list(product(*bound))
        found += [tuple(FREE if j == i else REPLICATE for j in range(len(whole))) for i in range(len(whole))]
    return list(dict.fromkeys(found))[:limit]


# -- carrying a strategy out ---------------------------------------------------------------------------------------


def indices(layout: Layout, size: int, rank: int) -> list[int]:
    return [i for i in range(size) if any(a <= i % layout.period < b for a, b in layout.ranges[rank])]


def cut(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The box of a rank."""
    if isinstance(placement, Shard):
        for dim, layout in placement.layouts:
            tensor = tensor.index_select(dim, torch.tensor(indices(layout, tensor.shape[dim], rank), dtype=torch.long))
    return tensor


def terms(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Random terms that sum to the tensor."""
    if tensor.dtype == torch.bool:
        return [tensor, *[torch.zeros_like(tensor)] * (world - 1)]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        rest = [torch.randn(tensor.shape, dtype=tensor.dtype) for _ in range(world - 1)]
    else:
        rest = [torch.randint(0, 5, tensor.shape).to(tensor.dtype) for _ in range(world - 1)]
    return [tensor - reduce(operator.add, rest), *rest]


def assemble(parts: list[torch.Tensor], placement: Placement, whole: torch.Tensor) -> torch.Tensor | str:
    """The tensor that the ranks hold together, or what is wrong with it."""
    world = len(parts)
    for rank, part in enumerate(parts):
        expected = local_shape(placement, whole.shape, rank)
        if tuple(part.shape) != expected:
            return f"rank {rank} holds {tuple(part.shape)}, its placement says {expected}"
    if isinstance(placement, Partial):
        return reduce(operator.add, parts)
    result = torch.zeros_like(parts[0].new_empty(whole.shape))
    written = torch.zeros(whole.shape, dtype=torch.bool)
    for rank in range(world):
        box = placement.dims if isinstance(placement, Shard) else {}
        index = [indices(box[d], n, rank) if d in box else list(range(n)) for d, n in enumerate(whole.shape)]
        mesh = torch.meshgrid(*[torch.tensor(i, dtype=torch.long) for i in index], indexing="ij") if index else ()
        if not parts[rank].numel():
            continue
        old, seen = result[mesh], written[mesh]
        if bool(seen.any()) and not same(torch.where(seen, old, parts[rank]), parts[rank]):
            return f"rank {rank} disagrees with another rank that holds the same elements"
        result[mesh], written[mesh] = parts[rank], True
    return result if bool(written.all()) else "some elements are on no rank"


def same(a: torch.Tensor, b: torch.Tensor, loose: bool = False) -> bool:
    """Equal, up to the rounding of float64; ``loose``: of float32."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    error = 1e-4 if loose or a.dtype not in (torch.float64, torch.complex128) else 1e-9
    return bool(torch.allclose(a, b, rtol=error, atol=error, equal_nan=True))


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def call_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> tuple[Call, list[torch.Tensor]]:
    """The call as the solver sees it, and its tensors in order."""
    tensors: list[torch.Tensor] = []

    def abstract(x: Any) -> Any:
        if not is_tensor(x):
            return x
        tensors.append(x)
        return Tensor(len(tensors) - 1, tuple(x.shape), x.dtype)

    a, k = pytree.tree_map(abstract, (args, kwargs))
    results = [t for t in pytree.tree_leaves(target(*args, **kwargs)) if is_tensor(t)]
    outputs = tuple(Tensor(i, tuple(t.shape), t.dtype) for i, t in enumerate(results))
    inputs = tuple(Tensor(i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors))
    return Call(target, a, k, inputs, outputs, world=world), tensors


def fits(tensors: Iterable[Tensor], placed: Iterable[Placement]) -> bool:
    """The solver's own test: the layouts divide the sizes."""
    return all(
        x.fits(t.shape[d]) for t, p in zip(tensors, placed, strict=True) if isinstance(p, Shard) for d, x in p.layouts
    )


def carry_out(
    call: Call, strategy: Strategy, tensors: list[torch.Tensor], args: Any, kwargs: Any, world: int
) -> list[list[torch.Tensor]]:
    """The results of every rank."""
    summed = {i: terms(t, world) for i, t in enumerate(tensors) if isinstance(strategy.inputs[i], Partial)}
    results = []
    for rank in range(world):
        locals_ = iter(
            [summed[i][rank] if i in summed else cut(t, strategy.inputs[i], rank) for i, t in enumerate(tensors)]
        )
        a, k = pytree.tree_map(lambda x, taken=locals_: next(taken) if is_tensor(x) else x, (args, kwargs))
        target = aten.reshape.default if call.target is aten.view.default else call.target
        a = list(a)
        if strategy.localize is not None:
            target, a, k = strategy.localize(target, a, k, rank)
        results.append([t for t in pytree.tree_leaves(target(*a, **k)) if is_tensor(t)])
    return results


def problem(
    call: Call, strategy: Strategy, tensors: list[torch.Tensor], args: Any, kwargs: Any, world: int, values: bool
) -> str | None:
    """What is wrong with a strategy, if anything."""
    for t, p in (*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)):
        if isinstance(p, Shard) and any(not 0 <= d < t.ndim for d in p.dims):
            return f"a placement {p} names a dimension that a tensor of shape {t.shape} does not have"
    if not fits(call.inputs, strategy.inputs):
        return None  # the solver leaves it out
    if not fits(call.outputs, strategy.outputs):
        return None
    whole = [t for t in pytree.tree_leaves(call.target(*args, **kwargs)) if is_tensor(t)]
    loose = any(t.dtype == torch.float32 for t in tensors)
    try:
        results = carry_out(call, strategy, tensors, args, kwargs, world)
    except Exception as error:
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0]}"
    for i, placement in enumerate(strategy.outputs):
        parts = [r[i] for r in results]
        if not values:
            parts = [torch.zeros_like(p) for p in parts]
        got = assemble(parts, placement, whole[i])
        if isinstance(got, str):
            return f"output {i}: {got}"
        if values and not same(got, whole[i], loose):
            return f"output {i}: the shards together are not the result"
    return None


def check(
    target: Any,
    *args: Any,
    worlds: Sequence[int] = (2, 4),
    values: bool = True,
    rule: Callable[..., Iterable[Strategy]] | None = None,
    skip_kinds: Sequence[str] = (),
    **kwargs: Any,
) -> Report:
    """Try every strategy that the rule of ``target`` offers for this call. ``values=False``: only the shapes."""
    report = Report()
    for world in worlds:
        call, tensors = call_of(target, args, kwargs, world)
        use = rule or rule_for(target)
        assert use is not None, f"{target} has no rule"
        tried: set[Any] = set()
        for given in givens(call, world):
            for strategy in use(call, given):
                key = (strategy.inputs, strategy.outputs)
                if strategy.kind in skip_kinds or key in tried:
                    continue
                tried.add(key)
                found = problem(call, strategy, tensors, args, kwargs, world, values)
                shown = tuple(map(str, strategy.inputs)), tuple(map(str, strategy.outputs)), strategy.kind
                if found is not None:
                    report.wrong.append(f"{target} on {world} ranks, {shown[0]} -> {shown[1]}: {found}")
                elif fits(call.inputs, strategy.inputs) and fits(call.outputs, strategy.outputs):
                    report.checked.add(shown)
    return report


# -- calls made from schemas ---------------------------------------------------------------------------------------

_SCALARS = {"number": 2, "Scalar": 2, "int": 1, "SymInt": 1, "float": 0.5, "bool": False, "str": "none"}


def from_schema(op: Any, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an operator: tensors of these shapes in turn, small numbers for the rest that is required."""
    turn = iter([*shapes, *[shapes[-1]] * 8])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() and kind != "Tensor":
            if not argument.kwarg_only:
                break
            continue
        if kind == "Tensor":
            value: Any = random_tensor(next(turn), dtype)
        elif kind in _SCALARS:
            value = _SCALARS[kind]
        elif kind.startswith("Optional"):
            value = None
        else:
            raise NotImplementedError(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Values inside most functions' domains, all different."""
    if dtype == torch.bool:
        return torch.rand(tuple(shape)) > 0.5
    if dtype.is_floating_point:
        return torch.rand(tuple(shape), dtype=dtype) * 0.8 + 0.1
    if dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype)
    return torch.randint(1, 7, tuple(shape), dtype=dtype)


def working_call(op: Any, shapes: Sequence[Sequence[int]]) -> tuple[list[Any], dict[str, Any]] | None:
    """A call of the operator that runs, with the first dtype it takes."""
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float32, torch.complex128):
        try:
            args, kwargs = from_schema(op, shapes, dtype)
            results = op(*args, **kwargs)
        except Exception:
            continue
        if any(is_tensor(t) for t in pytree.tree_leaves(results)):
            return args, kwargs
    return None


def pointwise_overloads(rules: Iterable[Any]) -> Iterator[Any]:
    """The operators among the registered ones that torch tags as pointwise."""
    for op in rules:
        if isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags:
            yield op
