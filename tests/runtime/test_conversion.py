"""Changing the dtype of a parallel model, before and after it has run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models.compare import batch, full, gradient_errors, max_difference, parallel, reference

from paraxis.tensor.sharded_tensor import ShardedTensor


def logits(model: Any) -> torch.Tensor:
    ids, _ = batch(256)
    with torch.no_grad():
        return model(input_ids=ids).logits


def same_parameters(model: Any, unsharded: Any) -> bool:
    """Whether they have the same dtypes and values, in parameters and buffers."""
    pairs = zip(model.parameters(), unsharded.parameters(), strict=True)
    buffers = zip(model.named_buffers(), unsharded.named_buffers(), strict=True)
    return all(p.dtype == q.dtype and torch.equal(full(p), q) for p, q in pairs) and all(
        name == other and a.dtype == b.dtype and torch.equal(a, b) for (name, a), (other, b) in buffers
    )


def converted(folder: str, **options: Any) -> dict[str, Any]:
    """A model that is converted before its first call, after it, and back, beside the unsharded one."""
    torch._dynamo.reset()
    model, _ = parallel(folder, **options)
    unsharded = reference(folder)
    parameters = list(model.parameters())
    found: dict[str, Any] = {"errors": [], "same": []}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float32):
        model, unsharded = model.to(dtype), unsharded.to(dtype)
        result, expected = logits(model), logits(unsharded)
        assert result.dtype == expected.dtype == dtype and model.dtype == dtype
        found["errors"].append(max_difference(result, expected))
        found["same"].append(same_parameters(model, unsharded))
    assert all(p is q and isinstance(p, ShardedTensor) for p, q in zip(model.parameters(), parameters, strict=True))
    copied = copy.deepcopy(model).double()
    found["copy"] = max_difference(logits(copied), logits(copy.deepcopy(unsharded).double()))
    assert model.dtype == torch.float32 and copied.dtype == torch.float64
    return found


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_a_converted_model_is_the_converted_unsharded_model(ranks: Any, checkpoints: Any, compile: str | None) -> None:
    folder = checkpoints("llama-tied", num_hidden_layers=1)
    for found in ranks(2).run(converted, folder, compile=compile, timeout=280):
        assert all(found["same"]), found["same"]
        double, single, half, after = found["errors"]
        exact = 1e-9 if compile is None else 1e-5  # norms and RoPE compute in float32, which Inductor rounds elsewhere
        assert double < exact and single < 1e-4 and half < 5e-2 and after < 1e-4 and found["copy"] < exact


def trains_converted(folder: str) -> dict[str, Any]:
    """Gradients and an optimizer around a conversion; casting one module, and ``parameter.data``."""
    (model, _), unsharded = parallel(folder), reference(folder)
    ids, labels = batch(256)
    for each in (model, unsharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=ids, labels=labels).loss.backward()
        each.double()  # the gradients too
        optimizer.step()
        optimizer.zero_grad()
        each(input_ids=ids, labels=labels).loss.backward()
    errors = gradient_errors(model, unsharded)
    values = [max_difference(full(p), q) for p, q in zip(model.parameters(), unsharded.parameters(), strict=True)]
    for each in (model, unsharded):
        each.zero_grad()
        each.float().model.norm.double()
        for parameter in each.model.layers[0].mlp.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM is parallel .* cannot be moved to meta"):
        model.to("meta")
    dtypes = [[p.dtype for p in each.parameters()] for each in (model, unsharded)]
    return {"gradients": max(errors.values()), "values": max(values), "dtypes": dtypes}


def test_training_goes_on_after_a_conversion(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(trains_converted, checkpoints("llama", num_hidden_layers=1)):
        assert found["gradients"] < 1e-5 and found["values"] < 1e-5
        ours, theirs = found["dtypes"]
        assert ours == theirs and {torch.float32, torch.float64, torch.bfloat16} == set(ours)
