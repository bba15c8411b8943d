"""The operators of the Triton kernels for decode steps, computed by torch: so that the rewrite runs without a GPU.

With Triton installed the real operators are registered, and the tests run on the GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import assert_same_results, trace
from torch.fx import GraphModule

from paraxis.optimize.decode_kernels import use_decode_kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if HAS_TRITON else "cpu"

needs_kernels = pytest.mark.skipif(
    HAS_TRITON and not torch.cuda.is_available(), reason="the kernels are registered for a GPU, and there is none"
)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding as models write it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def gemv(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool) -> torch.Tensor:
    """Linear layers on one row, concatenated; gated: ``silu(first) * second``."""
    results = [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    return F.silu(results[0]) * results[1] if gated else torch.cat(results, -1)


def skinny_gemm(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], gated: bool
) -> torch.Tensor:
    """The same on several rows."""
    return gemv(x, weights, biases, gated)


def rmsnorm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on the RMSNorm of ``x + residual``, and that sum."""
    total = x.clone() if residual is None else x + residual
    row = norm * (total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return gemv(row, weights, biases, gated), total.new_empty(0) if residual is None else total


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    position: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence with grouped query heads; keys after a position are not visible."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    if position is not None:  # what comes later must not matter
        later = (torch.arange(keys.shape[2], device=keys.device) > position.reshape(1))[None, None, :, None]
        keys, values = keys.masked_fill(later, 1e3), values.masked_fill(later, 1e3)
        mask = later[..., 0][:, None].logical_not() if mask is None else mask
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)


def rope_decode_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """RoPE on query and key, the writes into the KV cache, and attention."""
    cos, sin = (x.view(x.shape[0], 1, 1, x.shape[-1]) for x in (cos, sin))
    keys.index_copy_(2, position.reshape(1), rope(key, cos, sin))
    values.index_copy_(2, position.reshape(1), value)
    return decode_attention(rope(q, cos, sin), keys, values, mask, position if causal else None, scale)


_OPERATORS: dict[str, tuple[Callable[..., Any], ...]] = {
    "gemv": (gemv, rmsnorm_gemv),
    "skinny_gemm": (skinny_gemm,),
    "decode_attention": (decode_attention, rope_decode_attention),
}
_CONSTANTS = {"skinny_gemm": {"MAX_ROWS": 64}}
_WRITTEN = {"rope_decode_attention": ("keys", "values")}


def register() -> None:
    """Register the operators in place of the kernels' modules, unless Triton is there."""
    for module, functions in _OPERATORS.items():
        name = f"paraxis.kernels.triton.{module}"
        if HAS_TRITON or name in sys.modules:
            continue
        for function in functions:
            writes = _WRITTEN.get(function.__name__, ())
            torch.library.custom_op(f"paraxis::{function.__name__}", function, mutates_args=writes)
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(_CONSTANTS.get(module, {}))
        setattr(importlib.import_module("paraxis.kernels.triton"), module, sys.modules[name])


def rewrite_on_cpu(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[GraphModule, list[str]]:
    """The graph of a function with decode kernels, computed by torch, and the names of the kernels in it, in order.

    It must compute what the function does. Runs on a CPU whether or not Triton is there.
    """
    register()
    module = trace(function, [x.clone() for x in inputs])
    count = use_decode_kernels(module, inputs)
    module.graph.lint()
    references = {getattr(torch.ops.paraxis, f.__name__).default: f for fs in _OPERATORS.values() for f in fs}
    kernels = [node for node in module.graph.nodes if node.target in references]
    assert count == len(kernels)
    names = [references[node.target].__name__ for node in kernels]
    for node in kernels:
        node.target = references[node.target]
    module.recompile()
    assert_same_results(module, function, inputs)
    return module, names
