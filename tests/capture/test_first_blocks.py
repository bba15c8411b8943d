"""A deep model with its first blocks alone, and a KV cache with its first layers."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny
from torch import nn

from paraxis.capture.first_blocks import FirstBlocks, FirstLayers
from paraxis.capture.operators_run import tensors_of
from paraxis.capture.periods import Periods, find_periods
from paraxis.compat.torch import COMPILED_CALL


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(4)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x * self.scale)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Inner(), nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


def cut(model: nn.Module) -> FirstBlocks:
    periods = find_periods(model)
    assert periods is not None
    return FirstBlocks(model, periods, lambda forward: hasattr(forward, "leads_in"))


def test_small_model_has_the_first_blocks_and_everything_else_of_the_model() -> None:
    model = Model()
    small: Any = cut(model).model
    assert type(small) is Model and type(small.inner) is Inner and type(small.inner.blocks) is nn.ModuleList
    assert len(small.inner.blocks) == 3 and len(model.inner.blocks) == 6
    assert all(a is b for a, b in zip(small.inner.blocks, model.inner.blocks))
    assert small.head is model.head and small.inner.norm is model.inner.norm
    assert small is not model and small.inner is not model.inner, "those that contain the blocks are copies"
    x = torch.randn(2, 4)
    expected = x
    for block in [*model.inner.blocks][:3]:
        expected = block(expected)
    assert torch.equal(small(x), model.head(model.inner.norm(expected)))
    assert not torch.equal(small(x), model(x))


def test_update_takes_over_what_changed_on_the_copied_modules() -> None:
    model = Model()
    first = cut(model)
    small: Any = first.model
    model.inner.scale = 2.0
    model.inner.extra = nn.Linear(1, 1)
    model.head = nn.Linear(4, 5)
    model.inner.blocks[1] = block = Block()
    model.inner.register_buffer("mask", torch.ones(1))
    del model.inner.norm
    first.update()
    assert small.inner.scale == 2.0 and small.inner.mask is model.inner.mask
    assert small.head is model.head and small.inner.extra is model.inner.extra
    assert not hasattr(small.inner, "norm")
    assert small.inner.blocks[1] is block and len(small.inner.blocks) == 3
    assert small is first.model, "the same objects, or what was compiled for them would be lost"


def test_update_takes_over_modules_that_replace_others() -> None:
    """The children of a module are in a dictionary that stays the same object when one is replaced."""
    model = Model()
    first = cut(model)
    small: Any = first.model
    model.head = nn.Linear(4, 5)
    first.update()
    assert small.head is model.head
    model.inner.blocks[1] = block = Block()
    first.update()
    assert small.inner.blocks[1] is block


def test_blocks_are_shared_so_that_what_changes_in_them_is_seen_at_once() -> None:
    model = Model()
    small: Any = cut(model).model
    calls: list[Any] = []
    model.inner.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    model.inner.blocks[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
    small(torch.randn(2, 4))
    assert calls == [1] and small.inner.blocks[0].linear.weight is model.inner.blocks[0].linear.weight


def test_programs_of_the_model_are_not_taken_over_but_a_forward_of_the_user_is() -> None:
    def leads_in(*args: Any) -> Any:
        raise AssertionError("the program of the deep model")

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    leads_in.leads_in = True  # type: ignore[attr-defined]
    model: Any = Model()
    model.__dict__.update({"forward": leads_in, "generate": leads_in, COMPILED_CALL: leads_in})
    first = cut(model)
    small: Any = first.model
    assert not {"forward", "generate", COMPILED_CALL} & vars(small).keys()
    assert small(torch.ones(1, 4)).shape == (1, 7)
    model.forward = own
    first.update()
    assert torch.equal(small(torch.ones(1, 4)), torch.full((1, 4), 3.0))
    del model.forward
    first.update()
    assert small(torch.ones(1, 4)).shape == (1, 7)


def test_model_is_left_as_it_was() -> None:
    model = Model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    children = {name: dict(module._modules) for name, module in model.named_modules()}
    first = cut(model)
    first.update()
    first.model(torch.ones(1, 4))
    for name, module in model.named_modules():
        assert vars(module) == before[name] and module._modules == children[name]


def test_list_of_blocks_in_the_model_itself_is_cut() -> None:
    class Flat(Inner):
        """The list is a child of the model."""

    model = Flat()
    small: Any = FirstBlocks(model, Periods("blocks", 2, 1, 4), lambda forward: False).model
    assert len(small.blocks) == 4 and len(model.blocks) == 6 and small.norm is model.norm


def filled_cache(layers: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=tiny.config("llama", num_hidden_layers=layers))
    for i in range(layers):
        cache.update(torch.full((1, 4, 3, 8), float(i)), torch.full((1, 4, 3, 8), -float(i)), i)
    return cache


def test_first_layers_of_a_cache_are_the_layers_of_the_cache() -> None:
    cache = filled_cache(6)
    cut = FirstLayers(cache, 3)
    assert type(cut.first) is type(cache) and len(cut.first.layers) == 3 and len(cache.layers) == 6
    assert all(a is b for a, b in zip(cut.first.layers, cache.layers))
    assert cut.first.get_seq_length() == 3
    cut.first.update(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), 1)
    assert cache.get_seq_length(1) == 4 and cache.get_seq_length(4) == 3
    assert {name.split(".")[1] for name in tensors_of(cut.first)} == {"0", "1", "2"}


def test_attributes_that_a_call_sets_on_a_cache_come_back() -> None:
    cache = filled_cache(6)
    cache.seen = 3
    cut = FirstLayers(cache, 3)
    assert cut.first.seen == 3
    cut.first.seen, cut.first.mark = 4, "new"
    cut.give_back()
    assert cache.seen == 4 and cache.mark == "new" and len(cache.layers) == 6
    cache.seen = 5
    del cache.mark
    cut.update()
    assert cut.first.seen == 5 and not hasattr(cut.first, "mark") and len(cut.first.layers) == 3
