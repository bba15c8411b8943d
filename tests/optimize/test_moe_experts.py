"""Experts that run one after the other give what they gave all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 -- defines the operator
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.optimize.moe_experts import in_turn, run_experts_in_sequence

ROWS, WIDTH, INNER, EXPERTS = 12, 6, 10, 4


def grouped(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, offsets)


def inputs(offsets: list[int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(5, WIDTH, generator=generator)
    index = torch.randint(0, 5, (ROWS,), generator=generator)
    first = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator).transpose(1, 2)
    second = torch.randn(EXPERTS, WIDTH, INNER, generator=generator).transpose(1, 2)
    scale = torch.rand(ROWS, 1, generator=generator)
    return tokens, index, first, second, torch.tensor(offsets, dtype=torch.int32), scale


def gated(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    gate, up = grouped(tokens[index], first, offsets).chunk(2, dim=-1)
    return (grouped(torch.nn.functional.silu(gate) * up, second, offsets) * scale).sum(0)


def clamped_without_scale(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    gate, up = grouped(tokens[index] + 0, first, offsets).split(INNER, dim=1)
    return grouped((gate * 2).clamp(max=1.0) * (up + 1), second, offsets).sum(1)


def read_in_between(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    inner = grouped(tokens[index], first, offsets)
    return grouped(inner[:, :INNER] * scale, second, offsets).sum() + inner.sum()


def over_rows(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    inner = grouped(tokens[index], first, offsets)[:, :INNER]
    return grouped(inner - inner.mean(0), second, offsets)


@pytest.mark.parametrize("offsets", [[3, 3, 7, 12], [0, 0, 0, 12], [2, 5, 6, 9]])
@pytest.mark.parametrize(
    ("function", "pairs"), [(gated, 1), (clamped_without_scale, 1), (read_in_between, 0), (over_rows, 0)]
)
def test_the_same_numbers(function: Callable[..., Any], pairs: int, offsets: list[int]) -> None:
    given = inputs(offsets)
    module = make_fx(function, tracing_mode="fake")(*given)
    assert run_experts_in_sequence(module) == pairs
    assert ("in_turn" in module.code) == bool(pairs)
    torch.testing.assert_close(module(*given), function(*given))


@pytest.mark.parametrize("function", [gated, clamped_without_scale, read_in_between, over_rows])
def test_sizes_that_may_change(function: Callable[..., Any]) -> None:
    """Here those of the weights may, too, which no model has."""
    given = inputs([3, 3, 7, 12])
    module = make_fx(function, tracing_mode="symbolic")(*given)
    run_experts_in_sequence(module)
    torch.testing.assert_close(module(*given), function(*given))


def back_in_order(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    order = index.sort()[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(ROWS)
    gate, up = grouped(tokens[index], first, offsets).chunk(2, dim=-1)
    return grouped(gate * up, second, offsets)[inverse]


def from_the_end(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    gate, up = grouped(tokens[index], first, offsets).chunk(2, dim=-1)
    return grouped(gate * up, second, offsets)[index - ROWS]


@pytest.mark.parametrize(("function", "quick"), [(back_in_order, True), (from_the_end, False)])
def test_rows_are_put_back_quickly(function: Callable[..., Any], quick: bool) -> None:
    """By an operator for rows, unless indices may be negative."""
    given = inputs([3, 3, 7, 12])
    module = make_fx(functionalize(function, remove="mutations"), tracing_mode="fake")(*given)
    assert run_experts_in_sequence(module) == 1
    assert ("index_select" in module.code) == quick
    torch.testing.assert_close(module(*given), function(*given))


def test_rows_of_no_expert_are_zero() -> None:
    tokens, index, first, second, offsets, scale = inputs([2, 5, 6, 9])
    result = in_turn(tokens, index, first, second, offsets, scale, lambda x: x[:, :INNER])
    assert not result[9:].any() and result[:9].all(dim=1).any()


def test_under_autocast() -> None:
    """Grouped products are not among what is cast; one after the other they are not either."""
    given = inputs([3, 3, 7, 12])
    module = make_fx(gated, tracing_mode="fake")(*given)
    assert run_experts_in_sequence(module) == 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = module(*given)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gated(*given))
