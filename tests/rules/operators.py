"""Operators of which Paraxis knows nothing, as a user defines them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _define(name: str, function: Any) -> Any:
    op = torch.library.custom_op(f"paraxis_tests::{name}", function, mutates_args=())
    op.register_fake(lambda *args: torch.empty_like(function(*args)))
    return op._opoverload


def _gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        raise ValueError("shapes differ")
    return F.silu(a) * b


def _head_softmax(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x.unflatten(-1, (num_heads, -1)).softmax(-1).flatten(-2)


def _scale_rows(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if v.ndim != 1:
        raise ValueError("a vector is needed")
    return x * v


def _along_rows(x: torch.Tensor) -> torch.Tensor:
    return x.exp().cumsum(-1).sqrt()


def _packed_gate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def _mixes_everything(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().mean().sqrt()


def _clipped_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


gate = _define("gate", _gate)
clipped_backward = _define("clipped_backward", _clipped_backward)
head_softmax = _define("head_softmax", _head_softmax)
scale_rows = _define("scale_rows", _scale_rows)
along_rows = _define("along_rows", _along_rows)
packed_gate = _define("packed_gate", _packed_gate)
mixes_everything = _define("mixes_everything", _mixes_everything)


@torch.library.custom_op("paraxis_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noise = _noise._opoverload


@torch.library.custom_op("paraxis_tests::secret_noise", mutates_args=())
def _secret_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


secret_noise = _secret_noise._opoverload


@torch.library.custom_op("paraxis_tests::both", mutates_args=())
def _both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 2, b * 2


both = _both._opoverload


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    s = a.sigmoid()
    return grad * b * s * (1 + a * (1 - s)), grad * F.silu(a)


def _heads_remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)
    ctx.heads = inputs[1]


def _heads_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (y,) = ctx.saved_tensors
    y, g = y.unflatten(-1, (ctx.heads, -1)), grad.unflatten(-1, (ctx.heads, -1))
    return (y * (g - (y * g).sum(-1, keepdim=True))).flatten(-2), None


torch.library.register_autograd("paraxis_tests::gate", _gate_backward, setup_context=_remember)
torch.library.register_autograd("paraxis_tests::head_softmax", _heads_backward, setup_context=_heads_remember)
torch.library.register_autograd("paraxis_tests::clipped_backward", lambda ctx, grad: grad / grad.norm())
