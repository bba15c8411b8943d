"""Decode states: what they take of a prefill, how they grow, and which are pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraxis.placement import Layout, Shard
from paraxis.runtime.generation import cache_sizes
from paraxis.runtime.generation.decode_state import DecodeState, StatePool, UnsupportedCache
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec

CPU = torch.device("cpu")


def prefilled(length: int = 5, batch: int = 3, window: int | None = None) -> Any:
    """A dynamic cache of two layers as after a prefill; the second with a sliding window."""
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    if window is not None:
        cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=window)
    for i in range(2):
        cache.update(torch.randn(batch, 2, length, 4), torch.randn(batch, 2, length, 4), i)
    return cache


def keys_and_values(cache: Any) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys.clone(), layer.values.clone())]


def test_a_prefill_moves_to_the_preallocated_cache() -> None:
    state = DecodeState(3, 16, CPU, 3, True)
    cache = prefilled(window=4)
    keys, values, window_keys, _ = keys_and_values(cache)
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[1, :2] = 0
    state.fill(cache, 5, torch.arange(5).expand(3, 5) - 1, mask)
    full, sliding = state.cache.layers
    assert torch.equal(full.keys[:3, :, :5], keys) and torch.equal(full.values[:3, :, :5], values)
    assert full.keys.shape == (4, 2, 16, 4) and not full.keys[:, :, 5:].any() and not full.keys[3].any()
    assert torch.equal(sliding.keys[:3, :, 2:5], window_keys), "a window holds the last positions"
    assert sliding.is_sliding and not full.is_sliding
    assert state.length == 5 and state.positions is not None and state.positions[:3, 0].tolist() == [4, 4, 4]
    assert state.mask is not None and state.mask[1].tolist() == [0, 0] + [1] * 14
    assert all(layer.keys is None for layer in cache.layers), "nothing else refers to the memory of the prefill"


def test_a_step_writes_behind_the_positions_in_use() -> None:
    state = DecodeState(1, 8, CPU, 1, False)
    state.fill(prefilled(batch=1), 5, torch.arange(5)[None], None)
    layer = state.cache.layers[0]
    new = torch.randn(1, 2, 1, 4)
    keys, _ = state.cache.update(new, new, 0)
    assert keys is layer.keys and torch.equal(keys[:, :, 5:6], new) and not keys[:, :, 6:].any()
    state.advance()
    assert state.cache.get_seq_length() == 6 and state.positions is not None and state.positions.item() == 6
    assert state.cache.get_mask_sizes(1, 0) == (8, 0)


def test_the_next_call_has_the_same_tensors_without_old_values() -> None:
    state = DecodeState(1, 8, CPU, 1, False)
    state.fill(prefilled(batch=1), 5, torch.arange(5)[None], None)
    layer = state.cache.layers[0]
    keys = layer.keys
    keys.fill_(float("nan"))
    state.fill(prefilled(batch=1, length=3), 3, torch.arange(3)[None], None)
    assert state.cache.layers[0] is layer and layer.keys is keys
    assert not keys[:, :, 3:].any() and not keys.isnan().any()


def test_sequences_are_padded_with_a_token_that_has_occurred() -> None:
    state = DecodeState(2, 8, CPU, 0, False)
    state.start(torch.tensor([[5, 6], [7, 8]]))
    state.append(torch.tensor([1, 2]))
    assert state.sequences.tolist() == [[5, 6, 1] + [5] * 6, [7, 8, 2] + [7] * 6]
    assert state.token[:2, 0].tolist() == [1, 2]


def test_a_state_grows_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_sizes, "FIRST_CAPACITY", 8)
    state = DecodeState(3, 8, CPU, 3, True)
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[0, 0] = 0
    state.start(torch.arange(15).view(3, 5))
    state.fill(prefilled(), 5, torch.arange(5).expand(3, 5), mask)
    for token in range(3):
        state.append(torch.full((3,), 90 + token))
        state.advance()
    state.unfinished[1] = 0
    keys = state.cache.layers[0].keys.clone()
    grown = state.grown(9, 8)
    assert grown.capacity == 32 and state.cache is None
    assert torch.equal(grown.cache.layers[0].keys[:, :, :8], keys) and not grown.cache.layers[0].keys[:, :, 8:].any()
    assert grown.sequences[2].tolist() == [10, 11, 12, 13, 14, 90, 91, 92] + [10] * 25
    assert grown.mask is not None and grown.mask[0].tolist() == [0] + [1] * 31
    assert grown.length == 8 and grown.column.item() == 8 and grown.unfinished.tolist() == [1, 0, 1]
    assert grown.positions is not None and grown.positions[:3, 0].tolist() == [8, 8, 8]


@pytest.mark.parametrize("cached", [3, 6])
def test_the_returned_cache_is_a_copy_in_transformers_own_form(cached: int) -> None:
    state = DecodeState(3, 16, CPU, 3, False)
    cache = prefilled(length=6, window=4)
    keys = cache.layers[0].keys.clone()
    state.fill(cache, 6, torch.arange(6).expand(3, 6), None)
    assert state.write_back(cache, cached) is cache
    assert torch.equal(cache.layers[0].keys, keys[:, :, :cached])
    assert cache.layers[1].keys.shape[2] == min(3, cached) and cache.get_seq_length(1) == cached
    state.cache.layers[0].keys.zero_()
    assert torch.equal(cache.layers[0].keys, keys[:, :, :cached])
    cache.update(torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 4), 0)
    assert cache.get_seq_length(0) == cached + 1


def test_pooled_states_are_used_by_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(CPU)
    state = pool.take(1, 8, 1, False)
    state.fill(prefilled(batch=1), 5, torch.arange(5)[None], None)
    assert pool.take(1, 8, 1, False) is not state
    pool.give(state)
    assert pool.take(1, 16, 1, False) is not state and pool.take(2, 8, 1, False) is not state
    assert pool.take(1, 8, 1, True) is not state
    assert pool.take(1, 8, 1, False) is state
    assert pool.take(1, 8, 1, False) is not state
    monkeypatch.setattr(cache_sizes, "MAX_HOST_BYTES", state.cache_bytes - 1)
    pool.give(state)
    assert pool.take(1, 8, 1, False) is not state, "it takes more memory than a pool may"


@pytest.mark.parametrize(("dim", "fits"), [(1, True), (0, False), (2, False)])
def test_heads_may_be_sharded_and_nothing_else(dim: int, fits: bool) -> None:
    local = torch.ones(2, 2, 2, 4)
    size = [2, 2, 2, 4]
    size[dim] = 4
    keys = ShardedTensor(local, ShardSpec(Shard.of(dim, Layout.even(4, 2)), None), size)
    cache = prefilled(batch=size[0], length=size[2])
    for layer in cache.layers:
        layer.keys = layer.values = keys
    state = DecodeState(size[0], 8, CPU, 0, False)
    if not fits:
        with pytest.raises(UnsupportedCache, match="on this rank"):
            state.fill(cache, size[2], None, None)
        return
    state.fill(cache, 2, None, None)
    found = state.cache.layers[0].keys
    assert found.shape == (2, 4, 8, 4) and found.local.shape == (2, 2, 8, 4) and found.placement == keys.placement
    assert torch.equal(found.local[:, :, :2], local)
    written = state.write_back(cache, 2).layers[1].values
    assert written.shape == (2, 4, 2, 4) and torch.equal(written.local, local)
