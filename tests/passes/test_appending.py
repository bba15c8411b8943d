"""Caches that grow in place, and what was taken from them before."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.fx import Graph, GraphModule

from paraxis.passes.appending import append, grow_in_place
from paraxis.passes.appending import append as appended
from paraxis.passes.rewrite import named

aten = torch.ops.aten


def rows(count: int) -> torch.Tensor:
    return torch.randn(2, 3, count, 4)


@pytest.mark.parametrize("rows_first", [False, True])
def test_like_a_concatenation_for_any_number_of_steps(rows_first: bool) -> None:
    cache, whole, moved = torch.tensor([]), torch.empty(2, 3, 0, 4), 0
    for step in range(300):
        new = rows(7 if step == 0 else 1 + step % 3)
        before = cache.data_ptr()
        cache, whole = append(cache, new, 2, rows_first), torch.cat([whole, new], 2)
        moved += cache.data_ptr() != before
        assert torch.equal(cache, whole)
    assert moved < 20, "it has room for what comes"


@pytest.mark.parametrize("rows_first", [False, True])
def test_what_was_returned_before_stays(rows_first: bool) -> None:
    """Two continuations of the same cache, and of a part of it."""
    append = partial(appended, rows_first=rows_first)
    start = append(torch.tensor([]), rows(5), 2)
    kept = start.clone()
    first, second = rows(2), rows(2)
    a, b = append(start, first, 2), append(start, second, 2)
    shorter = append(a[:, :, :3], second, 2)
    later = append(start[:, :, 1:], first, 2)
    assert a.data_ptr() == start.data_ptr() and b.data_ptr() != start.data_ptr()
    assert torch.equal(start, kept)
    assert torch.equal(a, torch.cat([kept, first], 2)) and torch.equal(b, torch.cat([kept, second], 2))
    assert torch.equal(shorter, torch.cat([kept[:, :, :3], second], 2))
    assert torch.equal(later, torch.cat([kept[:, :, 1:], first], 2))


def test_other_batches_and_modes() -> None:
    """Reordered for beams, and in and out of inference mode."""
    with torch.inference_mode():
        cache = append(torch.tensor([]), rows(5), 2)
    new = rows(1)
    picked = cache[torch.tensor([1, 1])].clone()
    assert torch.equal(append(picked, new, 2), torch.cat([picked, new], 2))
    assert torch.equal(append(cache, new, 2), torch.cat([cache, new], 2))
    grown = rows(5).requires_grad_()
    append(grown, new, 2).sum().backward()
    assert grown.grad is not None


@pytest.mark.parametrize(("dim", "kept", "expected"), [(-2, True, 1), (-2, False, 0), (1, True, 0)])
def test_only_caches(dim: int, kept: bool, expected: int) -> None:
    """What is no result of the program, or grows elsewhere, is left alone."""
    graph = Graph()
    past, new = graph.placeholder("past"), graph.placeholder("new")
    both = graph.call_function(aten.cat.default, ([past, new], dim))
    both.meta["val"] = torch.empty(2, 3, 6, 4, device="meta")
    graph.output(graph.call_function(named(lambda x: x, "keep_sharded"), (both,)) if kept else both)
    module = GraphModule({}, graph)
    assert grow_in_place(module) == expected
    a, b = rows(5), rows(1) if dim == -2 else rows(5)
    assert torch.equal(module(a, b), torch.cat([a, b], dim))


def test_the_operator_says_how_its_result_is_laid_out() -> None:
    """What a compiler is told must be so, whatever the cache was."""
    new = rows(2)
    for past in (torch.tensor([]), rows(5), rows(5).transpose(0, 1).contiguous().transpose(0, 1), rows(9)[:, :, 1:4]):
        told = torch.ops.paraxis.append_rows(past.to("meta"), new.to("meta"))
        found = torch.ops.paraxis.append_rows(past, new)
        again = torch.ops.paraxis.append_rows(found, new)  # in place
        assert (found.shape, found.stride()) == (told.shape, told.stride()) and again.stride() == told.stride()
        assert again.data_ptr() == found.data_ptr()
