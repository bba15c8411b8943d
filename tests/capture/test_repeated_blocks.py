"""Repeated blocks: which ones are planned, and that the plan holds for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paraxis import plan_model
from paraxis.capture.repeated_blocks import find_repeated, without_repeats


class Block(nn.Module):
    def __init__(self, index: int, width: int = 16, scale: float = 1.0) -> None:
        super().__init__()
        self.index, self.scale = index, scale
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def planned(blocks: list[nn.Module]) -> tuple[int, dict[int, int]] | None:
    found = find_repeated(Stack(blocks))
    return (found[0].planned, found[0].like) if found else None


def test_blocks_that_differ_only_in_their_index_are_of_one_kind() -> None:
    assert planned([Block(i) for i in range(6)]) == (2, {2: 1, 3: 1, 4: 1, 5: 1})


def test_every_kind_is_planned() -> None:
    widths = [16, 16, 24, 16, 16, 24, 16, 16, 24]
    assert planned([Block(i, n) for i, n in enumerate(widths)]) == (6, {6: 4, 7: 4, 8: 5})


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(i) for i in range(3)],
        [Block(i, scale=0.5**i) for i in range(6)],
        [*(Block(i) for i in range(5)), Block(5, 24)],
        [Block(0), *(nn.Sequential(Block(i)) if i % 2 else Block(i) for i in range(1, 4))],
    ],
    ids=["few", "different attributes", "a different last block", "few of each kind"],
)
def test_other_lists_are_planned_in_full(blocks: list[nn.Module]) -> None:
    assert planned(blocks) is None


def test_the_model_has_all_blocks_again_afterwards() -> None:
    model = Stack([Block(i) for i in range(6)])
    with without_repeats(model, find_repeated(model)):
        assert len(model.blocks) == 2
    assert len(model.blocks) == 6


def deep(kind: str) -> Any:
    from transformers import Gemma2Config, GPT2Config

    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}
    if kind == "gpt2":
        return GPT2Config(n_embd=32, n_layer=5, n_head=8, vocab_size=96)
    return Gemma2Config(**sizes, head_dim=8, intermediate_size=64, num_hidden_layers=6)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("gemma2", marks=pytest.mark.long)])
def test_the_plan_is_that_of_all_blocks(kind: str) -> None:
    by_blocks, full = plan_model(deep(kind), 4), plan_model(deep(kind), 4, plan_by_blocks=False)
    data, expected = by_blocks.to_json(), full.to_json()
    assert data.pop("cost") == pytest.approx(expected.pop("cost"))
    for name in ("parameters", "layers", "collectives", "sharded_fraction", "unplanned", "optimal"):
        assert data[name] == expected[name], name
    assert sorted(map(str, data["replicated"])) == sorted(map(str, expected["replicated"]))


def test_a_forward_that_needs_all_blocks_is_planned_in_full() -> None:
    class Counting(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[5](super().forward(x))

    plan = plan_model(Counting([Block(i) for i in range(6)]), 2, example_inputs=torch.ones(2, 8))
    assert not plan.unplanned and plan.count() == {"all_reduce": 7}
