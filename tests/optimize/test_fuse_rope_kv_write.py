"""Query, key and value of a prompt on an empty cache: one operator for all that is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.optimize.fuse_rope_kv_write import fuse_rope_kv_write, merge_cache_counters
from paraxis.optimize.prefill import drop_causal_masks

aten = torch.ops.aten
ROWS, LENGTH, FEATURES = 6, 10, 16


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    counter: torch.Tensor,
    fill: float = 0.0,
    turn: Callable[..., torch.Tensor] = turned,
) -> tuple[torch.Tensor, ...]:
    """What a model does in a layer: the cache counts on a copy of its counter."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = turn(query, cos, sin), turn(key, cos, sin)
    count = counter.clone()
    at = torch.arange(key.shape[2]) + count
    count.add_(key.shape[2])
    caches = [
        aten.index_put(torch.full((*x.shape[:2], LENGTH, x.shape[3]), fill, dtype=x.dtype), [None, None, at], x)
        for x in (key, value)
    ]
    groups = query.shape[1] // key.shape[1]
    keys, values = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]) for x in caches)
    mask = torch.arange(LENGTH)[None, None, None, :] <= torch.arange(key.shape[2])[None, None, :, None]
    return F.scaled_dot_product_attention(query, keys, values, mask), *caches, count


def inputs(batch: int = 1, rows: int = ROWS, features: int = FEATURES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    states = [torch.randn(batch, rows, heads, features).transpose(1, 2) for heads in (4, 2, 2)]
    return [*states, torch.rand(batch, rows, features), torch.rand(batch, rows, features), torch.tensor(0)]


def traced(function: Any, given: list[torch.Tensor]) -> GraphModule:
    return make_fx(lambda *given: function(*given), pre_dispatch=True)(*given)


def compare(module: GraphModule, function: Any, given: list[torch.Tensor]) -> None:
    for found, expected in zip(module(*given), function(*given), strict=True):
        torch.testing.assert_close(found, expected)
    assert given[-1] == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("opened", [False, True])
def test_a_layer(opened: bool, batch: int) -> None:
    given = inputs(batch)
    module = traced(layer, given)
    if opened:
        assert drop_causal_masks(module) == 1
    assert fuse_rope_kv_write(module) == 1
    left = {node.target for node in module.graph.nodes if node.op == "call_function"}
    assert torch.ops.paraxis.rope_kv_write.default in left
    assert not left & {aten.index_put.default, aten.full.default, aten.cat.default, aten.neg.default}
    compare(module, layer, given)


def test_several_layers_count_together() -> None:
    def model(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = layer(*given[:6])
        return *first, *layer(first[0], *given[1:5], given[6])

    given = [*inputs(), torch.tensor(0)]
    module = traced(model, given)
    assert fuse_rope_kv_write(module) == 2
    assert merge_cache_counters(module) == 2
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten._foreach_add.Scalar) == 1
    assert aten.add_.Tensor not in targets and aten.clone.default not in targets
    compare(module, model, given)
    assert given[5] == 0


def test_counters_that_are_read_before_and_after() -> None:
    def model(x: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = counter.clone()
        before = x + count
        after = count.add_(3)
        return before, x + count, count, after

    given = [torch.rand(4), torch.tensor(0)]
    module = traced(model, given)
    assert merge_cache_counters(module) == 1
    compare(module, model, given)


def test_counters_that_are_inputs_stay() -> None:
    module = traced(lambda x, counter: x + counter.add_(3), [torch.rand(4), torch.tensor(0)])
    assert merge_cache_counters(module) == 0


def untouched(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x


def of_a_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat([turned(x[..., :8], cos[..., :8], sin[..., :8]), x[..., 8:]], -1)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"fill": 1.0}),
        ({}, {"turn": untouched}),
        ({}, {"turn": of_a_part}),
        ({"features": 24}, {}),
        ({"rows": 1}, {}),
    ],
)
def test_what_stays(changes: dict[str, int], options: dict[str, Any]) -> None:
    """A cache that is not empty, other rotations, features that no kernel takes, single tokens."""

    def model(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layer(*given, **options)

    given = inputs(**changes)
    module = traced(model, given)
    assert fuse_rope_kv_write(module) == 0
    compare(module, model, given)


# -- what is written to in between -----------------------------------------------------------------------------------


def counted_before(q: Any, k: Any, v: Any, cos: Any, sin: Any, counter: Any) -> tuple[torch.Tensor, ...]:
    """One counter for all layers, counted on before they run, and looked at again."""
    at = torch.arange(ROWS) + counter
    counter.add_(ROWS)
    v = v * 1
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = turned(q, cos, sin), turned(k, cos, sin)
    caches = [aten.index_put(torch.zeros(1, 2, LENGTH, FEATURES), [None, None, at], x) for x in (key, v)]
    keys, values = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, LENGTH, FEATURES) for x in caches)
    return F.scaled_dot_product_attention(query, keys, values), *caches, counter + 0


def counted_by_a_view(*given: Any) -> tuple[torch.Tensor, ...]:
    """The copy of the counter is another number by the time it is used."""
    count = given[5].clone()
    count.view(1).add_(2)
    return in_a_layer(*given[:5], count)


def in_a_layer(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, count: Any, zeros: Any = None, change: Any = None
) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    query, key = turned(q, cos, sin), turned(k, cos, sin)
    if change is not None:
        change()
    at = torch.arange(ROWS) + count
    empty = [torch.zeros(x.shape[0], 2, LENGTH, FEATURES) if zeros is None else zeros for x in (key, v)]
    caches = [aten.index_put(e, [None, None, at], x) for e, x in zip(empty, (key, v), strict=True)]
    groups = query.shape[1] // 2
    keys, values = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]) for x in caches)
    return F.scaled_dot_product_attention(query, keys, values), *caches


def value_changed_in_part(q: Any, k: Any, v: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    base = v * 1
    return in_a_layer(q, k, base.view(v.shape), *given[:2], given[2].clone(), change=lambda: base[:, :, 0].mul_(3))


def factor_changed(q: Any, k: Any, v: Any, cos: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    cos = cos * 1
    cos[:, 0].mul_(3)
    return in_a_layer(q, k, v, cos, given[0], given[1].clone())


def zeros_changed(*given: Any) -> tuple[torch.Tensor, ...]:
    zeros = torch.zeros(1, 2, LENGTH, FEATURES)
    zeros[:, :, -1].add_(1)
    return in_a_layer(*given[:5], given[5].clone(), zeros=zeros)


def query_of_one_row(q: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    return in_a_layer(q[:, :, :1], *given[:4], given[4].clone())


def one_of_two_factors_for_all(q: Any, k: Any, v: Any, cos: Any, sin: Any, counter: Any) -> tuple[torch.Tensor, ...]:
    return in_a_layer(q, k, v, cos[:1], sin, counter.clone())


@pytest.mark.parametrize(
    "model",
    [
        counted_before,
        counted_by_a_view,
        value_changed_in_part,
        factor_changed,
        zeros_changed,
        query_of_one_row,
        one_of_two_factors_for_all,
    ],
)
def test_what_would_be_read_too_early_or_too_late(model: Any) -> None:
    batch = 2 if model is one_of_two_factors_for_all else 1
    given = inputs(batch)
    module = traced(model, [x.clone() for x in given])
    assert fuse_rope_kv_write(module) == 0
    merge_cache_counters(module)
    found, expected = module(*(x.clone() for x in given)), model(*(x.clone() for x in given))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_same_without_changes_is_placed() -> None:
    """What the models above are when nobody writes: else they would pass for another reason."""

    def model(*given: Any) -> tuple[torch.Tensor, ...]:
        return in_a_layer(*given[:5], given[5].clone())

    module = traced(model, inputs())
    assert fuse_rope_kv_write(module) == 1
    compare(module, model, inputs())


def test_views_of_counters() -> None:
    def model(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        count = counter.clone()
        seen = count[None]
        count.add_(3)
        return x + seen

    given = [torch.rand(4), torch.tensor(0)]
    module = traced(model, given)
    assert merge_cache_counters(module) == 0
    torch.testing.assert_close(module(*given), model(*given))
