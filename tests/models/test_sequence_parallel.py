"""Sequence parallelism: between parallel layers every rank has its shard of each sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from models.compare import parallel, reference, step_errors

LENGTHS = (12, 13, 1)
TYPES = ("llama", "qwen3", "gemma2", "gpt2", "gptj", "gpt_neox", "bloom", "phi3", "opt", "olmo2")
CASES = [
    pytest.param(name, world, marks=() if (name, world) == ("llama", 2) else pytest.mark.long)
    for name in TYPES
    for world in (2, 4)
]


def activation_bytes(model: Any, inputs: dict[str, Any]) -> int:
    """Bytes that norms and residual sums save for the backward pass.

    Those are activations with all features; the ones inside attention and feed-forward layers have fewer.
    """
    saved: dict[int, int] = {}
    features = model.config.hidden_size

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.ndim == 3 and local.shape[-1] == features:
            saved[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)  # keeps the saved tensors alive
    del output
    return sum(saved.values())


def run_against_unsharded(folder: str) -> dict[str, Any]:
    """Errors for every length, collectives, layers, and the activations saved against those without it."""
    (model, ctx), (plain, _), unsharded = (
        parallel(folder, enable_sequence_parallel=True),
        parallel(folder),
        reference(folder),
    )
    errors = {}
    for length in LENGTHS:
        ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
        inputs = {"input_ids": ids, "use_cache": False, **({"labels": ids} if length > 1 else {})}
        model.zero_grad()
        unsharded.zero_grad()
        errors[length] = step_errors(model, unsharded, inputs)
        if length == 12:
            saved = activation_bytes(model, inputs) / activation_bytes(plain, inputs)
    return {
        "errors": errors,
        "saved": saved,
        "collectives": dict(Counter(c.kind for c in ctx.plan.collectives if c.shape[-1] != 1)),
        "layers": sum(layer.sequence_parallel for layer in ctx.plan.layers),
    }


@pytest.mark.parametrize(("name", "world"), CASES)
def test_equals_the_unsharded_model_with_fewer_activations(ranks: Any, checkpoints: Any, name: str, world: int) -> None:
    for found in ranks(world).run(run_against_unsharded, checkpoints(name), timeout=600):
        for length, errors in found["errors"].items():
            assert errors["logits"] < 1e-4 and errors["loss"] < 1e-5 and errors["gradients"] < 1e-3, length
        assert "all_reduce" not in found["collectives"], "only statistics of norms are all-reduced"
        assert found["layers"] > 0
        assert found["saved"] < 0.95, f"saves {found['saved']:.2f} of the activations saved without it"
