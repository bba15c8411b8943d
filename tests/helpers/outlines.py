"""Toys of equal blocks, traced with few blocks and with many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from helpers.graphs import trace
from paraxis.graph.outline import Outline, Piece, Role, outline

WIDTH, ROWS = 4, 3
NAMES = ("weight", "cache")
"""What each block has."""

Function = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[torch.Tensor, torch.Tensor]]], Sequence[Any]]
"""A toy: of its input, what its blocks share, and (weight, cache) of each block."""


@dataclass
class Toy:
    """A function of blocks, for ``head`` blocks and ``count`` periods of ``period`` blocks."""

    function: Function
    head: int = 1
    period: int = 1

    def inputs(self, count: int, seed: int = 0) -> list[torch.Tensor]:
        """The input, what blocks share, and weight and cache of each block in turn."""
        generator = torch.Generator().manual_seed(seed)
        blocks = self.head + count * self.period
        shapes = [(ROWS, WIDTH), (ROWS, WIDTH), *((WIDTH, WIDTH), (ROWS, WIDTH)) * blocks]
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def __call__(self, x: torch.Tensor, shared: torch.Tensor, *own: torch.Tensor) -> tuple[Any, ...]:
        """Run it with as many blocks as there are tensors for."""
        return tuple(self.function(x, shared, list(zip(own[::2], own[1::2], strict=True))))

    def program(self) -> tuple[GraphModule, dict[Node, Role]]:
        """The graph of the head and two periods, and what its inputs are to the blocks."""
        module = trace(self, self.inputs(2), pre_dispatch=False)
        placeholders = module.graph.find_nodes(op="placeholder")
        return module, {node: (NAMES[i % 2], i // 2) for i, node in enumerate(placeholders[2:])}

    def divided(self) -> Outline | str:
        """Its outline."""
        module, roles = self.program()
        return outline(module, roles, self.head, self.period)


def layer(x: torch.Tensor, shared: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a block computes, if it is nothing special."""
    return x + ((x @ weight) * shared).tanh()


def plain(x: torch.Tensor, shared: torch.Tensor, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """One result of equal blocks."""
    for weight, _ in blocks:
        x = layer(x, shared, weight)
    return [x.relu()]


def appending(x: torch.Tensor, shared: torch.Tensor, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """New caches of all blocks are returned, after the result."""
    caches = []
    angles = shared.cos()
    for weight, cache in blocks:
        caches.append(torch.cat([cache, x]))
        x = layer(x, angles, weight) + caches[-1].mean(0)
    return [x.relu(), *caches]


def writing(x: torch.Tensor, shared: torch.Tensor, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """Each block writes to its own cache, and reads it."""
    for weight, cache in blocks:
        cache[:1].copy_((x @ weight)[:1])
        x = layer(x, shared, weight) + cache.mean(0)
    return [x.relu()]


def alternating(
    x: torch.Tensor, shared: torch.Tensor, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Any]:
    """Blocks of two kinds in turn, which use different shared values."""
    caches, other = [], shared.sin()
    for i, (weight, cache) in enumerate(blocks):
        caches.append(cache + x if i % 2 else cache - x)
        x = layer(x, other if i % 2 else shared, weight) + caches[-1].tanh()
    return [*caches, x]


def run_pieces(toy: Toy, found: Outline, inputs: Sequence[Any], count: int) -> list[Any]:
    """The results of a toy of ``count`` periods by its pieces: those of the program, then those of further periods."""
    module, roles = toy.program()
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    own = {role: i for i, role in enumerate(roles.values())}
    kinds = {node.name: role for node, role in roles.items()}

    def argument(node: Node, number: int) -> Any:
        role = kinds.get(node.name)
        if role is None:
            return inputs[names.index(node.name)]
        name, block = role
        moved = block + number * toy.period if toy.head <= block < toy.head + toy.period else block
        return inputs[2 + 2 * moved + NAMES.index(name)]

    assert len(own) == len(roles)
    before: dict[Node, Any] = {}

    def value(node: Node, number: int) -> Any:
        return before[node] if node in before else argument(node, number)

    def run(piece: Piece, values: Sequence[Any]) -> dict[Any, Any]:
        results = piece.module(*values)
        assert len(results) == len(piece.outputs)
        return dict(enumerate(results))

    before = dict(zip(found.head.outputs, run(found.head, [argument(n, 0) for n in found.head.inputs]).values()))
    made: list[dict[Node, Any]] = []
    for number in range(count):
        taken = [
            made[-1][found.carried[n]] if made and n in found.carried else value(n, number) for n in found.body.inputs
        ]
        made.append(dict(zip(found.body.outputs, run(found.body, taken).values())))
    after = {n: made[-1][found.first[n]] if n in found.first else value(n, 0) for n in found.tail.inputs}
    results = list(run(found.tail, list(after.values())).values())
    for i, node in found.passed.items():
        results[i] = made[-1][found.first[node]] if node in found.first else value(node, 0)
    for first, second, node in found.returned:
        results[first], results[second] = made[0][node], made[1][node]
    return results + [period[node] for period in made[2:] for _, _, node in found.returned]
