"""Measuring the memory of a local program on fake tensors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from models.tiny import config

from paraxis import plan_model
from paraxis.plan.activations import Allocations, Storage, call_inputs


def test_peak_of_allocations() -> None:
    """The first two of three storages overlap; a block that three others repeat saves the second."""
    saved = Storage(10, "layers.0", allocated=1, freed=4)
    first, last = Storage(100, "", allocated=0, freed=2), Storage(90, "", allocated=3, freed=5)
    allocations = Allocations([first, saved, last], time=6)
    assert allocations.peak(Counter(), []) == 110
    assert allocations.peak(Counter({"layers.0": 3}), [saved]) == 140
    saved.freed, first.size = 3, 1  # freed before the last is allocated
    assert allocations.peak(Counter({"layers.0": 9}), [saved]) == 101


def test_storages_are_recorded_once_and_released() -> None:
    allocations = Allocations(block="layers.0")
    tensor = torch.empty(4, dtype=torch.float32)
    storage = allocations.record(tensor)
    assert storage is not None and allocations.record(tensor.view(2, 2)) is storage
    assert (storage.size, storage.block, storage.freed) == (16, "layers.0", None)
    assert allocations.record(torch.empty(2), count=False) is None
    del tensor
    assert storage.freed == 1 and allocations.storages == [storage]


def test_inputs_of_prefill_and_training() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, use_cache: bool = True) -> None: ...

    ids = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    assert call_inputs(Model(), ids, train=False) == {**ids, "logits_to_keep": 1}
    assert call_inputs(Model(), ids, train=True) == {**ids, "use_cache": False}


@pytest.mark.parametrize("train", [False, True])
def test_activations_grow_with_the_context(train: bool) -> None:
    """Prefill also has a KV cache, of two tensors per layer; a training step has none."""
    model = config("llama", num_hidden_layers=2)
    short, long = (plan_model(model, 2, context=n, train=train).memory for n in (16, 64))
    torch._dynamo.reset()
    assert short is not None and long is not None and short.activations and long.activations
    assert long.activations > 2 * short.activations and short.parameters == long.parameters
    if train:
        assert short.cache is None and long.cache is None
    else:
        per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 4 // 2
        assert short.cache is not None and short.cache >= 16 * per_token
        assert long.cache is not None and long.cache >= 64 * per_token
