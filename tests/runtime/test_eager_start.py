"""A program runs by Python first, then compiled; what cannot be compiled goes on by Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import max_difference, parallel_module
from torch import nn

from paraxis.runtime import backend
from paraxis.runtime.eager_start import StartsEagerly, has_fixed_sizes


def test_the_second_run_is_compiled() -> None:
    runs: list[str] = []

    def compiling() -> Any:
        runs.append("compile")
        return lambda x: runs.append("compiled") or x + 1  # type: ignore[func-returns-value]

    program = StartsEagerly(lambda x: runs.append("python") or x + 1, compiling)  # type: ignore[func-returns-value]
    ready = []
    for _ in range(4):
        ready.append(program.ready)
        assert program(1) == 2
    assert runs == ["python", "compile", "compiled", "compiled", "compiled"]
    assert ready == [False, False, True, True], "captured after it has run compiled"


def test_what_cannot_be_compiled_goes_on() -> None:
    tries = []

    def compiling() -> Any:
        tries.append(1)
        raise RuntimeError("no such kernel")

    program = StartsEagerly(lambda x: x + 1, compiling)
    assert [program(i) for i in range(4)] == [1, 2, 3, 4] and len(tries) == 1


def test_symbolic_sizes_are_seen() -> None:
    assert has_fixed_sizes([torch.ones(2, 3), 5, None])
    seen: list[Any] = []

    def backend(module: Any, inputs: list[Any]) -> Any:
        seen.append([node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")])
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(4, 3))
    (values,) = seen
    assert any(isinstance(x, torch.SymInt) for x in values) and not has_fixed_sizes(values)
    assert not has_fixed_sizes([x for x in values if isinstance(x, torch.Tensor)])


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def start_eagerly(fails: bool) -> list[tuple[float, int]]:
    """The errors of three runs on the CPU, started as on a GPU, and how often Inductor had compiled by then."""
    compile_program, compiled = backend.compile_program, []

    def together(compiling: Any) -> Any:
        compiled.append(1)
        if fails:
            raise RuntimeError("no such kernel")
        return compiling()

    backend.compile_program = lambda *args: compile_program(*args[:4], together)  # type: ignore[assignment]
    try:
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
        model, unsharded, _ = parallel_module(block, x, compile="inductor")
        with torch.no_grad():
            return [(max_difference(model(x), unsharded(x)), len(compiled)) for _ in range(3)]
    finally:
        backend.compile_program = compile_program


@pytest.mark.parametrize("fails", [False, True])
def test_every_run_is_right(ranks: Any, fails: bool) -> None:
    for found in ranks(2).run(start_eagerly, fails, timeout=300):
        assert [count for _, count in found] == [0, 1, 1] and max(error for error, _ in found) < 1e-5
