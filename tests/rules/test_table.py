"""Rules written as tables: how lines are parsed, and what they offer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.operators import head_softmax

from paraxis.placement import PARTIAL, REPLICATE, Layout, Placement, Shard
from paraxis.rules import table
from paraxis.rules.table import Line
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of

aten = torch.ops.aten
HALVES = Layout.even(8, 2)


def offered(lines: str | list[str], op: Any, args: Any, *placements: Placement, world: int = 2) -> list[Any]:
    call, _ = call_of(op, args, {}, world)
    rule = table(*([lines] if isinstance(lines, str) else lines))
    return [(s.inputs, s.outputs) for s in rule(call, placements)]


@pytest.mark.parametrize(
    "line",
    ["S(0), R -> S(0)", "P, R -> P", "S(2), S(2) -> S(2); num_heads", "S(-1 x2) -> S(-1)", "S(1), S(1*) -> P; a, b"],
)
def test_a_line_prints_as_it_is_written(line: str) -> None:
    assert str(Line.parse(line)) == line


@pytest.mark.parametrize(
    "line",
    ["S(0)", "S(0) S(1) -> R", "Q -> R", "S() -> R", "S(0 x0) -> S(0)", "R, R -> R", "R -> S(0)", "P -> S(0)",
     "P -> P; heads", "S(0) -> S(0); 3", "S(0), -> S(0)", ""],
)  # fmt: skip
def test_errors_quote_the_line(line: str) -> None:
    with pytest.raises(ValueError) as error:
        table("S(0) -> S(0)", line)
    assert repr(line) in str(error.value)
    with pytest.raises(ValueError, match="at least one line"):
        table()


def test_a_line_applies_where_an_input_is_placed_as_it_says() -> None:
    args, line = (f(4, 8), f(8)), "S(-1), S(0) -> S(-1)"
    expected = [((Shard.of(1, HALVES), Shard.of(0, HALVES)), (Shard.of(1, HALVES),))]
    assert offered(line, aten.mul.Tensor, args, Shard.of(1, HALVES), REPLICATE) == expected
    assert offered(line, aten.mul.Tensor, args, REPLICATE, Shard.of(0, HALVES)) == expected
    assert offered(line, aten.mul.Tensor, args, Shard.of(0, Layout.even(4, 2)), REPLICATE) == []
    both = Shard.of({0: Layout.even(4, 2), 1: HALVES})
    assert offered(line, aten.mul.Tensor, args, both, REPLICATE) == []
    assert offered("P, R -> P", aten.mul.Tensor, args, PARTIAL, REPLICATE) == [((PARTIAL, REPLICATE), (PARTIAL,))]
    assert offered("P, R -> P", aten.mul.Tensor, args, REPLICATE, PARTIAL) == []


def test_a_line_does_not_apply_to_other_sizes_or_numbers_of_tensors() -> None:
    assert offered("S(0), S(0) -> S(0)", aten.mul.Tensor, (f(4, 8), f(8)), Shard.of(0, HALVES), REPLICATE) == []
    assert offered("S(0) -> S(0)", aten.mul.Tensor, (f(8), f(8)), Shard.of(0, HALVES), REPLICATE) == []
    assert offered("S(3) -> S(3)", aten.relu.default, (f(8),), Shard.of(0, HALVES)) == []


def test_copies_are_not_summed() -> None:
    copies = Shard.of(0, Layout.even(8, 4, unit=4))
    assert offered("S(0) -> P", aten.sum.default, (f(8),), copies, world=4) == []
    assert offered("S(0) -> S(0)", aten.rand_like.default, (f(8),), copies, world=4) == []
    assert len(offered("S(0) -> P", aten.sum.default, (f(8),), Shard.of(0, HALVES))) == 1


def test_segments_and_multiples() -> None:
    packed = Layout.concat([(4, Layout.even(4, 2))] * 2)
    (found,) = offered("S(1 x2) -> S(1)", aten.glu.default, (f(3, 8),), Shard.of(1, packed))
    assert found[1] == (Shard.of(1, Layout.even(4, 2)),)
    assert offered("S(1 x2) -> S(1)", aten.glu.default, (f(3, 8),), Shard.of(1, HALVES)) == []
    line, args = "S(0) -> S(0*)", (f(4), 2)
    (found,) = offered(line, aten.repeat_interleave.self_int, args, Shard.of(0, Layout.even(4, 2)))
    assert found[1] == (Shard.of(0, Layout.even(8, 2)),)


def test_numbers_become_local() -> None:
    call, _ = call_of(head_softmax, (f(3, 12), 6), {}, 2)
    (strategy,) = table("S(-1) -> S(-1); num_heads")(call, [Shard.of(1, Layout.even(12, 2))])
    assert strategy.localize is not None
    assert strategy.localize(head_softmax, ["x", 6], {}, 0)[1] == ["x", 3]
    assert strategy.localize(head_softmax, ["x"], {}, 1)[2] == {"num_heads": 3}
    rule = table("S(-1) -> S(-1); num_heads")
    for layout in (Layout.of(12, [[(0, 5)], [(5, 12)]]), Layout.of(12, [[(0, 12)], []])):
        assert not list(rule(call, [Shard.of(1, layout)]))  # through a head; a rank without heads
    with pytest.raises(ValueError, match="no argument 'heads'; it has x, num_heads"):
        list(table("S(-1) -> S(-1); heads")(call, [Shard.of(1, Layout.even(12, 2))]))
