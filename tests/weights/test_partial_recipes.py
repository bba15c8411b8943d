"""Parts of the results of transformers' conversion recipes, against the full results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import core_model_loading as recipes

from paraxis.weights.partial_recipes import Index, TracedRecipe, full_index

STORED = {f"e.{i}.{name}": torch.randn(12, 8) for i in range(4) for name in ("gate", "up")}


def experts(read: Any) -> dict[str, torch.Tensor]:
    """Stacked, then concatenated: [experts, gate and up, hidden]."""
    stored = {name: [read(f"e.{i}.{name}") for i in range(4)] for name in ("gate", "up")}
    stacked = recipes.MergeModulelist(dim=0).convert(stored, ["gate", "up"], ["gate_up"])
    return recipes.Concatenate(dim=1).convert(stacked, ["gate", "up"], ["gate_up"])


def transposed(read: Any) -> dict[str, torch.Tensor]:
    (merged,) = experts(read).values()
    return recipes.Transpose(1, 2).convert({"x": [merged]}, ["x"], ["x"])


def in_chunks(read: Any) -> dict[str, torch.Tensor]:
    return recipes.Chunk(dim=0).convert({"x": [read("e.0.gate")]}, ["x"], ["a", "b", "c"])


def interleaved(read: Any) -> dict[str, torch.Tensor]:
    (merged,) = experts(read).values()
    return recipes.Interleave(dim=1).convert({"x": [merged]}, ["x"], ["x"])


def for_rope(read: Any) -> dict[str, torch.Tensor]:
    """Halves of each head's rows become pairs."""
    weight = read("e.0.gate")
    return {"x": weight.view(3, 2, 2, 8).transpose(1, 2).reshape(12, 8)}


def others(read: Any) -> dict[str, torch.Tensor]:
    """Narrowed, unsqueezed, and flattened."""
    weight = read("e.1.up")
    return {"a": weight[2:-1].unsqueeze(0), "b": weight.reshape(-1)[8:], "c": weight.T.contiguous().view(2, 4, 12)}


def arithmetic(read: Any) -> dict[str, torch.Tensor]:
    """Operators that do more than move elements."""
    return {"x": torch.stack([read("e.0.up") * 2, read("e.1.up").flip(0)])}


def draw(shape: tuple[int, ...], random: random.Random) -> Index:
    """A box of one or two ranges along each dimension."""
    index = []
    for size in shape:
        cuts = sorted(random.sample(range(size + 1), min(size + 1, random.choice((2, 4)))))
        index.append(tuple(zip(cuts[::2], cuts[1::2])))
    return tuple(index)


def take(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    for dim, ranges in enumerate(index):
        tensor = tensor.index_select(dim, torch.cat([torch.arange(a, b) for a, b in ranges]))
    return tensor


def read(out: torch.Tensor, key: str, index: Index) -> None:
    out.copy_(take(STORED[key], index))


@pytest.mark.parametrize("recipe", [experts, transposed, in_chunks, interleaved, for_rope, others, arithmetic])
def test_parts_of_results(recipe: Any) -> None:
    traced = TracedRecipe(recipe, {key: value.to("meta") for key, value in STORED.items()})
    expected = recipe(STORED.__getitem__)
    assert traced.shapes == {name: tuple(value.shape) for name, value in expected.items()}
    chosen = random.Random(0)
    for name, value in expected.items():
        for index in [full_index(tuple(value.shape)), *(draw(tuple(value.shape), chosen) for _ in range(40))]:
            part = take(value, index)
            out = torch.full(part.shape, torch.nan, dtype=torch.float64)
            traced.fill(out, name, index, read)
            assert torch.equal(out, part.double()), (name, index)


@pytest.mark.parametrize(
    ("recipe", "index"),
    [
        (experts, (((0, 4),), ((0, 6), (12, 18)), ((0, 8),))),  # a half of gate and of up
        (experts, (((1, 3),), ((0, 24),), ((0, 8),))),  # two experts
        (transposed, (((0, 4),), ((0, 8),), ((3, 6), (15, 18)))),
        (in_chunks, (((0, 4),), ((4, 8),))),
        (interleaved, (((0, 4),), ((0, 6), (12, 18)), ((0, 8),))),
        (for_rope, (((4, 8),), ((0, 8),))),  # one head
    ],
)
def test_only_the_needed_elements_are_read(recipe: Any, index: Index) -> None:
    traced = TracedRecipe(recipe, {key: value.to("meta") for key, value in STORED.items()})
    name = next(iter(traced.shapes))
    elements = []

    def fill(out: torch.Tensor, key: str, index: Index) -> None:
        elements.append(out.numel())
        read(out, key, index)

    part = take(recipe(STORED.__getitem__)[name], index)
    out = torch.empty_like(part)
    traced.fill(out, name, index, fill)
    assert torch.equal(out, part)
    assert sum(elements) == part.numel()
