"""KV cache append in place, and tensors that were returned before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from paraxis.optimize.kv_cache_append import append, append_kv_cache_in_place, drop_empty_parts
from paraxis.tensor.graph_io import wrap_shard

aten = torch.ops.aten


Append = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
AS_FUNCTION_AND_OPERATOR = pytest.mark.parametrize(
    "add", [lambda past, new: append(past, new, 2), torch.ops.paraxis.append_rows], ids=["function", "operator"]
)


def rows(count: int) -> torch.Tensor:
    return torch.randn(2, 3, count, 4)


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


@AS_FUNCTION_AND_OPERATOR
def test_equal_to_a_concatenation_for_any_number_of_steps(add: Append) -> None:
    cache, full, moved = torch.tensor([]), torch.empty(2, 3, 0, 4), 0
    for step in range(300):
        new = rows(7 if step == 0 else 1 + step % 3)
        before = cache.data_ptr()
        cache, full = add(cache, new), torch.cat([full, new], 2)
        moved += cache.data_ptr() != before
        assert torch.equal(cache, full)
    assert moved < 20, "it has free rows for the next ones"


@AS_FUNCTION_AND_OPERATOR
def test_tensors_returned_before_do_not_change(add: Append) -> None:
    """Two continuations of the same cache, and of a crop of it."""
    start = add(torch.tensor([]), rows(5))
    copied = start.clone()
    first, second = rows(2), rows(2)
    a, b = add(start, first), add(start, second)
    shorter = add(a[:, :, :3], second)
    later = add(start[:, :, 1:], first)
    assert a.data_ptr() == start.data_ptr() and b.data_ptr() != start.data_ptr()
    assert torch.equal(start, copied)
    assert torch.equal(a, torch.cat([copied, first], 2)) and torch.equal(b, torch.cat([copied, second], 2))
    assert torch.equal(shorter, torch.cat([copied[:, :, :3], second], 2))
    assert torch.equal(later, torch.cat([copied[:, :, 1:], first], 2))


@AS_FUNCTION_AND_OPERATOR
def test_aliasing_is_visible_to_torch(add: Append) -> None:
    """One memory is one storage: a result that lies where its argument does shares storage and version with it."""
    start = add(torch.tensor([]), rows(5))
    longer = add(start, rows(1))
    assert longer.data_ptr() == start.data_ptr() and same_storage(longer, start)
    assert longer._version == start._version
    other = add(start, rows(1))
    assert not same_storage(other, start)
    assert longer.untyped_storage().nbytes() >= longer.numel() * longer.element_size()


@AS_FUNCTION_AND_OPERATOR
def test_other_batches_and_modes(add: Append) -> None:
    """Reordered for beams, and in and out of inference mode."""
    with torch.inference_mode():
        cache = add(torch.tensor([]), rows(5))
    new = rows(1)
    picked = cache[torch.tensor([1, 1])].clone()
    with torch.no_grad():
        assert torch.equal(add(picked, new), torch.cat([picked, new], 2))
        assert torch.equal(add(cache, new), torch.cat([cache, new], 2))
        with torch.inference_mode():
            assert torch.equal(add(add(cache, new), new), torch.cat([cache, new, new], 2))


def test_gradients_pass_through_an_append() -> None:
    cache, new = rows(5).requires_grad_(), rows(1)
    append(cache, new, 2).sum().backward()
    assert cache.grad is not None


@pytest.mark.parametrize(("dim", "sharded", "expected"), [(-2, True, 1), (-2, False, 0), (1, True, 0)])
def test_only_caches(dim: int, sharded: bool, expected: int) -> None:
    """What does not leave the program sharded, or grows in another dimension, stays a concatenation."""
    graph = Graph()
    past, new = graph.placeholder("past"), graph.placeholder("new")
    both = graph.call_function(aten.cat.default, ([past, new], dim))
    both.meta["val"] = torch.empty(2, 3, 6, 4, device="meta")
    wrapped = graph.call_function(wrap_shard, (both, "", (), "")) if sharded else both
    graph.output(wrapped)
    module = GraphModule({}, graph)
    assert append_kv_cache_in_place(module) == expected
    if sharded:
        wrapped.target = lambda x, *_: x  # there is no group to wrap it for
        module.recompile()
    a, b = rows(5), rows(1) if dim == -2 else rows(5)
    assert torch.equal(module(a, b), torch.cat([a, b], dim))


def concatenation(first: Any, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> GraphModule:
    """A concatenation of tensors of these shapes; the first may be a constant."""
    graph = Graph()
    dtypes = dtypes or (torch.float32, torch.float32)
    parts = [graph.call_function(aten.detach.default, (graph.get_attr("first"),)) if first is not None else None]
    parts = [parts[0] or graph.placeholder("past"), graph.placeholder("new")]
    for part, shape, dtype in zip(parts, shapes, dtypes, strict=True):
        part.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    both = graph.call_function(aten.cat.default, (parts, -2))
    both.meta["val"] = torch.empty(2, 3, 5, 4, dtype=torch.promote_types(*dtypes), device="meta")
    graph.output(both)
    return GraphModule(nn.ParameterDict() if first is None else _with(first), graph)


def _with(first: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("first", first)
    return module


def test_empty_parts_are_dropped() -> None:
    module = concatenation(torch.empty(0), (0,), (2, 3, 5, 4))
    assert drop_empty_parts(module) == 1
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [aten.cat.default]
    new = rows(5).transpose(0, 1).contiguous().transpose(0, 1)
    result = module(new)
    assert torch.equal(result, new) and result.is_contiguous() and not same_storage(result, new)


def test_empty_parts_are_dropped_for_a_compiler() -> None:
    """Inductor returns the only part of a concatenation with that part's strides; a copy has those it is asked for."""
    module = concatenation(torch.empty(0), (0,), (2, 3, 5, 4))
    assert drop_empty_parts(module, compiled=True) == 1
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.kwargs == {"memory_format": torch.contiguous_format}
    new = rows(5).transpose(1, 2).contiguous().transpose(1, 2)
    result = module(new)
    assert torch.equal(result, new) and result.is_contiguous() and not same_storage(result, new)


def test_other_parts_stay() -> None:
    assert drop_empty_parts(concatenation(None, (2, 3, 1, 4), (2, 3, 4, 4))) == 0
    assert (
        drop_empty_parts(concatenation(torch.empty(0), (0,), (2, 3, 5, 4), dtypes=(torch.float64, torch.float32))) == 0
    )


def test_a_new_cache_begins_without_a_constant() -> None:
    module = concatenation(torch.empty(0), (0,), (2, 3, 5, 4))
    (both,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    with module.graph.inserting_after(both):
        module.graph.call_function(wrap_shard, (both, "", (), ""))
    assert append_kv_cache_in_place(module) == 1
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in called] == [append] and called[0].args[0] is None
    new = rows(5)
    result = module(new)
    assert torch.equal(result, new) and not same_storage(result, new)
    assert append(result, rows(1), 2).data_ptr() == result.data_ptr(), "it has free rows"


def test_the_operator_tells_the_strides_of_its_result() -> None:
    """What a compiler is told must be so, whatever the cache was and however long it gets."""
    pasts = (torch.tensor([]), rows(5), rows(5).transpose(0, 1).contiguous().transpose(0, 1), rows(9)[:, :, 1:4])
    for past in (*pasts, rows(127), rows(128), rows(126)):
        found = past
        for new in (rows(2), rows(2), rows(1)):
            told = torch.ops.paraxis.append_rows(found.to("meta"), new.to("meta"))
            found = torch.ops.paraxis.append_rows(found, new)
            assert (found.shape, found.stride()) == (told.shape, told.stride())


def test_half_precision() -> None:
    start = torch.ops.paraxis.append_rows(torch.tensor([]), rows(3).bfloat16())
    new = rows(1).bfloat16()
    found = torch.ops.paraxis.append_rows(start, new)
    assert found.data_ptr() == start.data_ptr() and torch.equal(found, torch.cat([start, new], 2))
    other = torch.ops.paraxis.append_rows(found, new.float())
    assert other.data_ptr() != found.data_ptr() and torch.equal(other, torch.cat([found.float(), new.float()], 2))
