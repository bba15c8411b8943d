"""Products with one are dropped where nothing else would change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.optimize.unit_factors import drop_unit_factors

aten = torch.ops.aten


def traced(function: Callable[..., Any], x: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(x)


@pytest.mark.parametrize("factor", [1, 1.0])
def test_product_with_one_becomes_its_operand(factor: float) -> None:
    x = torch.randn(4, 6)
    module = traced(lambda x: x.cos().mul(factor).unsqueeze(0).sin(), x)
    assert drop_unit_factors(module) == 1
    assert not module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert torch.equal(module(x), x.cos().unsqueeze(0).sin())


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x.cos() * 2.0).sin(), id="another factor"),
        pytest.param(lambda x: (x.cos() * x.sin()).sin(), id="a tensor"),
        pytest.param(lambda x: (x.argmax(0) * 1.0).sin(), id="another dtype"),
        pytest.param(lambda x: (x * 1.0).sin(), id="of an input"),
        pytest.param(lambda x: (x.view(-1) * 1.0).sin(), id="of a view of an input"),
        pytest.param(lambda x: x.cos() * 1.0, id="returned"),
        pytest.param(lambda x: (x.cos() * 1.0).view(-1), id="a view returned"),
        pytest.param(lambda x: (x.cos() * 1.0).add_(1).sin(), id="written"),
    ],
)
def test_other_products_stay(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 6)
    module = traced(function, x)
    products = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert drop_unit_factors(module) == 0
    assert module.graph.find_nodes(op="call_function", target=aten.mul.Tensor) == products != []
    assert torch.equal(module(x.clone()), function(x))


def test_product_stays_where_its_operand_is_written_later() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        cos = x.cos()
        product = cos * 1.0
        cos.view(-1).add_(1)
        return product.sin() + cos

    x = torch.randn(4, 6)
    module = traced(function, x)
    assert drop_unit_factors(module) == 0 and torch.equal(module(x), function(x))
