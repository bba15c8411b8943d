"""How the blocks of a model repeat: head, period and count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny
from torch import nn

from paraxis.capture.periods import MAX_PERIOD, Periods, find_periods


class Block(nn.Module):
    def __init__(self, index: int, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.index, self.scale = index, scale
        self.linear = nn.Linear(4, width)


class Other(Block):
    """A block of another class."""


class Third(Block):
    """And of yet another."""


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def stack(kinds: str) -> Stack:
    """A stack with one block per letter; the same letter is the same kind."""
    return Stack([Block(i, scale=float(ord(kind))) for i, kind in enumerate(kinds)])


def found(kinds: str) -> tuple[int, int, int] | None:
    periods = find_periods(stack(kinds))
    return (periods.head, periods.period, periods.count) if periods else None


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", (1, 1, 3)),
        ("aaaaaaaa", (1, 1, 7)),
        ("abababab", (2, 2, 3)),
        ("ababababa", (3, 2, 3)),
        ("aaabaaabaaabaaab", (4, 4, 3)),
        ("caaaaa", (2, 1, 4)),
        ("ccaaaa", (3, 1, 3)),
        ("cababababab", (3, 2, 4)),
        ("baaaa", (2, 1, 3)),
        ("aaabbbbb", (4, 1, 4)),
        ("aab" * 4 + "aa", (5, 3, 3)),
    ],
)
def test_head_and_periods_cover_all_blocks(kinds: str, expected: tuple[int, int, int]) -> None:
    head, period, count = expected
    assert head + period * count == len(kinds)
    assert found(kinds) == expected


@pytest.mark.parametrize(
    "kinds",
    ["a", "aaa", "ababab", "aaaac", "abcdefgh", "aabaaab", "abcdefghi" * 4],
    ids=["one", "three", "three periods", "special last block", "all differ", "no order", "period too long"],
)
def test_stacks_without_enough_periods_have_none(kinds: str) -> None:
    assert found(kinds) is None


def test_longest_period_that_is_looked_for() -> None:
    letters = "abcdefgh"
    assert len(letters) == MAX_PERIOD
    assert found(letters * 4) == (8, 8, 3)


@pytest.mark.parametrize("change", ["attribute", "hook", "width", "dtype", "training"])
def test_changed_block_in_the_middle_is_part_of_the_head(change: str) -> None:
    model = stack("aaaaaaaa")
    block: Any = model.blocks[3]
    if change == "attribute":
        block.scale = 3.0
    elif change == "hook":
        block.linear.register_forward_hook(print)
    elif change == "width":
        block.linear = nn.Linear(4, 5)
    elif change == "dtype":
        block.linear.to(torch.float64)
    else:
        block.linear.eval()
    assert find_periods(model) == Periods("blocks", 5, 1, 3)
    model.blocks[7] = Block(7, scale=2.0)
    assert find_periods(model) is None


def test_blocks_that_differ_in_the_configuration_are_of_different_kinds() -> None:
    model: Any = stack("aaaaaaaa")
    model.config = SimpleNamespace(layer_types=["sliding", "full"] * 4)
    assert find_periods(model) == Periods("blocks", 2, 2, 3)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))])
def test_model_without_a_list_of_blocks_has_no_periods(model: nn.Module) -> None:
    assert find_periods(model) is None


def test_blocks_of_three_classes_have_no_periods() -> None:
    assert find_periods(Stack([Other(0), *(Block(i) for i in range(1, 8))])) == Periods("blocks", 2, 1, 6)
    assert find_periods(Stack([Other(0), Third(1), *(Block(i) for i in range(2, 8))])) is None


def test_deepest_of_the_outermost_lists_counts() -> None:
    model: Any = nn.Module()
    model.inner = stack("aaaaaa")
    model.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    for block in model.inner.blocks:
        block.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
    assert find_periods(model) == Periods("inner.blocks", 1, 1, 5)


def test_captured_are_the_head_and_two_periods() -> None:
    assert Periods("blocks", 3, 2, 4).captured == 7


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [
        ("llama", {"num_hidden_layers": 8}, Periods("model.layers", 1, 1, 7)),
        ("gemma2", {"num_hidden_layers": 8}, Periods("model.layers", 2, 2, 3)),
        ("gpt2", {"n_layer": 8}, Periods("transformer.h", 1, 1, 7)),
        ("mixtral", {"num_hidden_layers": 8}, Periods("model.layers", 1, 1, 7)),
        ("llama", {"num_hidden_layers": 3}, None),
    ],
)
def test_periods_of_real_models(name: str, depth: dict[str, int], expected: Periods | None) -> None:
    assert find_periods(tiny.build(name, **depth)) == expected
