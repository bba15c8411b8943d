"""Marking the length of a KV cache as dynamic for the compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paraxis.capture.dynamic_shapes import mark_dynamic, mark_static


def dynamic_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that Dynamo was told may change."""
    return set(getattr(tensor, "_dynamo_weak_dynamic_indices", ()))


def static_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that Dynamo was told to specialize on."""
    return set(getattr(tensor, "_dynamo_static_indices", ()))


def cache(length: int, preallocated: bool = False) -> Any:
    states = torch.ones(1, 2, length, 4)
    layer = SimpleNamespace(keys=states, values=states.clone(), is_compileable=preallocated)
    return SimpleNamespace(layers=[layer])


def test_the_length_of_a_growing_cache_and_of_masks_is_dynamic() -> None:
    ids, mask, past = torch.ones(1, 1, dtype=torch.long), torch.ones(1, 8), cache(7)
    mark_dynamic((ids,), {"attention_mask": mask, "past_key_values": past})
    layer = past.layers[0]
    assert [dynamic_dims(x) for x in (layer.keys, layer.values, mask, ids)] == [{2}, {2}, {1}, set()]


@pytest.mark.parametrize("past", [None, cache(7, preallocated=True), cache(1)], ids=["none", "preallocated", "one"])
def test_without_a_growing_cache_nothing_is_dynamic(past: Any) -> None:
    mask = torch.ones(1, 8)
    mark_dynamic((mask,), {"past_key_values": past})
    assert not dynamic_dims(mask)


def test_the_decoder_cache_of_an_encoder_decoder_model_counts() -> None:
    past = cache(7)
    mark_dynamic((), {"past_key_values": SimpleNamespace(self_attention_cache=past)})
    assert dynamic_dims(past.layers[0].keys) == {2}


def test_sizes_are_static_unless_a_cache_grows() -> None:
    ids, vector = torch.ones(2, 8), torch.ones(3)
    mark_static((ids, vector), {"past_key_values": cache(7)})
    assert not static_dims(ids)
    mark_static((ids, vector), {})
    assert static_dims(ids) == {0, 1} and not static_dims(vector)
