"""Whether all blocks of a model do the same: what is accepted, and what is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import tiny
from torch import nn

from paraxis.capture.first_blocks import FirstBlocks
from paraxis.capture.operators_run import tensors_of
from paraxis.capture.periods import Periods, find_periods
from paraxis.capture.same_blocks import why_not_same

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def cut(model: nn.Module) -> FirstBlocks:
    periods = find_periods(model)
    assert periods is not None
    return FirstBlocks(model, periods, lambda forward: False)


def filled(model: Any, static: bool) -> Any:
    from transformers import DynamicCache, StaticCache

    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("llama", {"num_hidden_layers": 8}),
        ("gemma2", {"num_hidden_layers": 8}),
        ("gpt2", {"n_layer": 8}),
    ],
)
def test_blocks_of_real_models_are_the_same_in_every_kind_of_call(name: str, depth: dict[str, int]) -> None:
    model = tiny.build(name, **depth)
    small = cut(model)
    for kwargs in (
        {"use_cache": False},
        {},
        {"past_key_values": filled(model, static=False)},
        {"past_key_values": filled(model, static=True)},
        {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "use_cache": False},
    ):
        assert why_not_same(model, small, (IDS,), kwargs) == "", kwargs.keys()


def set_eps(block: Any) -> None:
    block.input_layernorm.variance_epsilon = 1e-2


def set_activation(block: Any) -> None:
    block.mlp.act_fn = nn.GELU()


def set_scaling(block: Any) -> None:
    block.self_attn.scaling = 0.25


def set_hook(block: Any) -> None:
    block.mlp.register_forward_hook(lambda module, args, output: output * 2)


def set_pre_hook(block: Any) -> None:
    block.mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def set_dtype(block: Any) -> None:
    block.mlp.to(torch.bfloat16)
    forward = block.mlp.forward
    block.mlp.forward = lambda x: forward(x.bfloat16()).float()


def set_method(block: Any) -> None:
    forward = block.mlp.forward
    block.mlp.forward = lambda x: forward(x).tanh()


def set_width(block: Any) -> None:
    block.mlp.gate_proj, block.mlp.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
    block.mlp.down_proj = nn.Linear(96, 64, bias=False)


def set_bias(block: Any) -> None:
    block.mlp.down_proj = nn.Linear(128, 64)


def set_swapped(block: Any) -> None:
    block.mlp.gate_proj, block.mlp.up_proj = block.mlp.up_proj, block.mlp.gate_proj


def set_shared(block: Any) -> None:
    block.mlp.up_proj.weight = block.mlp.gate_proj.weight


CHANGES = [
    set_eps,
    set_activation,
    set_scaling,
    set_hook,
    set_pre_hook,
    set_dtype,
    set_method,
    set_width,
    set_bias,
    set_shared,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("number", [4, 7])
def test_other_block_is_refused_with_its_number(change: Callable[[Any], None], number: int) -> None:
    model: Any = tiny.build("llama", num_hidden_layers=8)
    small = cut(model)
    assert why_not_same(model, small, (IDS,), {"use_cache": False}) == ""
    change(model.model.layers[number])
    found = why_not_same(model, small, (IDS,), {"use_cache": False})
    assert found == f"block {number} runs other operators than the blocks before it"


def test_modules_that_are_swapped_by_name_are_no_other_block() -> None:
    """The parameters of a period are found by name."""
    model: Any = tiny.build("llama", num_hidden_layers=8)
    small = cut(model)
    set_swapped(model.model.layers[5])
    assert why_not_same(model, small, (IDS,), {"use_cache": False}) == ""


def test_other_sliding_window_is_refused() -> None:
    model: Any = tiny.build("gemma2", num_hidden_layers=8)
    small = cut(model)
    model.model.layers[6].self_attn.sliding_window = 2
    cache = filled(model, static=False)
    cache.layers[6].sliding_window = 2
    ids = IDS[:, :1].repeat(1, 4)
    found = why_not_same(model, small, (ids,), {"past_key_values": cache})
    assert found.startswith("block 6 ") or "recorded" in found


def test_layer_of_the_cache_of_another_size_is_refused() -> None:
    from transformers import StaticCache

    model = tiny.build("llama", num_hidden_layers=8)
    cache: Any = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    small = cut(model)
    assert why_not_same(model, small, (IDS[:, :1],), {"past_key_values": cache}) == ""
    cache.layers[5].max_cache_len += 1
    for name in ("keys", "values"):
        tensor = getattr(cache.layers[5], name)
        setattr(cache.layers[5], name, torch.cat([tensor, tensor[:, :, :1]], 2))
    assert why_not_same(model, small, (IDS[:, :1],), {"past_key_values": cache}) != ""


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Residual(Block):
    """The first block's input is added in every block: what all share."""

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return super().forward(x, first) + first


class Numbered(Block):
    """Does something else from its sixth block on, which no attribute shows."""

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return super().forward(x, first) * (1.0 if self.index < 6 else 2.0)


class Model(nn.Module):
    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(8))

    def forward(self, x: torch.Tensor) -> Any:
        first = x = x.sin()
        for block in self.blocks:
            x = block(x, first)
        return self.after(x)

    def after(self, x: torch.Tensor) -> Any:
        return x.relu()


class Skipping(Model):
    """A block takes the result of the block before the one before it."""

    def forward(self, x: torch.Tensor) -> Any:
        first = x = before = x.sin()
        for i, block in enumerate(self.blocks):
            x, before = block(before if i >= 5 else x, first), x
        return x


class AllResults(Model):
    """Returns the results of all blocks."""

    def forward(self, x: torch.Tensor) -> Any:
        first = x = x.sin()
        found = []
        for block in self.blocks:
            x = block(x, first)
            found.append(x)
        return found


class ByDepth(Model):
    """Divides by the number of blocks."""

    def after(self, x: torch.Tensor) -> Any:
        return x / len(self.blocks)


class BeforeByDepth(Model):
    """The same before the blocks."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x / len(self.blocks))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(), ""),
        (Model(Residual), ""),
        (Model(Numbered), "block 6 runs other operators than the blocks before it"),
        (Skipping(), "block 5 runs other operators than the blocks before it"),
        (AllResults(), "what follows the blocks depends on their number"),
        (ByDepth(), "what follows the blocks depends on their number"),
        (BeforeByDepth(), "block -1 runs other operators in a model with fewer blocks"),
    ],
    ids=["equal", "residual", "numbered", "skipping", "all results", "by depth", "before by depth"],
)
def test_forwards_that_are_accepted_and_refused(model: Model, expected: str) -> None:
    assert find_periods(model) == Periods("blocks", 1, 1, 7)
    assert why_not_same(model, cut(model), (torch.randn(2, 4),), {}) == expected


def test_period_of_two_that_is_taken_for_one_is_refused() -> None:
    class Alternating(Block):
        def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            x = super().forward(x, first)
            return x.sin() if self.index % 2 else x.cos()

    model = Model(Alternating)
    small = cut(model)
    assert why_not_same(model, small, (torch.randn(2, 4),), {}).startswith("block 3 ")
    small = FirstBlocks(model, replace(small.periods, head=2, period=2, count=3), lambda forward: False)
    assert why_not_same(model, small, (torch.randn(2, 4),), {}) == ""


def test_forward_that_cannot_be_recorded_is_a_reason() -> None:
    class Looking(Block):
        def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    model = Model(Looking)
    assert "its operators cannot be recorded: " in why_not_same(model, cut(model), (torch.randn(2, 4),), {})


def test_nothing_is_left_changed() -> None:
    model: Any = tiny.build("llama", num_hidden_layers=8)
    cache = filled(model, static=False)
    state, before = dict(model.named_parameters()), dict(tensors_of(cache))
    small = cut(model)
    inside = dict(small.model.named_parameters())
    set_hook(model.model.layers[6])
    for _ in range(2):
        assert why_not_same(model, small, (IDS[:, :1],), {"past_key_values": cache}).startswith("block 6 ")
    assert all(p is state[name] and not p.is_meta for name, p in model.named_parameters())
    assert all(p is inside[name] for name, p in small.model.named_parameters())
    now = tensors_of(cache)
    assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
    assert all(len(layer._forward_hooks) == 0 for layer in model.model.layers)
