"""Activation checkpointing: the same gradients with fewer saved activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.allocations import Allocations
from models.compare import batch, gradient_errors, parallel, reference
from models.meshes import parallel_on_mesh

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


def train_step(folder: str, checkpointed: bool, **options: Any) -> dict[str, Any]:
    """Loss, gradients and bytes saved for the backward pass of a model in training mode."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    on_mesh = "data_parallel" in options
    model, _ = parallel_on_mesh(folder, 2, 1, **options) if on_mesh else parallel(folder, **options)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids, labels = batch(model.config.vocab_size, length=48)
    with Allocations() as allocations:
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        saved = allocations.live
        loss.backward()
    return {"loss": float(loss.detach()), "model": model, "saved": saved}


def compare_with_and_without(folder: str, **options: Any) -> dict[str, float]:
    """Differences of loss and gradients, and the ratio of the bytes saved."""
    plain, checkpointed = (train_step(folder, each, **options) for each in (False, True))
    return {
        "loss": abs(plain["loss"] - checkpointed["loss"]),
        "gradients": max(gradient_errors(checkpointed["model"], plain["model"]).values()),
        "saved": checkpointed["saved"] / plain["saved"],
    }


@pytest.mark.parametrize(
    ("name", "fields", "options"),
    [
        ("gpt2", {**DROPOUT, "n_layer": 4}, {}),
        pytest.param("bloom", {"n_layer": 4}, {}, marks=pytest.mark.long),  # has an autograd.Function
        pytest.param("llama", {"num_hidden_layers": 4}, {"enable_sequence_parallel": True}, marks=pytest.mark.long),
        pytest.param("llama", {"num_hidden_layers": 4}, {"data_parallel": "shard"}, marks=pytest.mark.long),
    ],
    ids=["dropout", "autograd function", "sequence parallel", "FSDP"],
)
def test_gradients_stay_and_saved_activations_shrink(
    ranks: Any, checkpoints: Any, name: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    for found in ranks(2).run(compare_with_and_without, checkpoints(name, **fields), **options):
        assert found["loss"] < 1e-6 and found["gradients"] < 1e-5
        assert found["saved"] < 0.6


def compare_with_unsharded(folder: str) -> float:
    """The largest gradient error against the unsharded model, both with activation checkpointing."""
    found = train_step(folder, checkpointed=True)
    unsharded = reference(folder).train()
    unsharded.gradient_checkpointing_enable()
    ids, labels = batch(unsharded.config.vocab_size, length=48)
    unsharded(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    return max(gradient_errors(found["model"], unsharded).values())


def test_gradients_are_those_of_the_unsharded_model(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("bloom", hidden_dropout=0.0, attention_dropout=0.0)
    assert max(ranks(2).run(compare_with_unsharded, folder)) < 1e-4
