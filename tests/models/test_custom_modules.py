"""Modules that are no transformers models: attention by einsum, convolutions, custom operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.compare import module_errors, parallel_module
from torch import nn


class Einsum(nn.Module):
    """Attention written with einsum, a convolution, an operator without a rule, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.out, self.mix = nn.Linear(32, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (f(x).unflatten(-1, (4, 8)) for f in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        y = self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
        return {"y": self.mix(y.mT).mT, "z": torch.linalg.qr(self.q(y)).R.abs()}


class Unordered(nn.Module):
    """Iterates over a set of strings, in an order that differs between processes."""

    NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        for i, name in enumerate(self.NAMES):
            self.register_buffer(name, torch.full((32,), float(i)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = {name: x * getattr(self, name) for name in set(self.NAMES)}
        return self.down(self.up(sum(scaled[name] for name in self.NAMES)).relu())


class Stopped(nn.Module):
    """Stops gradients in the three ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            target = self.b(y).relu()
        return self.c(self.b(y.detach()).relu() + target + self.b(x).data) * y


class MLP(nn.Sequential):
    """Linear layers with a norm in between."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 3))


def run_module(make: Any) -> dict[str, Any]:
    """Errors of a module, and what its plan leaves replicated."""
    torch.manual_seed(1)
    x = torch.randn(2, 6, 32)
    model, unsharded, ctx = parallel_module(make, x)
    return {
        **module_errors(model, unsharded, x),
        "gathered": ctx.plan.gathered,
        "replicated": dict(ctx.plan.replicated),
        "unplanned": {name: ctx.plan.parameters[name].local_shape for name in ctx.plan.unplanned},
    }


@pytest.mark.parametrize(("make", "gradients"), [(MLP, 1e-4), (Stopped, 1e-4), (Unordered, 1e-4), (Einsum, 1e-3)])
def test_module_equals_the_unsharded_one(ranks: Any, make: Any, gradients: float) -> None:
    for found in ranks(2).run(run_module, make):
        assert found["outputs"] < (1e-5 if make is MLP else 1e-4) and found["gradients"] < gradients
        if make is Einsum:
            assert any("qr" in reason for _, reason in found["gathered"]), found["gathered"]
            assert found["unplanned"] == {"unused.weight": (2, 4), "unused.bias": (4,)}, "sharded to save memory"
            assert "not used" in found["replicated"]["unused.bias"]


class ConvNet(nn.Module):
    """Convolutions with norms, pooling and interpolation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 12, 1)
        self.batch, self.group = nn.BatchNorm2d(32), nn.GroupNorm(8, 32)
        self.batch.running_mean.normal_()  # type: ignore[union-attr,operator]
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.max_pool2d(F.relu(self.batch(self.first(x))), 2), 2, 1)
        x = F.interpolate(F.silu(self.group(self.second(F.pad(x, (1, 1, 1, 1), mode="reflect")))), scale_factor=2.0)
        return self.third(F.adaptive_avg_pool2d(x, 3))


def run_convolutions() -> dict[str, Any]:
    """Errors of the convolutional network, and the shapes of its shards."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, 16, 16)
    model, unsharded, ctx = parallel_module(ConvNet, x)
    return {
        **module_errors(model, unsharded, x),
        "gathered": ctx.plan.gathered,
        "local": {name: p.local_shape for name, p in ctx.plan.parameters.items()},
    }


def test_channels_stay_sharded_through_norms_and_pools(ranks: Any) -> None:
    for found in ranks(2).run(run_convolutions):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-3
        assert not found["gathered"]
        assert found["local"]["first.weight"][0] == 16 and found["local"]["group.weight"] == (16,)


class CustomOperators(nn.Module):
    """Two column-parallel layers, two custom operators, a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from rules.operators import gate, head_softmax

        h = head_softmax(gate(self.gate(x), self.up(x)), 8)
        return x + self.down(h)


def run_custom_operators(with_rules: bool) -> dict[str, Any]:
    """Errors of the block with and without rules for its operators, and its plan."""
    from rules.operators import gate, head_softmax

    from paraxis import register_rule
    from paraxis.rules import sample, table, temporary_rules

    torch.manual_seed(1)
    x = torch.randn(4, 16)
    a = torch.randn(4, 6, 12, dtype=torch.float64)
    with temporary_rules():
        if with_rules:
            register_rule(gate, samples=[sample(gate, a, a + 1)])(table("S(-1), S(-1) -> S(-1)"))
            calls = [sample(head_softmax, a, heads) for heads in (2, 4, 6)]
            register_rule(head_softmax, samples=calls)(table("S(-1) -> S(-1); num_heads"))
        model, unsharded, ctx = parallel_module(CustomOperators, x)
        errors = module_errors(model, unsharded, x)
    return {
        **errors,
        "axes": {layer.name: layer.axis for layer in ctx.plan.layers},
        "gathered": ctx.plan.gathered,
        "replicated": ctx.plan.replicated,
        "collectives": [c.kind for c in ctx.plan.collectives],
    }


@pytest.mark.parametrize("with_rules", [True, False])
def test_rules_shard_a_model_through_its_custom_operators(ranks: Any, with_rules: bool) -> None:
    for found in ranks(2).run(run_custom_operators, with_rules):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-3
        if with_rules:
            assert found["axes"] == {"gate": "column", "up": "column", "down": "row"}
            assert not found["gathered"] and found["collectives"] == ["all_reduce"]
        else:
            assert any("gate" in why for _, why in found["gathered"] + found["replicated"]), found
