"""A model with operators of its own: with rules for them it is sharded straight through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two column-parallel layers, two operators that torch has not, a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from rules.operators import gate, head_softmax

        h = head_softmax(gate(self.gate(x), self.up(x)), 8)
        return x + self.down(h)


class Picture(nn.Module):
    """Convolutions with what comes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 12, 1)
        self.batch, self.group = nn.BatchNorm2d(32), nn.GroupNorm(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.max_pool2d(F.relu(self.batch(self.first(x))), 2), 2, 1)
        x = F.interpolate(F.silu(self.group(self.second(F.pad(x, (1, 1, 1, 1), mode="reflect")))), scale_factor=2.0)
        return self.third(F.adaptive_avg_pool2d(x, 3))


def pictured() -> dict[str, Any]:
    """The convolutions on this rank against the unsharded ones."""
    from models.compare import context, gradient_errors

    from paraxis import parallelize_model

    torch.manual_seed(0)
    whole, model = Picture().eval(), Picture().eval()
    whole.batch.running_mean.normal_()  # type: ignore[union-attr,operator]
    model.load_state_dict(whole.state_dict())
    x, ctx = torch.randn(2, 3, 16, 16), context()
    model = parallelize_model(model, ctx, example_inputs=x, show_progress=False)
    result, wanted = model(x), whole(x)
    result.square().mean().backward()
    wanted.square().mean().backward()
    return {
        "error": float((result - wanted).detach().abs().max()),
        "gradients": max(gradient_errors(model, whole).values()),
        "gathered": ctx.plan.gathered,
        "local": {name: p.local_shape for name, p in ctx.plan.parameters.items()},
    }


def compared(with_rules: bool) -> dict[str, Any]:
    """The block on this rank, with and without rules for its operators, against the unsharded one."""
    from models.compare import context, gradient_errors
    from rules.operators import gate, head_softmax

    from paraxis import parallelize_model, register_rule
    from paraxis.rules import sample, table, temporary_rules

    torch.manual_seed(0)
    whole, block = Block(), Block()
    block.load_state_dict(whole.state_dict())
    x = torch.randn(4, 16)
    a = torch.randn(4, 6, 12, dtype=torch.float64)
    with temporary_rules():
        if with_rules:
            register_rule(gate, samples=[sample(gate, a, a + 1)])(table("S(-1), S(-1) -> S(-1)"))
            calls = [sample(head_softmax, a, heads) for heads in (2, 4, 6)]
            register_rule(head_softmax, samples=calls)(table("S(-1) -> S(-1); num_heads"))
        ctx = context()
        block = parallelize_model(block, ctx, example_inputs=x, show_progress=False)
        result, wanted = block(x), whole(x)
        result.square().mean().backward()
        wanted.square().mean().backward()
    plan = ctx.plan
    return {
        "error": float((result - wanted).detach().abs().max()),
        "gradients": max(gradient_errors(block, whole).values()),
        "axes": {layer.name: layer.axis for layer in plan.layers},
        "gathered": plan.gathered,
        "replicated": plan.replicated,
        "collectives": [c.kind for c in plan.collectives],
    }


@pytest.mark.parametrize("with_rules", [True, False])
def test_a_model_is_sharded_through_its_own_operators(ranks: Any, with_rules: bool) -> None:
    for found in ranks(2).run(compared, with_rules):
        assert found["error"] < 1e-5 and found["gradients"] < 1e-3
        if with_rules:
            assert found["axes"] == {"gate": "column", "up": "column", "down": "row"}
            assert not found["gathered"] and found["collectives"] == ["all_reduce"]
        else:
            assert any("gate" in why for _, why in found["gathered"] + found["replicated"]), found


def test_norms_and_pools_between_convolutions(ranks: Any) -> None:
    for found in ranks(2).run(pictured):
        assert found["error"] < 1e-5 and found["gradients"] < 1e-3
        assert not found["gathered"]
        assert found["local"]["first.weight"][0] == 16 and found["local"]["group.weight"] == (16,)
