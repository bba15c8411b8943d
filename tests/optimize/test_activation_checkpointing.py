"""Activation checkpointing: the same gradients, with less kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import long
from models.compare import batch, gradient_errors, parallel, reference
from models.meshes import on_mesh
from models.tiny import save
from peak import Allocations

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


def step(folder: str, recomputed: bool, **options: Any) -> dict[str, Any]:
    """Loss, gradients and bytes that are kept, of a model in training mode."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, _ = on_mesh(folder, 2, 1, **options) if "data_parallel" in options else parallel(folder, **options)
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable()
    ids, labels = batch(model.config.vocab_size, length=48)
    with Allocations() as made:
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        kept = made.live
        loss.backward()
    return {"loss": float(loss.detach()), "model": model, "kept": kept}


class Whole:
    """A parallel model with its gradients whole."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [(n, SimpleNamespace(grad=p.grad.full_tensor())) for n, p in self._model.named_parameters()]


def compared(folder: str, **options: Any) -> dict[str, float]:
    plain, recomputed = (step(folder, each, **options) for each in (False, True))
    return {
        "loss": abs(plain["loss"] - recomputed["loss"]),
        "gradients": max(gradient_errors(recomputed["model"], Whole(plain["model"])).values()),
        "kept": recomputed["kept"] / plain["kept"],
    }


@pytest.mark.parametrize(
    ("name", "fields", "options"),
    [
        ("gpt2", {**DROPOUT, "n_layer": 4}, {}),
        pytest.param("bloom", {"n_layer": 4}, {}, marks=long),  # has a function with a backward of its own
        pytest.param("llama", {"num_hidden_layers": 4}, {"enable_sequence_parallel": True}, marks=long),
        pytest.param("llama", {"num_hidden_layers": 4}, {"data_parallel": "shard"}, marks=long),
    ],
    ids=["dropout", "own backward", "sequence", "shard"],
)
def test_the_same_with_less_memory(
    ranks: Any, tmp_path: Path, name: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    for found in ranks(2).run(compared, save(name, tmp_path, **fields), **options):
        assert found["loss"] < 1e-6 and found["gradients"] < 1e-5
        assert found["kept"] < 0.6


def as_the_unsharded(folder: str) -> float:
    found = step(folder, recomputed=True)
    unsharded = reference(folder).train()
    unsharded.gradient_checkpointing_enable()
    ids, labels = batch(unsharded.config.vocab_size, length=48)
    unsharded(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    return max(gradient_errors(found["model"], unsharded).values())


def test_gradients_are_those_of_the_unsharded_model(ranks: Any, tmp_path: Path) -> None:
    assert (
        max(ranks(2).run(as_the_unsharded, save("bloom", tmp_path, hidden_dropout=0.0, attention_dropout=0.0))) < 1e-4
    )
