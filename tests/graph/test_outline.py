"""Dividing a program of equal blocks into head, body and tail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.outlines import Toy, alternating, appending, layer, plain, run_pieces, writing
from torch.fx import Graph, GraphModule

from paraxis.graph.outline import Outline, outline, owner_of, same_target, same_tree, written_by

Blocks = Sequence[tuple[torch.Tensor, torch.Tensor]]


def divided(toy: Toy) -> Outline:
    found = toy.divided()
    assert isinstance(found, Outline), found
    return found


def assert_pieces_do_the_same(toy: Toy, found: Outline, counts: Sequence[int] = (2, 3, 4, 7)) -> None:
    """With these numbers of periods, results and what is written into the inputs are those of the full program."""
    for count in counts:
        ours, theirs = toy.inputs(count), toy.inputs(count)
        expected = toy(*theirs)
        results = run_pieces(toy, found, ours, count)
        assert len(results) == len(expected), "every result of the full program"
        order = positions(toy, found, count)
        for i, result in enumerate(results):
            torch.testing.assert_close(result, expected[order[i]], rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def positions(toy: Toy, found: Outline, count: int) -> list[int]:
    """The position in the results of the full program of each result of the pieces, for toys that return all caches in
    a row: results before them, then those of the periods, then the rest."""
    own = len(found.tail.outputs)
    if not found.returned:
        return list(range(own))
    end = max(second for _, second, _ in found.returned) + 1
    further = len(found.returned) * (count - 2)
    return [i if i < end else i + further for i in range(own)] + list(range(end, end + further))


def with_residuals(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """Two values are carried, and the sum that ends a block runs in the next one, with its weight."""
    branch = shared
    for weight, cache in blocks:
        x = torch.addmm(x, branch, weight)
        branch = (x * cache).tanh()
    return [x + branch]


def with_own_constants(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """Every block computes by itself what depends on no block."""
    for weight, _ in blocks:
        x = layer(x, (shared + torch.arange(4.0)).sin(), weight)
    return [x]


def with_first_input(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """Every block takes what the first one took."""
    first = x = x.exp()
    for weight, _ in blocks:
        x = layer(x, shared, weight) - first
    return [x, first]


def passing(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """Results: what the last block returns, an input, a value from before the blocks, a number."""
    before = x.exp()
    x = before
    for weight, _ in blocks:
        x = layer(x, shared, weight)
    return [x, shared, before, 3]


def writing_before(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """What the blocks share is written to before they read it."""
    shared.add_(1)
    return plain(x, shared, blocks)


def summing(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """A sum to which every block adds."""
    total = shared.sin()
    for weight, _ in blocks:
        x = layer(x, shared, weight)
        total = total + x
    return [total]


@pytest.mark.parametrize(
    ("function", "head", "period"),
    [
        (plain, 1, 1),
        (plain, 3, 1),
        (plain, 2, 2),
        (appending, 1, 1),
        (appending, 2, 1),
        (writing, 1, 1),
        (writing, 2, 2),
        (alternating, 2, 2),
        (alternating, 3, 2),
        (with_residuals, 1, 1),
        (with_own_constants, 1, 1),
        (with_first_input, 1, 1),
        (passing, 1, 1),
        (writing_before, 1, 1),
        (summing, 1, 1),
    ],
)
def test_pieces_give_what_the_full_program_does(function: Any, head: int, period: int) -> None:
    toy = Toy(function, head, period)
    assert_pieces_do_the_same(toy, divided(toy))


def test_body_is_as_large_as_a_period_and_the_head_has_the_rest() -> None:
    def calls(piece: Any) -> int:
        return sum(node.op == "call_function" for node in piece.module.graph.nodes)

    found = divided(Toy(plain))
    assert (calls(found.head), calls(found.body), calls(found.tail)) == (4, 4, 1)
    assert (calls(divided(Toy(plain, 3)).head), calls(divided(Toy(plain, 2, 2)).body)) == (12, 8)


def test_new_caches_are_returned_by_every_period() -> None:
    found = divided(Toy(appending))
    assert [(first, second) for first, second, _ in found.returned] == [(2, 3)]
    assert found.passed == {1: found.passed[1]} and found.passed[1] in found.head.outputs, "that of the head"
    assert len(found.carried) == 1
    found = divided(Toy(alternating, 2, 2))
    assert [(first, second) for first, second, _ in found.returned] == [(2, 4), (3, 5)]


def test_two_values_are_carried() -> None:
    assert len(divided(Toy(with_residuals)).carried) == 2


def test_results_that_no_operator_of_the_tail_computes_are_passed() -> None:
    found = divided(Toy(passing))
    assert sorted(found.passed) == [0, 1, 2]
    assert found.tail.outputs == [None, None, None, 3]
    assert found.passed[1].op == "placeholder" and found.passed[2] in found.head.outputs
    assert found.passed[0] in found.first


# -- what is refused ------------------------------------------------------------------------------------------------


def without_blocks(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    return [x + shared]


def numbered(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for i, (weight, _) in enumerate(blocks):
        x = layer(x, shared, weight) * i
    return [x]


def other_operator(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for i, (weight, _) in enumerate(blocks):
        x = (x @ weight).sin() if i == 2 else (x @ weight).cos()
    return [x]


def using_last_weight(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    return [plain(x, shared, blocks)[0] @ blocks[-1][0]]


def using_earlier_result(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    found = []
    for weight, _ in blocks:
        x = layer(x, shared, weight)
        found.append(x)
    return [torch.cat([found[1], x])]


def sharing_writes(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for weight, _ in blocks:
        shared.add_(x @ weight)
        x = layer(x, shared, weight)
    return [x]


def writing_between(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for i, (weight, _) in enumerate(blocks):
        x = layer(x, shared, weight)
        if i == 1:
            shared.add_(1)
    return [x]


def writing_after(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    found = plain(x, shared, blocks)
    shared.add_(1)
    return found


def writing_to_the_next(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for i, (weight, _) in enumerate(blocks):
        x = layer(x, shared, weight)
        if i:
            x.add_(blocks[i - 1][1])
            blocks[i - 1][1].add_(x)
    return [x]


def with_noise(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    noise = [torch.rand_like(shared) for _ in blocks]
    for (weight, _), own in zip(blocks, noise, strict=True):
        x = layer(x, own, weight)
    return [x, *noise]


def with_numbered_constants(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    for i, (weight, _) in enumerate(blocks):
        x = layer(x, torch.tensor([1.0, 2.0, 3.0, float(i)]), weight)
    return [x]


def using_block_before_the_last(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    before = x
    for weight, _ in blocks:
        x, before = layer(before, shared, weight) + x, x
    return [x]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_blocks, "no operator depends on the blocks"),
        (numbered, "no operator of the next blocks does what .*mul"),
        (other_operator, "no operator of the next blocks does what .*cos"),
        (alternating, "no operator of the next blocks does what"),
        (using_last_weight, "of a block is used after the blocks"),
        (using_earlier_result, "of a block that is not the last is used after the blocks"),
        (sharing_writes, "writes to memory that blocks share"),
        (writing_between, "no operator of the next blocks does what|writes to memory that blocks share"),
        (writing_after, "writes to memory that blocks share"),
        (writing_to_the_next, "writes to memory that blocks share|no operator of the next blocks"),
        (with_noise, "no operator of the next blocks does what"),
        (with_numbered_constants, "no operator of the next blocks does what"),
        (using_block_before_the_last, "no operator of the next blocks does what"),
    ],
)
def test_other_programs_are_refused_with_a_reason(function: Any, reason: str) -> None:
    found = Toy(function).divided()
    assert isinstance(found, str)
    assert re.search(reason, found), found


# -- what is the same -----------------------------------------------------------------------------------------------


def test_trees_are_compared_with_the_types_of_their_numbers() -> None:
    def same(a: Any, b: Any) -> bool:
        return same_tree(a, b, lambda x, y: x is y)

    nan = float("nan")
    assert same((1, [2.0, None], {"a": slice(0, 3)}), (1, [2.0, None], {"a": slice(0, 3)}))
    assert same(nan, float("nan"))
    for a, b in ((1, 1.0), (1, True), ([1], [1, 1]), ({"a": 1}, {"b": 1}), (slice(0, 3), slice(0, 4)), (slice(1), 1)):
        assert not same(a, b) and not same(b, a)
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert same([x], [x]) and not same([x], [y]) and not same(x, 1) and not same(1, x)
    assert not same(slice(0, x), slice(0, y)) and same(slice(0, x), slice(0, x))


class Kernel:
    """A call that knows which others do the same."""

    __name__ = "kernel"

    def __init__(self, form: int) -> None:
        self.form = form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.form

    def does_the_same_as(self, other: Any) -> bool:
        return isinstance(other, Kernel) and other.form == self.form


@pytest.mark.parametrize("forms", [(2, 2, 2), (5, 2, 2), (2, 2, 3)])
def test_calls_that_do_the_same_may_stand_for_one_another(forms: tuple[int, ...]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"w{i}") for i in range(3)]
    value = x
    for weight, form in zip(weights, forms, strict=True):
        value = graph.call_function(Kernel(form), (graph.call_function(torch.ops.aten.mm.default, (value, weight)),))
    graph.output((value,))
    found = outline(GraphModule({}, graph), {w: ("weight", i) for i, w in enumerate(weights)}, 1, 1)
    assert isinstance(found, Outline) is (forms[1] == forms[2])


def test_constants_are_the_same_by_value() -> None:
    root = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2), "d": torch.ones(2, dtype=torch.int64)}
    graph = Graph()
    nodes = {name: graph.get_attr(name) for name in root}
    graph.output(tuple(nodes.values()))
    module = torch.nn.Module()
    for name, tensor in root.items():
        module.register_buffer(name, tensor)
    made = GraphModule(module, graph)
    assert same_target(made, nodes["a"], nodes["b"])
    assert not same_target(made, nodes["a"], nodes["c"]) and not same_target(made, nodes["a"], nodes["d"])


def test_memory_that_is_written_to_is_known_by_its_owner() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    view = graph.call_function(torch.ops.aten.select.int, (x, 0, 0))
    write = graph.call_function(torch.ops.aten.copy_.default, (view, y))
    read = graph.call_function(torch.ops.aten.add.Tensor, (write, y))
    marked = graph.call_function(torch.sin, (y,))
    marked.meta["writes"] = True
    assert written_by(write) == [view] and owner_of(view) is x and owner_of(write) is x
    assert written_by(read) == [] and owner_of(read) is read and written_by(marked) == [y]
    each = graph.call_function(torch.ops.aten._foreach_add_.Scalar, ([x, y], 1))
    assert written_by(each) == [x, y]
