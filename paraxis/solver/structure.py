"""How the dimensions of parameters may be split, from how the program uses what is computed from them.

A projection of 64 features may be four heads of 16, or ``[q|k|v]``, or ``[gate|up]``: the views and splits that follow
it show which. Going backwards through the program, every dimension collects its *structures*: its segments and, in
each, the unit that must stay together. A structure and a number of ranks give a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import lcm, prod
from typing import Any

import torch

from ..placement import REPLICATE, Layout, Placement, Shard
from ..rules import Call, Rule, rule_for, structures_for
from ..rules.grouped import operators as grouped_operators
from ..rules.split import bounds, pieces, stride
from ..rules.view import groups
from .program import Program, Step, Value

aten = torch.ops.aten

Structure = tuple[tuple[int, int], ...]
"""Segments of a dimension: (size, unit)."""

MAX_STRUCTURES = 6
"""How many structures of one dimension are considered."""
MAX_UNITS = 512
"""Up to how many units of a dimension all ways to group them are considered."""
MAX_UNBOUND = 64
"""Up to which size an unbound dimension is split index by index."""
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
_CONTRACTED = {
    aten.linear.default: (0, 1, 1),
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, 0),
    aten.matmul.default: (0, 1, -2),
    aten.bmm.default: (0, 1, 1),
}
_CONTRACTED |= dict.fromkeys(grouped_operators(), (0, 1, 1))
"""Matmuls: the positions of the data and of the weight, and the dimension of the weight that is contracted."""
MAX_IMBALANCE = 1.25
"""How much more than its share a rank may have, so that no group of a quantized weight is on two ranks."""
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split", "unbind")


class Candidates:
    """The candidate layouts of every parameter dimension of a program."""

    def __init__(self, program: Program) -> None:
        self.world, self._encodings = program.world, program.encodings
        self._demands: dict[Value, dict[int, list[Structure]]] = defaultdict(dict)
        for step in reversed(program.steps):
            if step.call is not None:
                self._visit(step, step.call)
        for step in program.steps:
            if step.call is None:
                continue
            for i, value in enumerate(step.inputs):
                if value in program.parameters:
                    for dim, size in enumerate(step.call.inputs[i].shape):
                        step.call.layouts[i, dim] = tuple(self.layouts(value, dim, size))

    def layouts(self, value: Value, dim: int, size: Any) -> list[Layout]:
        """The candidate layouts of a dimension: those of the outermost factor that can be split.

        Heads are split before the features inside a head, never both ways.
        """
        if not isinstance(size, int):
            return []
        found = (layouts_of(s, self.world) for s in self.structures(value, dim, size))
        return next((layouts for layouts in found if layouts), [])

    def structures(self, value: Value, dim: int, size: int) -> list[Structure]:
        """The structures of a dimension; by default, one segment of units of one index."""
        return self._demands.get(value, {}).get(dim) or [((size, 1),)]

    # -- going backwards ---------------------------------------------------------------------------------------

    def _add(self, value: Value, dim: int, structures: Iterable[Structure]) -> None:
        """Require one of these structures, as well as what was required before, if both are possible."""
        new = list(structures)
        old = self._demands[value].get(dim)
        if old is None:
            merged = new
        else:
            merged = [r for a in old for b in new if (r := refine(a, b)) is not None]
        self._demands[value][dim] = list(dict.fromkeys(merged or old or new))[:MAX_STRUCTURES]

    def _visit(self, step: Step, call: Call) -> None:
        if call.target in _RESHAPES:
            self._visit_reshape(step, call)
        elif call.op_name in _SPLITS:
            self._visit_split(step, call)
        elif call.target is aten.slice.Tensor:
            self._visit_slice(step, call)
        elif call.target is aten.select.int:
            dim = call.args[1] % call.inputs[0].ndim
            self._split_by_index(step, call, dim)
        if call.target not in _RESHAPES and any(self._demands.get(v) for v in step.outputs):
            self._visit_any(step, call)
        self._visit_encoded(step, call)
        for (i, dim), structures in structures_for(call).items():  # what the rule requires
            self._add(step.inputs[i], dim, structures)

    def _visit_encoded(self, step: Step, call: Call) -> None:
        """The inputs of a layer with a quantized weight are split between groups, where that is nearly even."""
        if call.target not in _CONTRACTED or not self._encodings:
            return
        x, w, w_dim = _CONTRACTED[call.target]
        encoded = self._encodings.get(step.inputs[w])
        last = call.inputs[x].ndim - 1
        size = call.inputs[x].shape[last]
        if encoded is None or not isinstance(size, int):
            return
        unit, block = encoded.units.get(w_dim % call.inputs[w].ndim, (1, 1))
        if 1 < block < size and size % block == 0 and block % unit == 0:
            blocks = size // block
            if -(-blocks // self.world) * self.world <= MAX_IMBALANCE * blocks:
                unit = block
        if unit > 1 and size % unit == 0:
            self._add(step.inputs[x], last, [((size, unit),)])

    def _visit_reshape(self, step: Step, call: Call) -> None:
        """One dimension unflattened: each factor may be the one to split, the outermost first."""
        demands = self._demands.get(step.outputs[0], {})
        for left, right in groups(call.inputs[0].shape, call.out.shape):
            sizes = [call.out.shape[d] for d in right]
            if len(left) != 1 or not sizes or not all(isinstance(n, int) for n in sizes):
                continue
            if len(sizes) == 1:
                if right[0] in demands:
                    self._add(step.inputs[0], left[0], demands[right[0]])
                continue
            if call.inputs[0].ndim == 1:  # a vector that is broadcast: leading ones are no units
                right = [d for d, n in zip(right, sizes, strict=True) if n != 1] or right[-1:]
                sizes = [call.out.shape[d] for d in right]
            if sizes[0] == 1:  # a single unit, such as one head
                self._add(step.inputs[0], left[0], [((prod(sizes), prod(sizes)),)])
                continue
            lifted: list[Structure] = []
            for k, d in enumerate(right):
                inner, outer = prod(sizes[k + 1 :]), prod(sizes[:k])
                if sizes[k] > 1:
                    for structure in demands.get(d) or [((sizes[k], 1),)]:
                        lifted.append(tuple((n * inner, u * inner) for n, u in structure) * outer)
            self._add(step.inputs[0], left[0], lifted)

    def _visit_split(self, step: Step, call: Call) -> None:
        """Each piece becomes a segment, with the structure of the piece."""
        found = pieces(call)
        if found is None:
            return
        dim, sizes = found
        if call.op_name == "unbind":
            self._split_by_index(step, call, dim)
            return
        parts = [self.structures(v, dim, n) for v, n in zip(step.outputs, sizes, strict=True)]
        count = max(len(p) for p in parts)
        joined: list[Structure] = [sum((p[min(k, len(p) - 1)] for p in parts), ()) for k in range(count)]
        self._add(step.inputs[0], dim, joined)

    def _visit_slice(self, step: Step, call: Call) -> None:
        """The slice is a segment, and so is what is before and after it; strided slices interleave their units."""
        found, strided = bounds(call), stride(call)
        if strided is not None:
            dim, every = strided
            inner = self.structures(step.outputs[0], dim, call.out.shape[dim])
            self._add(step.inputs[0], dim, [tuple((n * every, u * every) for n, u in s) for s in inner])
        if found is None:
            return
        dim, start, stop = found
        size = call.inputs[0].shape[dim]
        if start == 0 and stop == size:
            return
        before: Structure = ((start, 1),) if start else ()
        after: Structure = ((size - stop, 1),) if size > stop else ()
        inside = self.structures(step.outputs[0], dim, stop - start)
        self._add(step.inputs[0], dim, [before + s + after for s in inside])

    def _split_by_index(self, step: Step, call: Call, dim: int) -> None:
        """Every index of an unbound dimension is a segment, which cannot be split."""
        size = call.inputs[0].shape[dim]
        if isinstance(size, int) and size <= MAX_UNBOUND:
            self._add(step.inputs[0], dim, [((1, 1),) * size])

    def _visit_any(self, step: Step, call: Call) -> None:
        """Ask the rule which input dimension becomes which output dimension, and pass structures back."""
        rule = rule_for(call.target)
        if rule is None:
            return
        required = structures_for(call)
        for i, value in enumerate(step.inputs):
            tensor = call.inputs[i]
            for dim, size in enumerate(tensor.shape):
                if not isinstance(size, int) or size < 2:
                    continue
                unit = required[i, dim][0][0][1] if (i, dim) in required else 1
                probe = Layout.of(size, [[(0, unit)], [(unit, size)]])
                for out, out_dim in self._follow(call, rule, i, dim, probe):
                    demand = self._demands.get(step.outputs[out], {}).get(out_dim)
                    if demand:
                        self._add(value, dim, demand)

    def _follow(self, call: Call, rule: Rule, i: int, dim: int, probe: Layout) -> set[tuple[int, int]]:
        """The (output, dimension) pairs to which a rule carries a layout of an input dimension."""
        placements: list[Placement] = [REPLICATE] * len(call.inputs)
        placements[i] = Shard.of(dim, probe)
        return {
            (out, d)
            for strategy in rule(call, placements)
            if strategy.inputs[i] == placements[i]
            for out, placement in enumerate(strategy.outputs)
            if isinstance(placement, Shard)
            for d, layout in placement.layouts
            if layout == probe
        }


def layouts_of(structure: Structure, world: int) -> list[Layout]:
    """The layouts of a structure: every segment is split separately; with fewer units than ranks, ranks share units.

    The first is the most even one. It may separate units that belong together (query heads of one key/value head, which
    the weight does not show), so there is one more for every way to group them. Beside larger segments, small ones may
    be replicated: a single key/value head may not be viewed as a head.
    """
    structure = tuple((size, unit) for size, unit in structure if size)
    if not structure:
        return []
    layouts = [Layout.concat([(size, Layout.even(size, world, unit)) for size, unit in structure])]
    for count in _groupings(structure, world):
        if all((size // unit) % count == 0 for size, unit in structure):
            layouts.append(Layout.concat([(n, Layout.grouped(n, world, unit, count)) for n, unit in structure]))
    largest = max(size for size, _ in structure)
    if any(size < largest for size, _ in structure):
        parts = [(n, Layout.even(n, world, unit) if n == largest else Layout.full(world)) for n, unit in structure]
        layouts.append(Layout.concat(parts))
    return [layout for layout in dict.fromkeys(layouts) if not layout.is_full]


def _groupings(structure: Structure, world: int) -> list[int]:
    """Numbers of groups in which the units may belong together, where groups and an even split disagree."""
    counts = {size // unit for size, unit in structure}
    units = max(counts)
    if units > MAX_UNITS or all(unit == 1 for _, unit in structure):
        return []
    divisors = [g for g in range(2, units) if units % g == 0]
    return [g for g in divisors if units % world or (world % g and g % world)]


def refine(a: Structure, b: Structure) -> Structure | None:
    """The coarsest structure that is finer than both: the segments of both, with units that both allow."""
    if sum(n for n, _ in a) != sum(n for n, _ in b):
        return None
    result: list[tuple[int, int]] = []
    left, right = list(a), list(b)
    done_a = done_b = 0  # how much of the current segments is done
    while left and right:
        (n, u), (m, v) = left[0], right[0]
        size = min(n - done_a, m - done_b)
        unit = lcm(u, v)
        divisible = size % unit == 0 and done_a % u == 0 and done_b % v == 0
        result.append((size, unit if divisible else size))
        done_a, done_b = done_a + size, done_b + size
        if done_a == n:
            done_a, left = 0, left[1:]
        if done_b == m:
            done_b, right = 0, right[1:]
    return tuple(result)
