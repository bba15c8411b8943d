"""Decode steps of a model on the GPU kernels, captured as CUDA graphs and replayed, against the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import parallel, reference


def save(folder: Any) -> str:
    """A model whose heads are large enough for the kernels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def differences(folder: str, device: str) -> list[float]:
    """The differences of every step's logits from the unsharded model's: twice, the second time with new weights."""
    from transformers import StaticCache

    from paraxis.passes import pipeline

    fused = []
    fuse_rope_kv_write = pipeline.fuse_rope_kv_write
    pipeline.fuse_rope_kv_write = lambda module: fused.append(fuse_rope_kv_write(module))
    torch.backends.cuda.matmul.allow_tf32 = False
    model, _ = parallel(folder, device, torch_dtype=torch.float32, compile="inductor", mode="reduce-overhead")
    model.eval()
    unsharded = reference(folder, dtype=torch.float32).to(device)
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for _ in range(2):
        caches = [StaticCache(config=m.config, max_cache_len=70) for m in (model, unsharded)]
        for step in [ids[:, :5], *ids[:, 5:].split(1, 1)]:
            logits = [m(step, past_key_values=c).logits for m, c in zip((model, unsharded), caches, strict=True)]
            found.append(float((logits[0] - logits[1]).abs().max()))
        for parameter, other in zip(model.parameters(), unsharded.parameters(), strict=True):
            parameter.to_local().mul_(1.5)
            other.mul_(1.5)
    pipeline.fuse_rope_kv_write = fuse_rope_kv_write
    assert fused == [2, 0], f"prefill and decode have {fused} layers with fused RoPE and KV cache writes"
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_are_those_of_the_unsharded_model(ranks: Any, tmp_path: Any) -> None:
    for found in ranks(1).run(differences, save(tmp_path), "cuda:0", timeout=300):
        assert max(found) < 1e-4
