"""Calling a parallel model: a graph break falls back to the children, and the plan says where and why."""

from __future__ import annotations

from typing import Any

import torch
from models.compare import module_errors, parallel_module
from torch import nn

from paraxis.runtime.compiled_call import CompiledCall


class Inner(nn.Module):
    """A block that is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Branches(nn.Module):
    """Python that depends on the data, between blocks; a list of modules, and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.mean().item() > 100:
            x = -x
        return self.blocks[1](x * self.scale)


def run_with_graph_break() -> dict[str, Any]:
    """Errors, the plan, and what calling the children runs."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model, unsharded, ctx = parallel_module(Branches, x)
    errors = module_errors(model, unsharded, x)
    return {
        **errors,
        "breaks": ctx.plan.breaks,
        "local": {name: p.local_shape for name, p in ctx.plan.parameters.items()},
        "children": [isinstance(block._compiled_call_impl, CompiledCall) for block in model.blocks],
        "loaded": all(p.to_local().numel() > 0 for p in model.parameters()),
    }


def test_graph_break_compiles_the_children(ranks: Any) -> None:
    for found in ranks(2).run(run_with_graph_break):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-4
        (broken,) = found["breaks"]
        assert "if x.mean().item() > 100" in broken and broken.startswith("the model: ")
        assert found["children"] == [True, True] and found["loaded"]
        assert found["local"]["blocks.0.up.weight"] == (32, 16) and found["local"]["blocks.1.down.weight"] == (16, 32)
        assert found["local"]["scale"] == (16,) and found["local"]["unused.weight"] == (2, 4)


def count_compilations() -> list[int]:
    """Compilations after calls with other batch sizes and modes."""
    x = torch.randn(2, 6, 16)
    model, _, ctx = parallel_module(Inner, x)
    counts = []
    with torch.no_grad():
        for rows in (2, 3, 4, 5):
            model(torch.randn(rows, 6, 16))
            counts.append(ctx.compile_times)
    model(x)
    return [*counts, ctx.compile_times]


def test_sizes_become_dynamic_after_the_second_call(ranks: Any) -> None:
    for first, second, third, fourth, grad in ranks(2).run(count_compilations):
        assert first == 1 and second == third == fourth == 2, "one static program, and one for all other sizes"
        assert grad == 3, "gradients need another program"
