"""Attention on a paged KV cache: for every sequence what plain attention computes on it alone."""

from __future__ import annotations

import pytest
import torch

from paraxis.compat.paged_attention import Scoring, attend_causal
from paraxis.runtime.batching.paged_cache import CachedStep, Layer, MeasuredStep, PagedCache
from paraxis.runtime.batching.request import Request
from paraxis.runtime.batching.scheduler import Part
from paraxis.runtime.batching.step import Step

SIZE, HEADS, KV_HEADS, FEATURES = 4, 4, 2, 8
CPU = torch.device("cpu")


def compare(dtype: torch.dtype, window: int, softcap: float, with_sinks: bool) -> None:
    """Two sequences, in chunks: each chunk of a step is compared with attention on the sequence alone."""
    torch.manual_seed(0)
    layer = Layer((KV_HEADS, FEATURES, FEATURES), dtype, ())
    cache = PagedCache([layer], 8, SIZE, CPU)
    lengths = {"a": 11, "b": 6}
    data = {
        name: [torch.randn(n, h, FEATURES, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]
        for name, n in lengths.items()
    }
    requests = {name: Request(name, list(range(n)), 9) for name, n in lengths.items()}
    requests["a"].blocks, requests["b"].blocks = [5, 0, 3], [7, 2]
    sinks = torch.randn(HEADS, dtype=dtype) if with_sinks else None
    for chunks in ({"a": 5}, {"a": 1, "b": 4}, {"b": 1, "a": 4}, {"a": 1, "b": 1}):
        parts = [Part(requests[name], tokens) for name, tokens in chunks.items()]
        step = CachedStep(cache, Step.of(parts), CPU)
        rows = [[x[r.computed : r.computed + n] for x in data[r.name]] for r, n in parts]
        q, k, v = (torch.cat([*each, torch.zeros_like(each[0][:1])]) for each in zip(*rows, strict=True))
        how = Scoring(0.3, window, softcap, sinks)
        out = step.attend(q, k, v, how, [])
        step.check_complete()
        at = 0
        for request, tokens in parts:
            end = request.computed + tokens
            own = [x[:end] for x in data[request.name]]
            right = attend_causal(own[0], own[1], own[2], 0, how)[request.computed :]
            torch.testing.assert_close(out[at : at + tokens], right, rtol=1e-5, atol=1e-5)
            at, request.computed = at + tokens, end
        assert not out[at:].any(), "tokens of no sequence get zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0.0, False), (3, 0.0, False), (0, 2.0, True)])
def test_each_sequence_attends_to_itself_alone(dtype: torch.dtype, window: int, softcap: float, sinks: bool) -> None:
    compare(dtype, window, softcap, sinks)


def test_layers_are_measured_and_checked() -> None:
    measured = MeasuredStep()
    q, k = torch.randn(2, HEADS, FEATURES), torch.randn(2, KV_HEADS, FEATURES)
    measured.attend(q, k, k, Scoring(1.0), [2, 3])
    assert measured.layers == [Layer((KV_HEADS, FEATURES, FEATURES), torch.float32, (2, 3))]
    assert measured.layers[0].bytes_per_position == 2 * (8 + 8) * 4
    request = Request("a", [1, 2], 9)
    request.blocks = [0]
    step = CachedStep(PagedCache(measured.layers, 2, SIZE, CPU), Step.of([Part(request, 2)]), CPU)
    with pytest.raises(RuntimeError, match="0 attention layers of 1"):
        step.check_complete()
    with pytest.raises(RuntimeError, match="places them in another way"):
        step.attend(q, k, k, Scoring(1.0), [0, 1])
    with pytest.raises(RuntimeError, match="more than 1 attention layers"):
        step.attend(q, k, k, Scoring(1.0), [2, 3])
