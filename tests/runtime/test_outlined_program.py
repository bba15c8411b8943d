"""Running an outlined program for any number of periods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.graphs import trace
from helpers.outlines import NAMES, Toy, alternating, appending, layer, plain, writing
from torch.fx import GraphModule

from paraxis.graph.outline import Outline, outline
from paraxis.runtime.outlined_program import Arguments, OutlinedProgram

Blocks = Sequence[tuple[torch.Tensor, torch.Tensor]]


def outlined(
    toy: Toy,
    count: int,
    inputs: Sequence[Any] | None = None,
    compile_piece: Callable[..., Any] = lambda piece, inputs: piece,
) -> OutlinedProgram:
    """The program of a toy; with ``inputs``, of any sizes that are not 0 or 1."""
    mode = "fake" if inputs is None else "symbolic"
    module = trace(toy, inputs or toy.inputs(2), pre_dispatch=False, tracing_mode=mode)
    placeholders = module.graph.find_nodes(op="placeholder")
    roles = {node: (NAMES[i % 2], i // 2) for i, node in enumerate(placeholders[2:])}
    parts = outline(module, roles, toy.head, toy.period)
    assert isinstance(parts, Outline), parts
    blocks = toy.head + 2 * toy.period, toy.head + count * toy.period
    others = [(name, block) for block in range(*blocks) for name in NAMES]
    slots = {node: i for i, node in enumerate([*placeholders, *others])}
    examples = [node.meta["val"] for node in placeholders]
    return OutlinedProgram(
        module,
        parts,
        Arguments(placeholders, roles, others, slots),
        toy.head,
        toy.period,
        count,
        examples,
        examples[0].fake_mode,
        compile_piece,
    )


def in_order(program: OutlinedProgram, results: Sequence[Any]) -> list[Any]:
    """The results as the full function returns them: those of further periods follow those that they are like."""
    own, further = list(results[: program.own]), list(results[program.own :])
    end = max(program.extra, default=len(own) - 1) + 1
    return own[:end] + further + own[end:]


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize(
    "toy",
    [Toy(plain), Toy(plain, 2), Toy(appending), Toy(writing, 2), Toy(alternating, 2, 2), Toy(alternating, 3, 2)],
    ids=lambda toy: f"{toy.function.__name__}-{toy.head}-{toy.period}",
)
def test_results_and_writes_are_those_of_the_full_function(toy: Toy, count: int) -> None:
    program = outlined(toy, count)
    for seed in (0, 1):  # nothing of the call before is left
        ours, theirs = toy.inputs(count, seed), toy.inputs(count, seed)
        results = program(*ours)
        torch.testing.assert_close(in_order(program, results), list(toy(*theirs)), rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_further_results_say_which_ones_they_are_like() -> None:
    program = outlined(Toy(appending), 5)
    assert program.own == 4 and program.extra == [3, 3, 3]
    program = outlined(Toy(alternating, 2, 2), 4)
    assert program.own == 7 and program.extra == [4, 5, 4, 5]
    assert outlined(Toy(plain), 5).extra == []


@pytest.mark.parametrize("count", [3, 24])
def test_three_pieces_are_compiled_however_deep_the_model_is(count: int) -> None:
    compiled: list[str] = []
    ran: list[str] = []

    def compile_piece(piece: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert len(inputs) == len(piece.graph.find_nodes(op="placeholder"))
        name = type(piece).__name__
        compiled.append(name)

        def run(*args: Any) -> Any:
            ran.append(name)
            return piece(*args)

        return run

    toy = Toy(appending)
    outlined(toy, count, compile_piece=compile_piece)(*toy.inputs(count))
    assert compiled == ["Head", "Body", "Tail"]
    assert ran == ["Head", *["Body"] * count, "Tail"]


def sized(x: torch.Tensor, shared: torch.Tensor, blocks: Blocks) -> list[Any]:
    """Blocks that append, and compute with the sizes of their input and their cache."""
    caches = []
    rows = x.shape[0]
    for weight, cache in blocks:
        caches.append(torch.cat([cache, x]))
        x = layer(x, shared, weight) + caches[-1].sum(0) / (cache.shape[0] + rows)
        x = x + torch.arange(rows)[:, None]
    return [x / rows, *caches]


def of_sizes(toy: Toy, count: int, rows: int, length: int) -> list[torch.Tensor]:
    return [
        torch.randn(length if i > 2 and i % 2 else rows, 4) if x.shape[0] == 3 else x
        for i, x in enumerate(toy.inputs(count))
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_sizes_may_differ_from_call_to_call(count: int) -> None:
    toy = Toy(sized)
    torch.manual_seed(0)
    program = outlined(toy, count, of_sizes(toy, 2, rows=5, length=7))
    for rows, length in ((5, 7), (2, 9), (6, 3)):
        inputs = of_sizes(toy, count, rows, length)
        results = in_order(program, program(*inputs))
        torch.testing.assert_close(results, list(toy(*inputs)), rtol=1e-6, atol=1e-6)


def test_pieces_get_the_sizes_as_arguments_behind_their_own() -> None:
    taken: dict[str, list[Any]] = {}

    def compile_piece(piece: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [node.name for node in piece.graph.find_nodes(op="placeholder")]
        taken[type(piece).__name__] = [x for name, x in zip(names, inputs, strict=True) if name.startswith("size_")]
        first = next((i for i, name in enumerate(names) if name.startswith("size_")), len(names))
        assert all(name.startswith("size_") for name in names[first:])
        return piece

    toy = Toy(sized)
    outlined(toy, 3, of_sizes(toy, 2, rows=5, length=7), compile_piece)
    assert taken["Body"] and all(isinstance(x, torch.SymInt) for x in taken["Body"])
    outlined(toy, 3, compile_piece=compile_piece)
    assert taken["Body"] == []
