"""Models that compute attention by ``attn_implementation="flex_attention"`` or ``"eager"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import batch, max_difference, parallel, reference, same_tokens, step_errors


def against_unsharded(folder: str, implementation: str, compile: str | None) -> dict[str, Any]:
    """Logits with padding, tokens, one training step. torch differentiates FlexAttention on GPUs alone: the unsharded
    model computes the same in another way."""
    torch._dynamo.reset()
    unsharded = reference(folder, attn_implementation="eager")
    model, ctx = parallel(folder, attn_implementation=implementation, compile=compile)
    ids, labels = batch(256)
    padded = torch.ones_like(ids)
    padded[0, :4] = 0
    with torch.no_grad():
        results = [m(ids, attention_mask=padded).logits[:, 4:] for m in (model, unsharded)]
    return {
        "padded": max_difference(*results),
        "tokens": same_tokens(model, unsharded, ids, 4, attention_mask=padded),
        "step": step_errors(model, unsharded, {"input_ids": ids, "labels": labels}),
        "implementation": model.config._attn_implementation,
        "breaks": ctx.plan.breaks,
        "gathered": ctx.plan.gathered,
        "query": tuple(model.model.layers[0].self_attn.q_proj.weight.to_local().shape),
        "key": tuple(model.model.layers[0].self_attn.k_proj.weight.to_local().shape),
    }


@pytest.mark.parametrize(
    ("name", "implementation", "compile"),
    [
        ("llama", "flex_attention", None),
        ("llama", "eager", None),
        pytest.param("gemma2", "flex_attention", None, marks=pytest.mark.long),  # soft caps, sliding windows
        pytest.param("gemma2", "eager", None, marks=pytest.mark.long),
        pytest.param("llama", "flex_attention", "inductor", marks=pytest.mark.long),
        pytest.param("llama", "eager", "inductor", marks=pytest.mark.long),
    ],
)
def test_one_sharded_graph(ranks: Any, checkpoints: Any, name: str, implementation: str, compile: str | None) -> None:
    for found in ranks(2).run(against_unsharded, checkpoints(name), implementation, compile):
        assert found["implementation"] == implementation
        assert found["padded"] < 1e-4 and found["tokens"]
        step = found["step"]
        assert step["logits"] < 1e-4 and step["loss"] < 1e-5 and step["gradients"] < 1e-3
        assert found["breaks"] == () and found["gathered"] == ()
        assert found["query"] == (32, 64) and found["key"] == (16, 64)
