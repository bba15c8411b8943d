"""Parameters that are added after planning are replicated from rank 0, and must be the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import max_difference, parallel_module
from torch import nn

from paraxis.runtime.late_parameters import REASON


class MLP(nn.Sequential):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Adapter(nn.Module):
    """A layer with a low-rank update."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def add_adapter() -> dict[str, Any]:
    """Errors and the plan of a model whose ranks draw different adapters."""
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    model, unsharded, ctx = parallel_module(MLP, x)
    model(x)
    model[0], unsharded[0] = Adapter(model[0], seed=dist.get_rank()), Adapter(unsharded[0], seed=0)
    found, expected = model(x), unsharded(x)
    found.square().sum().backward()
    expected.square().sum().backward()
    errors = [
        max_difference(getattr(model[0], name).weight.grad, getattr(unsharded[0], name).weight.grad)
        for name in ("down", "up")
    ]
    return {"output": max_difference(found, expected), "gradients": errors, "replicated": dict(ctx.plan.replicated)}


def test_new_parameters_have_rank_0s_values_and_full_gradients(ranks: Any) -> None:
    for found in ranks(2).run(add_adapter):
        assert found["output"] < 1e-5 and max(found["gradients"]) < 1e-4
        assert found["replicated"]["0.down.weight"] == found["replicated"]["0.up.weight"] == REASON


def add_adapter_on_one_rank() -> str:
    """The error of this rank."""
    x = torch.randn(2, 16)
    model, _, _ = parallel_module(MLP, x)
    model(x)
    if dist.get_rank() == 1:
        model[0].extra = nn.Parameter(torch.ones(3))
        model[0].register_forward_hook(lambda module, args, output: output * module.extra.sum())
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(5, 16))
        model(torch.randn(6, 16))
    return str(caught.value)


def test_parameters_of_one_rank_only_are_refused_on_all(ranks: Any) -> None:
    for message in ranks(2).run(add_adapter_on_one_rank):
        assert "rank 0 got none" in message and "rank 1 got 0.extra" in message
