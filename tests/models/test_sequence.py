"""Sequence parallelism: between parallel layers every rank has its part of each sequence."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import save

LENGTHS = (12, 13, 1)
TYPES = ("llama", "qwen3", "gemma2", "gpt2", "gptj", "gpt_neox", "bloom", "phi3", "opt", "olmo2")
ALWAYS = (("llama", 2),)
EVERY = [(name, world) for name in TYPES for world in (2, 4)]
"""All of them with ``PARAXIS_LONG=1``: a few minutes."""


def saved_bytes(model: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    """The outputs of a call, and the bytes that norms and the sums between layers keep for the backward pass.

    Those are activations with all features; what is inside attention and feed-forward layers has some of them.
    """
    held: dict[int, int] = {}
    features = model.config.hidden_size

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.ndim == 3 and local.shape[-1] == features:
            held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**inputs)
    return output, sum(held.values())


def compared(folder: str) -> dict[str, Any]:
    """Errors for every length, collectives, annotations, and what is kept for the backward pass."""
    from models.compare import gradient_errors, parallel, reference

    (model, ctx), (plain, _), unsharded = (
        parallel(folder, enable_sequence_parallel=True),
        parallel(folder),
        reference(folder),
    )
    found: dict[str, Any] = {"collectives": dict(Counter(c.kind for c in ctx.plan.collectives if c.shape[-1] != 1))}
    found["layers"] = sum(layer.sequence_parallel for layer in ctx.plan.layers)
    for length in LENGTHS:
        ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
        inputs = {"input_ids": ids, "use_cache": False, **({"labels": ids} if length > 1 else {})}
        model.zero_grad()
        unsharded.zero_grad()
        output, kept = saved_bytes(model, inputs)
        expected = unsharded(**inputs)
        for result in (output, expected):
            (result.loss if length > 1 else result.logits.square().sum()).backward()
        found[f"logits {length}"] = float((output.logits - expected.logits).abs().max())
        if length > 1:
            found[f"loss {length}"] = float((output.loss - expected.loss).abs())
        found[f"gradients {length}"] = max(gradient_errors(model, unsharded).values())
        if length == 12:
            found["kept"] = kept / saved_bytes(plain, inputs)[1]
    return found


@pytest.mark.parametrize(("name", "world"), EVERY if os.environ.get("PARAXIS_LONG") else ALWAYS)
def test_equals_the_unsharded_model(ranks: Any, tmp_path: Path, name: str, world: int) -> None:
    for found in ranks(world).run(compared, save(name, tmp_path), timeout=600):
        for length in LENGTHS:
            assert found[f"logits {length}"] < 1e-4
            assert found.get(f"loss {length}", 0.0) < 1e-5
            assert found[f"gradients {length}"] < 1e-3
        assert "all_reduce" not in found["collectives"], "all but statistics is scattered, and gathered for layers"
        assert found["layers"] > 0
        assert found["kept"] < 0.95, f"{found['kept']:.2f} of what is kept without it"
