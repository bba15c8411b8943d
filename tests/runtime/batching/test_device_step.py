"""Steps whose tables are on the device: the tables here, the results on a GPU."""

from __future__ import annotations

import pytest
import torch

from paraxis.compat.paged_attention import Scoring
from paraxis.runtime.batching.device_step import DecodeBuffers, DeviceStep, table_of
from paraxis.runtime.batching.paged_cache import CachedStep, Layer, PagedCache
from paraxis.runtime.batching.request import Choice, Request
from paraxis.runtime.batching.scheduler import Part
from paraxis.runtime.batching.step import Step

CPU = torch.device("cpu")
SIZE = 4


def request(name: str, prompt: int, computed: int, blocks: list[int]) -> Request:
    found = Request(name, list(range(1, prompt + 1)), 5, frozenset(), Choice())
    found.computed, found.blocks = computed, blocks
    return found


def mixed() -> Step:
    """Two decode steps around a chunk of a prefill that has begun."""
    return Step.of(
        [
            Part(request("a", 6, 5, [2, 5]), 1),
            Part(request("b", 9, 4, [7, 1, 3]), 3),
            Part(request("c", 3, 2, [4]), 1),
        ]
    )


def test_tables_of_a_mixed_step() -> None:
    step = DeviceStep.of(PagedCache([], 8, SIZE, CPU), mixed(), CPU)
    assert step.decoding is not None and step.prefilling is not None
    assert step.decoding.rows.tolist() == [0, 4] and step.decoding.lengths.tolist() == [6, 3]
    assert step.decoding.tables.tolist() == [[2, 5], [4, 0]]
    assert step.prefilling.sequences == [(0, 1, 3, 4)] and step.prefilling.tables.tolist() == [[7, 1, 3]]
    assert step.slots.tolist() == [5 * SIZE + 1, SIZE, SIZE + 1, SIZE + 2, 4 * SIZE + 2]


def test_buffers_are_filled_up_with_tokens_of_no_sequence() -> None:
    """They write to the spare slot and have no positions, whatever was there before."""
    cache = PagedCache([Layer((1, 2, 2), torch.float32, ())], 8, SIZE, CPU)
    assert cache.keys[0].shape == (1, cache.spare + 1, 2)
    buffers = DecodeBuffers(cache, 4, 3, CPU)
    addresses = [x.data_ptr() for x in (buffers.ids, buffers.slots, buffers.lengths, buffers.tables)]
    buffers.fill(Step.of([Part(request(str(i), 6, 5, [2, 5]), 1) for i in range(4)]))
    buffers.fill(Step.of([Part(request("a", 6, 5, [2, 5]), 1), Part(request("c", 3, 2, [4]), 1)]))
    assert buffers.ids.tolist() == [6, 3, 0, 0] and buffers.positions.tolist() == [5, 2, 0, 0]
    assert buffers.slots.tolist() == [5 * SIZE + 1, 4 * SIZE + 2, cache.spare, cache.spare]
    assert buffers.lengths.tolist() == [6, 3, 0, 0] and buffers.tables[:2].tolist() == [[2, 5, 0], [4, 5, 0]]
    assert addresses == [x.data_ptr() for x in (buffers.ids, buffers.slots, buffers.lengths, buffers.tables)]


def test_a_table_has_the_columns_of_the_longest_sequence() -> None:
    sequences = mixed().sequences
    assert table_of(sequences).shape == (3, 3) and table_of(sequences, 5).shape == (3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [0, 3])
def test_results_are_those_of_tables_on_the_host(window: int) -> None:
    device, found = torch.device("cuda"), []
    layer = Layer((2, 16, 16), torch.float32, ())
    torch.manual_seed(0)
    past = [torch.randn(2, 8 * SIZE + 1, 16, device=device) for _ in range(2)]
    query = torch.randn(6, 4, 16, device=device)  # one token of no sequence
    key, value = torch.randn(2, 6, 2, 16, device=device)
    for kind in (CachedStep, DeviceStep.of):
        cache = PagedCache([layer], 8, SIZE, device)
        cache.keys[0].copy_(past[0])
        cache.values[0].copy_(past[1])
        step = kind(cache, mixed(), device)  # type: ignore[operator]
        found.append((step.attend(query, key, value, Scoring(0.25, window), ()), cache.keys[0], cache.values[0]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
