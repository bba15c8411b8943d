"""How parameters may be split, from their uses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rules.operators import head_softmax, packed_gate
from solver.programs import traced

from paraxis.placement import Layout
from paraxis.rules import register, sample, table, temporary_rules
from paraxis.solver import Candidates, Program, Value
from paraxis.solver.structure import Structure, layouts_of, refine


def edges(structure: Structure) -> set[int]:
    """Where segments end."""
    ends, at = set(), 0
    for size, _ in structure:
        at += size
        ends.add(at)
    return ends


def splits(structure: Structure) -> set[int]:
    """Where a rank may end: at every unit."""
    places, at = set(), 0
    for size, unit in structure:
        places |= set(range(at, at + size + 1, unit))
        at += size
    return places


# -- the algebra ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (((12, 1),), ((12, 4),), ((12, 4),)),
        (((12, 2),), ((12, 3),), ((12, 6),)),
        (((12, 1),), ((4, 1), (8, 2)), ((4, 1), (8, 2))),
        (((8, 4), (4, 2)), ((12, 1),), ((8, 4), (4, 2))),
        (((8, 4),), ((3, 1), (5, 1)), ((3, 3), (5, 5))),
        (((16, 4),), ((2, 1), (8, 1), (6, 1)), ((2, 2), (8, 8), (6, 6))),
        (((16, 4),), ((4, 1), (12, 1)), ((4, 4), (12, 4))),
    ],
)
def test_refinement_is_symmetric(a: Structure, b: Structure, expected: Structure) -> None:
    assert refine(a, b) == expected
    assert refine(b, a) == expected


def test_refine_of_different_sizes_is_nothing() -> None:
    assert refine(((8, 1),), ((4, 1),)) is None


@pytest.mark.parametrize("seed", range(200))
def test_refine_by_splits(seed: int) -> None:
    """Inside a segment, the refinement is split only where both may be; between segments, where either has an edge."""
    rng = random.Random(seed)

    def structure(total: int = 24) -> Structure:
        parts, left = [], total
        while left:
            size = rng.choice([n for n in range(1, left + 1) if left - n != 1 or n == left])
            parts.append((size, rng.choice([u for u in range(1, size + 1) if size % u == 0])))
            left -= size
        return tuple(parts)

    a, b = structure(), structure()
    result = refine(a, b)
    assert result is not None and refine(b, a) == result
    assert edges(result) == edges(a) | edges(b)
    assert splits(result) - edges(result) - {0} <= splits(a) & splits(b)


def test_layout_of_segments() -> None:
    assert layouts_of(((64, 16),), 2) == [Layout.even(64, 2)]
    assert layouts_of(((8, 4), (4, 4), (4, 4)), 2) == [Layout.of(16, [[(0, 4), (8, 16)], [(4, 16)]])], (
        "one KV head on both ranks, the queries split"
    )
    assert layouts_of(((64, 16),), 8) == [Layout.even(64, 8, 16)]
    assert layouts_of(((6, 1), (6, 1)), 2) == [Layout.even(6, 2)]


def test_layout_of_a_single_unit_is_none() -> None:
    assert layouts_of(((16, 16),), 4) == []


def test_units_that_do_not_divide() -> None:
    assert layouts_of(((48, 16),), 2) == [Layout.of(48, [[(0, 32)], [(32, 48)]])]
    assert layouts_of(((48, 16),), 4) == [Layout.of(48, [[(0, 16)], [(0, 16)], [(16, 32)], [(32, 48)]])]
    assert layouts_of(((7, 1),), 2) == [Layout.of(7, [[(0, 4)], [(4, 7)]])]


def test_units_that_may_belong_together() -> None:
    """Fourteen query heads on eight ranks: alone, in two groups of seven or in seven of two."""
    alone, in_two, in_seven = layouts_of(((28, 2),), 8)
    assert [alone.local_size(28, r) // 2 for r in range(8)] == [2, 2, 2, 2, 2, 2, 1, 1]
    assert [in_two.local_size(28, r) // 2 for r in range(8)] == [2, 2, 2, 1, 2, 2, 2, 1]
    assert in_two.expand(28, 4) == ((14, 18),)
    assert [in_seven.local_size(28, r) // 2 for r in range(8)] == [1, 1, 2, 2, 2, 2, 2, 2]


# -- reading programs ----------------------------------------------------------------------------------------------


def found(function: Callable[..., Any], width: int, out: int, world: int = 2) -> tuple[Candidates, Value, Program]:
    """The candidates of one weight [out, width] in a function of x and the weight."""
    program = traced(function, [torch.empty(2, 6, width)], [torch.empty(out, width)], world)
    (value,) = program.parameters
    return Candidates(program), value, program


def rows(function: Callable[..., Any], width: int, out: int, world: int = 2) -> list[Layout]:
    candidates, value, _ = found(function, width, out, world)
    return candidates.layouts(value, 0, out)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(2, 6, count, x.shape[-1] // count).transpose(1, 2)


def test_plain_features() -> None:
    assert rows(lambda x, w: F.relu(F.linear(x, w)), 8, 12) == [Layout.even(12, 2)]
    assert rows(lambda x, w: F.relu(F.linear(x, w)), 8, 9) == [Layout.of(9, [[(0, 5)], [(5, 9)]])]


def test_heads_are_not_split() -> None:
    function = lambda x, w: heads(F.linear(x, w), 4).softmax(-1)  # noqa: E731
    assert rows(function, 8, 12) == [Layout.even(12, 2, unit=3)]
    assert rows(function, 8, 12, world=8) == [Layout.even(12, 8, unit=3)], "four heads on eight ranks"


def test_a_single_head_is_not_split() -> None:
    assert rows(lambda x, w: heads(F.linear(x, w), 1).softmax(-1), 8, 12) == []


def test_query_key_value_in_one() -> None:
    def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(t, 4) for t in F.linear(x, w).split(16, dim=-1))
        return F.scaled_dot_product_attention(q, k, v)

    assert rows(attention, 8, 48) == [Layout.concat([(16, Layout.even(16, 2))] * 3)]


def test_unequal_segments_of_grouped_queries() -> None:
    def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, w).split([16, 4, 4], dim=-1)
        return F.scaled_dot_product_attention(heads(q, 8), heads(k, 2), heads(v, 2), enable_gqa=True)

    for world in (2, 4):
        parts = [(16, Layout.even(16, world, 2)), *[(4, Layout.even(4, world, 2))] * 2]
        queries_only = [parts[0], *[(4, Layout.full(world))] * 2]
        assert rows(attention, 8, 24, world) == [Layout.concat(parts), Layout.concat(queries_only)]


def test_gate_and_up_in_one() -> None:
    def chunked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w).chunk(2, dim=-1)
        return F.silu(gate) * up

    def sliced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        both = F.linear(x, w)
        return F.silu(both[..., :6]) * both[..., 6:]

    expected = [Layout.concat([(6, Layout.even(6, 2))] * 2)]
    assert rows(chunked, 8, 12) == expected
    assert rows(sliced, 8, 12) == expected


def test_interleaved_heads() -> None:
    """``[head, qkv, size]``: each head has its own q, k and v, so the split is between heads."""

    def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, w).view(2, 6, 4, 3 * 2).transpose(1, 2).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v)

    assert rows(attention, 8, 24) == [Layout.even(24, 2, unit=6)]


def test_heads_inside_three() -> None:
    """``[qkv, head, size]`` by a view and an unbind."""

    def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, w).view(2, 6, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v)

    assert rows(attention, 8, 24) == [Layout.concat([(8, Layout.even(8, 2, 2))] * 3)]


def test_uses_are_combined() -> None:
    """Two uses of a result: split where both allow it."""

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.linear(x, w)
        return heads(y, 4).softmax(-1), F.relu(y)

    assert rows(both, 8, 24) == [Layout.even(24, 2, unit=6)]


def test_the_rows_of_an_embedding_may_be_uneven() -> None:
    program = traced(lambda ids, w: F.embedding(ids, w), [torch.zeros(2, 3, dtype=torch.long)], [torch.empty(13, 8)], 2)
    Candidates(program)
    (step,) = [s for s in program.steps if s.call is not None]
    assert step.call is not None and step.call.layouts[0, 0] == (Layout.even(13, 2),)


def test_structures_of_tables_reach_the_weight() -> None:
    """Heads that an operator counts, and segments that it splits."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return packed_gate(head_softmax(F.linear(x, w), 12))

    x = torch.rand(4, 12, dtype=torch.float64)
    with temporary_rules():
        register(head_softmax, samples=[sample(head_softmax, x, 6)])(table("S(-1) -> S(-1); num_heads"))
        register(packed_gate, samples=[sample(packed_gate, x)])(table("S(-1 x2) -> S(-1)", "S(0) -> S(0)"))
        program = traced(function, [torch.empty(4, 8)], [torch.empty(60, 8)], 4)
        candidates = Candidates(program)
        (weight,) = program.parameters
        assert candidates.structures(weight, 0, 60) == [((30, 5), (30, 5))]
        (layout, *_) = candidates.layouts(weight, 0, 60)
        assert [layout.local_size(60, rank) for rank in range(4)] == [20, 20, 10, 10]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no grouped matmul")
def test_grouped_matmuls_are_split_in_units_of_16_bytes() -> None:
    """``[gate|up]`` after torch's grouped matmul: each half separately, in units of eight numbers."""

    def experts(x: torch.Tensor, ends: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = torch.ops.aten._grouped_mm.default(x, w, ends).chunk(2, dim=-1)
        return F.silu(gate) * up

    inputs = [torch.randn(5, 16, dtype=torch.bfloat16), torch.tensor([2, 5], dtype=torch.int32)]
    program = traced(experts, inputs, [torch.randn(2, 16, 96, dtype=torch.bfloat16)], world=4)
    (weight,) = program.parameters
    half = Layout.even(48, 4, 8)
    assert Candidates(program).layouts(weight, 2, 96)[0] == Layout.concat([(48, half)] * 2)
    assert [half.local_size(48, rank) for rank in range(4)] == [16, 16, 8, 8]
