"""Placements, sizes and strides that a compiled program accepts, and others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.compare import batch, max_difference, parallel, reference
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.runtime.stride_guard import ShardGuard, StrideGuard
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec

DYNAMIC_LENGTH = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])


def guard(*examples: torch.Tensor) -> StrideGuard:
    """As a compiler sees these tensors, of which the third dimension is dynamic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sources = [ConstantSource(f"x{k}") for k in range(len(examples))]
    return StrideGuard(
        [mode.from_tensor(x, symbolic_context=DYNAMIC_LENGTH, source=s) for x, s in zip(examples, sources, strict=True)]
    )


def cache(length: int, capacity: int, heads: int = 8) -> torch.Tensor:
    return torch.zeros(2, heads, capacity, 4)[:, :, :length]


def test_same_strides_of_other_lengths() -> None:
    strides = guard(cache(5, 17), cache(5, 17))
    assert strides.matches([cache(5, 17), cache(5, 17)])
    assert strides.matches([cache(9, 17), cache(9, 17)]), "longer"
    assert strides.matches([cache(40, 64), cache(40, 64)]), "a larger buffer"
    assert strides.matches([cache(6, 6), cache(6, 6)]), "a full buffer"


def test_other_strides() -> None:
    strides = guard(cache(5, 17), cache(5, 17))
    transposed = cache(5, 17).transpose(1, 2).contiguous().transpose(1, 2)
    assert not strides.matches([transposed, transposed]), "rows first"
    assert not strides.matches([cache(5, 17), transposed])
    assert not strides.matches([cache(5, 17), cache(5, 64)]), "the compiler has one symbol for both"
    assert not strides.matches([cache(5, 17, heads=4), cache(5, 17, heads=4)])
    assert not strides.matches([cache(5, 17).double(), cache(5, 17).double()])
    assert not strides.matches([cache(5, 17)[0], cache(5, 17)[0]])


def test_strides_that_follow_from_sizes() -> None:
    strides = guard(cache(5, 5), cache(5, 5))
    assert strides.matches([cache(7, 7), cache(7, 7)])
    assert not strides.matches([cache(7, 8), cache(7, 8)])


def test_static_sizes() -> None:
    strides = StrideGuard([torch.zeros(2, 3), torch.zeros(4)])
    assert strides.matches([torch.ones(2, 3), torch.ones(4)])
    assert not strides.matches([torch.ones(3, 2).t(), torch.ones(4)])
    assert StrideGuard([]).matches([])


def sharded(local: torch.Tensor, dim: int | None = 1) -> Any:
    """One of two ranks' shards of a cache."""
    size = list(local.shape)
    if dim is not None:
        size[dim] *= 2
    placement = REPLICATE if dim is None else Shard.of(dim, Layout.even(size[dim], 2))
    return ShardedTensor(local, ShardSpec(placement, None), tuple(size))


def test_placements_and_strides_of_arguments() -> None:
    """Arguments at other positions do not matter."""
    guarded = ShardGuard({1: sharded(torch.zeros(2, 4, 5, 8)), 3: sharded(torch.zeros(2, 4, 5, 8))})

    def matches(a: Any, b: Any) -> bool:
        return guarded.matches((SimpleNamespace(), a, None, b))

    first, second = sharded(torch.zeros(2, 4, 5, 8)), sharded(torch.zeros(2, 4, 5, 8))
    assert matches(first, second) and matches(first, second) and matches(second, first)
    assert not matches(first, sharded(torch.zeros(2, 4, 5, 8), dim=0)), "another placement"
    assert not matches(first, sharded(torch.zeros(2, 4, 6, 8))), "another size"
    assert matches(first, second), "a call that does not match changes nothing"
    assert ShardGuard({}).matches((first,))


def replicate_the_values(cache: Any) -> None:
    """The shards of the keys stay as they are, the values become replicated."""
    for layer in cache.layers:
        if isinstance(layer.values, ShardedTensor):
            full = layer.values.full_tensor()
            layer.values = ShardedTensor(full, ShardSpec(REPLICATE, layer.values.group), tuple(full.shape))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "unchanged": lambda cache: None,
    "replicated": replicate_the_values,
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
    "cropped": lambda cache: cache.crop(-3),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}
"""What a user does to a cache, by name."""


def change_the_cache(folder: str, compile: Any, changes: list[str]) -> list[tuple[str, float]]:
    """Errors of decode steps on a cache that the user has changed, in this order."""
    (model, _), unsharded = parallel(folder, compile=compile), reference(folder)
    ids, _ = batch(256)
    errors = []
    with torch.no_grad():
        for name in changes:
            logits: list[list[torch.Tensor]] = []
            for one in (model, unsharded):
                cache = one(input_ids=ids, use_cache=True).past_key_values
                CHANGES[name](cache)
                step = ids[:1, :1].expand(cache.layers[0].keys.shape[0], 1).contiguous()
                logits.append([one(input_ids=step, past_key_values=cache).logits for _ in range(2)])
            errors += [(name, max_difference(a, b)) for a, b in zip(*logits, strict=True)]
    return errors


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_decode_on_a_cache_that_was_changed(ranks: Any, checkpoints: Any, compile: Any) -> None:
    changes = ["repeated", "selected", "cropped", "reordered"]
    for errors in ranks(2).run(change_the_cache, checkpoints("llama", num_hidden_layers=1), compile, changes):
        assert max(error for _, error in errors) < 1e-4, errors


@pytest.mark.parametrize("compile", ["auto", pytest.param("inductor", marks=pytest.mark.long)])
def test_decode_on_a_cache_with_another_placement(ranks: Any, checkpoints: Any, compile: Any) -> None:
    """Also where the program for sharded values was the last to run: it must not run for replicated ones."""
    changes = ["unchanged", "replicated"] * 2
    folder = checkpoints("llama", num_hidden_layers=1)
    for errors in ranks(2).run(change_the_cache, folder, compile, changes, timeout=600):
        assert max(error for _, error in errors) < 1e-4, errors
