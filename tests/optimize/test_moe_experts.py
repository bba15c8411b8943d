"""Experts that run one after the other give the results of grouped matmuls over all experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 -- defines the operator
from helpers.graphs import assert_same_results, targets, trace
from torch.func import functionalize

from paraxis.optimize.moe_experts import run_experts, run_experts_in_sequence

ROWS, WIDTH, INNER, EXPERTS = 12, 6, 10, 4


def grouped(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The grouped matmul of transformers."""
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, offsets)


def draw(offsets: list[int]) -> tuple[torch.Tensor, ...]:
    """Tokens, the token of each row, both weights, the last row of each expert, and the routing weights."""
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


def read_between_the_matmuls(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    inner = grouped(tokens[index], first, offsets)
    return grouped(inner[:, :INNER] * scale, second, offsets).sum() + inner.sum()


def mean_over_rows(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    inner = grouped(tokens[index], first, offsets)[:, :INNER]
    return grouped(inner - inner.mean(0), second, offsets)


@pytest.mark.parametrize("offsets", [[3, 3, 7, 12], [0, 0, 0, 12], [2, 5, 6, 9]])
@pytest.mark.parametrize(
    ("function", "count"), [(gated, 1), (clamped_without_scale, 1), (read_between_the_matmuls, 0), (mean_over_rows, 0)]
)
def test_pair_of_grouped_matmuls_runs_expert_by_expert(
    function: Callable[..., Any], count: int, offsets: list[int]
) -> None:
    inputs = draw(offsets)
    module = trace(function, inputs, tracing_mode="fake", pre_dispatch=False)
    assert run_experts_in_sequence(module) == count
    assert ("run_experts" in module.code) == bool(count)
    assert_same_results(module, function, inputs)


@pytest.mark.parametrize("function", [gated, clamped_without_scale, read_between_the_matmuls, mean_over_rows])
def test_results_are_right_with_dynamic_shapes(function: Callable[..., Any]) -> None:
    """Here the sizes of the weights are dynamic too, which no model has."""
    inputs = draw([3, 3, 7, 12])
    module = trace(function, inputs, tracing_mode="symbolic", pre_dispatch=False)
    run_experts_in_sequence(module)
    assert_same_results(module, function, inputs)


def rows_by_inverse_permutation(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    order = index.sort()[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(ROWS)
    gate, up = grouped(tokens[index], first, offsets).chunk(2, dim=-1)
    return grouped(gate * up, second, offsets)[inverse]


def rows_by_negative_indices(tokens: Any, index: Any, first: Any, second: Any, offsets: Any, scale: Any) -> Any:
    gate, up = grouped(tokens[index], first, offsets).chunk(2, dim=-1)
    return grouped(gate * up, second, offsets)[index - ROWS]


@pytest.mark.parametrize(
    ("function", "by_index_select"), [(rows_by_inverse_permutation, True), (rows_by_negative_indices, False)]
)
def test_rows_are_permuted_by_index_select(function: Callable[..., Any], by_index_select: bool) -> None:
    """Unless indices may be negative, which it does not take."""
    inputs = draw([3, 3, 7, 12])
    module = trace(functionalize(function, remove="mutations"), inputs, tracing_mode="fake", pre_dispatch=False)
    assert run_experts_in_sequence(module) == 1
    assert (torch.ops.aten.index_select.default in targets(module)) == by_index_select
    assert_same_results(module, function, inputs)


def test_rows_of_no_expert_are_zero() -> None:
    tokens, index, first, second, offsets, scale = draw([2, 5, 6, 9])
    result = run_experts(tokens, index, first, second, offsets, scale, lambda x: x[:, :INNER])
    assert not result[9:].any() and result[:9].all(dim=1).any()


def test_autocast_does_not_change_the_dtype() -> None:
    """Autocast does not cast grouped matmuls, so it must not cast the matmul of an expert."""
    inputs = draw([3, 3, 7, 12])
    module = trace(gated, inputs, tracing_mode="fake", pre_dispatch=False)
    assert run_experts_in_sequence(module) == 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = module(*inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gated(*inputs))
