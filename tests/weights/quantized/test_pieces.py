"""How recipes put quantized weights together, found by running them on positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paraxis.errors import CheckpointError
from paraxis.weights.convert import Conversion
from paraxis.weights.quantized.fp8 import BlockFP8
from paraxis.weights.quantized.pieces import Box, Composition, of_conversion, of_one
from paraxis.weights.quantized.stored import Stored


def stored(key: str, rows: int = 20, columns: int = 8, format: Any = None) -> Stored:
    return Stored(key, format or BlockFP8((16, 16)), {}, (rows, columns), {})


class Recipe(Conversion):
    """A conversion by any function of tensors."""

    def __init__(self, function: Callable[..., torch.Tensor], keys: list[str], shape: tuple[int, ...]) -> None:
        super().__init__("w", None, torch.nn.Module(), lambda name: name, {"pattern": keys}, {"w": shape})
        self.function = function

    def run(self, read: Any) -> dict[str, torch.Tensor]:
        return {"w": self.function(*(read(key) for key in self.keys))}


def composed(function: Callable[..., torch.Tensor], shape: tuple[int, ...], count: int = 4) -> Composition:
    weights = {key: stored(key) for key in "abcd"[:count]}
    return of_conversion(Recipe(function, list(weights), shape), weights)["w"]


def described(composition: Composition) -> list[list[tuple[str, int, int]]]:
    return [[(p.stored.key, p.start, p.length) for p in pieces] for pieces in composition.stack]


def test_experts_of_two_halves() -> None:
    found = composed(lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1), (2, 40, 8))
    assert described(found) == [[("a", 0, 20), ("c", 0, 20)], [("b", 0, 20), ("d", 0, 20)]]
    assert found.stacked and not found.transposed and found.columns == 8 and found.spans == [(0, 20), (0, 20)]
    assert [each.key for each in found.stored] == ["a", "c", "b", "d"]


def test_transposed_stacks_and_parts() -> None:
    found = composed(lambda a, b, c, d: torch.stack([a, b, c, d]).transpose(1, 2), (4, 8, 20))
    assert found.transposed and described(found)[2] == [("c", 0, 20)]
    part = composed(lambda a: a[5:11], (6, 8), 1)
    assert not part.stacked and described(part) == [[("a", 5, 6)]]
    mixed = composed(lambda a: torch.cat([a[10:], a[:10]]), (20, 8), 1)
    assert described(mixed) == [[("a", 10, 10), ("a", 0, 10)]]


def test_what_is_read() -> None:
    """Rows of a part in units of its blocks: of [a|c], each of 20 rows, in blocks of 16."""
    found = composed(lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1), (2, 40, 8))
    a, c, b, _ = found.stored
    assert list(found.boxes(((0, 1),), ((1, 3),), 16)) == [Box(0, a, ((1, 2),), 0, 1), Box(0, c, ((0, 1),), 1, 1)]
    assert list(found.boxes(((1, 2),), ((0, 2),), 1)) == [Box(0, b, ((0, 2),), 0, 2)]
    one = of_one(a)
    assert list(one.boxes(((0, 1),), ((3, 5), (8, 9)), 1)) == [Box(0, a, ((3, 5),), 0, 2), Box(0, a, ((8, 9),), 2, 1)]


def test_what_is_refused() -> None:
    with pytest.raises(CheckpointError, match="converted in this way are not supported"):
        composed(lambda a, b: torch.cat([a, b], 1), (20, 16), 2)
    weights = {"a": stored("a"), "b": stored("b", format=BlockFP8((8, 8)))}
    with pytest.raises(CheckpointError, match="have different formats"):
        of_conversion(Recipe(lambda a, b: torch.stack([a, b]), ["a", "b"], (2, 20, 8)), weights)
    with pytest.raises(CheckpointError, match="1 of the 2 weights that it consists of are not quantized, such as c"):
        of_conversion(Recipe(lambda a, b: torch.stack([a, b]), ["a", "c"], (2, 20, 8)), weights)
    with pytest.raises(CheckpointError, match="cannot be converted: RuntimeError"):
        composed(lambda a: a.view(-1).index_select(0, torch.tensor(float("nan"))), (1,), 1)
