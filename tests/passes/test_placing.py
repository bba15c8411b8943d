"""Query, key and value of a prompt on an empty cache: one operator for all that is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.passes.placing import count_together, place_prompts
from paraxis.passes.prompt import open_causal_masks

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
        assert open_causal_masks(module) == 1
    assert place_prompts(module) == 1
    left = {node.target for node in module.graph.nodes if node.op == "call_function"}
    assert torch.ops.paraxis.rotate_place.default in left
    assert not left & {aten.index_put.default, aten.full.default, aten.cat.default, aten.neg.default}
    compare(module, layer, given)


def test_several_layers_count_together() -> None:
    def model(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = layer(*given[:6])
        return *first, *layer(first[0], *given[1:5], given[6])

    given = [*inputs(), torch.tensor(0)]
    module = traced(model, given)
    assert place_prompts(module) == 2
    assert count_together(module) == 2
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
    assert count_together(module) == 1
    compare(module, model, given)


def test_counters_that_are_inputs_stay() -> None:
    module = traced(lambda x, counter: x + counter.add_(3), [torch.rand(4), torch.tensor(0)])
    assert count_together(module) == 0


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
    assert place_prompts(module) == 0
    compare(module, model, given)
