"""A decode step of a layer becomes five kernels: norm and projections, attention, output, norm and gate, output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.graphs import targets
from optimize.decode_kernels.reference import rewrite_on_cpu, rope

aten = torch.ops.aten
HEADS, FEATURES, LENGTH, INNER = 2, 16, 8, 48
WIDTH = HEADS * FEATURES


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As models write it."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def layer(x: Any, weights: dict[str, Any], cos: Any, sin: Any, keys: Any, values: Any, counter: Any) -> torch.Tensor:
    """A layer of a decoder on one token, with a preallocated KV cache that has a counter."""
    row = rms_norm(x, weights["norm"])
    q, k, v = (F.linear(row, weights[name]).view(1, 1, HEADS, FEATURES).transpose(1, 2) for name in "qkv")
    position, cos, sin = torch.arange(1) + counter, cos.unsqueeze(1), sin.unsqueeze(1)
    keys = keys.index_copy_(2, position, rope(k, cos, sin))
    values = values.index_copy_(2, position, v)
    mask = (torch.arange(LENGTH) <= position)[None, None, None, :]
    attended = F.scaled_dot_product_attention(rope(q, cos, sin), keys, values, mask)
    counter.add_(1)
    x = x + F.linear(attended.transpose(1, 2).reshape(1, 1, WIDTH), weights["out"])
    row = rms_norm(x, weights["second norm"])
    return x + F.linear(F.silu(F.linear(row, weights["gate"])) * F.linear(row, weights["up"]), weights["down"])


SHAPES = {
    "norm": (WIDTH,),
    **{name: (WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
    "second norm": (WIDTH,),
    **{name: (INNER, WIDTH) for name in ("gate", "up")},
    "down": (WIDTH, INNER),
}


def test_layer_of_a_decode_step_becomes_five_kernels() -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(shape) / 4 for shape in SHAPES.values()]
    angles = [torch.rand(1, 1, FEATURES) for _ in range(2)]
    caches = [torch.randn(1, HEADS, LENGTH, FEATURES) for _ in range(2)]

    def model(x: Any, *inputs: Any) -> torch.Tensor:
        return layer(x, dict(zip(SHAPES, inputs, strict=False)), *inputs[len(SHAPES) :])

    inputs = [torch.randn(1, 1, WIDTH), *parameters, *angles, *caches, torch.tensor([3])]
    module, kernels = rewrite_on_cpu(model, inputs)
    assert kernels == ["rmsnorm_gemv", "rope_decode_attention", "gemv", "rmsnorm_gemv", "gemv"]
    left = set(targets(module))
    assert not left & {aten.linear.default, aten.rsqrt.default, aten.silu.default, aten.index_copy_.default}
    assert aten._foreach_add_.Scalar in left and aten.add_.Tensor not in left, "counters are incremented together"
