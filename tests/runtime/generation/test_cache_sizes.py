"""Sizes of KV caches: few, large enough, and not larger than memory allows."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from paraxis.runtime.generation.cache_sizes import (
    FIRST_CAPACITY,
    LARGEST_STEP,
    affordable_positions,
    capacity_for,
    memory_limit,
    rows_for,
)

LENGTHS = (1, 1024, 1025, 4096, 4097, 8192, 8193, 20000)


def test_capacities_grow_in_large_steps() -> None:
    assert [capacity_for(n) for n in LENGTHS] == [1024, 1024, 4096, 4096, 8192, 8192, 16384, 24576]


@pytest.mark.parametrize("affordable", [None, 0, 1500, 3000, 100_000])
def test_capacities_are_large_enough(affordable: int | None) -> None:
    for length in range(1, 40_000, 97):
        capacity = capacity_for(length, affordable)
        assert length <= capacity <= max(4 * length, length + LARGEST_STEP, FIRST_CAPACITY)


def test_capacities_are_smaller_where_memory_is_short() -> None:
    assert [capacity_for(n, 2000) for n in LENGTHS] == [1024, 1024, 2048, 4096, 8192, 8192, 16384, 24576]
    assert capacity_for(1025, 4096) == 4096


def test_lengths_up_to_3000_have_two_capacities() -> None:
    assert len({capacity_for(n + 64) for n in range(1, 3001)}) == 2


def test_there_are_few_numbers_of_rows() -> None:
    assert [rows_for(n) for n in (1, 2, 3, 9, 16, 17, 40)] == [1, 2, 4, 16, 16, 32, 48]
    assert all(rows_for(n) >= n for n in range(1, 200))


def test_what_is_affordable_follows_from_the_memory_of_a_position() -> None:
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    for i in range(2):
        cache.update(torch.zeros(3, 2, 5, 4), torch.zeros(3, 2, 5, 4), i)
    of_position = 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, features, bytes
    assert affordable_positions(cache, 1, 1, 10 * of_position) == 10
    assert affordable_positions(cache, 3, 1, 40 * of_position) == 10, "four rows"
    assert affordable_positions(cache, 1, 2, 10 * of_position) == 20, "two ranks"


def test_the_host_has_a_limit_of_its_own() -> None:
    assert 0 < memory_limit(torch.device("cpu")) <= 1 << 30
