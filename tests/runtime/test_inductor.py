"""Local programs compiled by Inductor: values, gradients, generation, and parameters that change."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from models.compare import gradient_errors, max_difference, parallel, parallel_module, reference, same_tokens
from torch import nn
from torch.profiler import ProfilerActivity, profile

from paraxis.tensor.sharded_tensor import ShardedTensor, materialize, wrap


def block() -> nn.Module:
    """A norm and a feed-forward block."""
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def compile_block() -> dict[str, Any]:
    """Errors of a compiled block with and without gradients, and its all-reduces."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model, unsharded, ctx = parallel_module(block, x, compile="inductor")
    with torch.no_grad():
        inference = model(x)
    found, expected = model(x), unsharded(x)
    found.square().sum().backward()
    expected.square().sum().backward()
    return {
        "inference": max_difference(inference, expected),
        "training": max_difference(found, expected),
        "gradients": max(gradient_errors(model, unsharded).values()),
        "all_reduces": sum(c.kind == "all_reduce" for c in ctx.plan.collectives),
    }


def test_compiled_block_equals_the_unsharded_one(ranks: Any) -> None:
    for found in ranks(2).run(compile_block, timeout=300):
        assert found["inference"] < 1e-5 and found["training"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["all_reduces"] == 1


def change_parameters(compile: str | None) -> tuple[float, str]:
    """The change of the output after the shards moved in memory, and the error after a layer was replaced."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model, _, _ = parallel_module(block, x, compile=compile)
    with torch.no_grad():
        expected = model(x)
        for parameter in model.parameters():
            materialize(parameter, parameter.to_local().clone())
        change = max_difference(model(x), expected)
        model[1] = nn.Linear(16, 64)
        with pytest.raises(RuntimeError) as caught:
            model(x)
    return change, str(caught.value)


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_moved_shards_are_used_and_replaced_layers_refused(compile: str | None, ranks: Any) -> None:
    for change, message in ranks(2).run(change_parameters, compile, timeout=300):
        assert change == 0 and "illegal path for recompilation" in message


def generate_compiled(folder: str) -> dict[str, Any]:
    """Tokens of a compiled model with a dynamic cache, two conversations that branch, and the operators it ran."""
    model, _ = parallel(folder, compile="inductor")
    unsharded = reference(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = same_tokens(model, unsharded, ids, 150) and same_tokens(model, unsharded, ids, 12, num_beams=3)
    branches, layouts = [], []
    with torch.no_grad():
        for m in (model, unsharded):
            cache = prefilled_cache(m, ids)
            caches = [cache, deepcopy(cache) if m is unsharded else copy_cache(cache, m.config)]
            branches.append([m(torch.tensor([[t]]), past_key_values=c).logits for c, t in zip(caches, (9, 10))])
            layouts.append([decode_with_layout(m, ids, how) for how in (contiguous, rows_first, contiguous)])
        cache = prefilled_cache(model, ids)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(ids[:, :1], past_key_values=cache)
    return {
        "tokens": tokens,
        "branches": max(map(max_difference, *branches)),
        "layouts": max(map(max_difference, *layouts)),
        "operators": {event.name for event in profiled.events()},
    }


def prefilled_cache(model: Any, ids: torch.Tensor) -> Any:
    """A dynamic cache with these tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


def copy_cache(cache: Any, config: Any) -> Any:
    """A second cache of the same tensors."""
    from transformers import DynamicCache

    other = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, i)
    return other


def decode_with_layout(model: Any, ids: torch.Tensor, how: Any) -> torch.Tensor:
    """The logits of a decode step on a cache of which one shard has another memory layout."""
    cache = prefilled_cache(model, ids)
    values = cache.layers[-1].values
    if isinstance(values, ShardedTensor):
        cache.layers[-1].values = wrap(how(values._local), values._spec, list(values.shape))
    return model(ids[:, :1], past_key_values=cache).logits  # type: ignore[no-any-return]


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.long
def test_compiled_generation_appends_in_place_and_communicates_by_shared_memory(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(generate_compiled, checkpoints("gpt2", n_positions=256), timeout=600):
        assert found["tokens"] and found["branches"] < 1e-4 and found["layouts"] < 1e-4
        operators = found["operators"]
        assert "paraxis::host_all_reduce" in operators
        assert not any(name.startswith("c10d::") for name in operators)
        assert operators & {"paraxis::append_rows", "paraxis::attend_appended"}


def count_programs(folder: str) -> tuple[bool, int]:
    """Whether tokens are those of the unsharded model, and the programs compiled for a prompt and what follows it."""
    model, ctx = parallel(folder, compile="inductor")
    return same_tokens(model, reference(folder), torch.tensor([[5, 6, 7, 8]]), 5), ctx.compile_times


@pytest.mark.long
def test_compiled_generation_on_one_rank_takes_two_programs(ranks: Any, checkpoints: Any) -> None:
    """The cache that prefill returns has the strides of the one that a decode step returns."""
    assert ranks(1).run(count_programs, checkpoints("llama"), timeout=600) == [(True, 2)]
