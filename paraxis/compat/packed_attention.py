"""Packed attention: sequences of several lengths in one row, each of which attends to itself alone.

Vision and audio towers compute it for images of several sizes. Where no kernel for it is installed, transformers splits
queries, keys and values at lengths that are values of a tensor and calls attention once per sequence, which Dynamo
cannot trace. Here it is one operator. Seen on transformers 5.17 and 5.22: a forward with the argument ``cu_seqlens``
asks ``is_flash_attention_requested`` whether it may pass the lengths to what ``ALL_ATTENTION_FUNCTIONS`` gives it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .torch import scaled_dot_product_attention

__all__ = ["PACKED_ATTENTION", "capture_packed_attention"]

# -- the operator --------------------------------------------------------------------------------------------------

ROWS = 1024
"""Queries whose scores exist at a time in the backward pass."""


@torch.library.custom_op("paraxis::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float | None, is_causal: bool
) -> Tensor:
    """Attention of (batch, heads, positions, size) where ``offsets`` says at which positions sequences begin and end.

    As for ``scaled_dot_product_attention``, there may be fewer heads of keys and values than of queries.
    """
    result = _allocate(query, key, value, offsets, scale, is_causal)
    grouped = query.shape[1] != key.shape[1]
    for start, count, length in _runs(offsets):
        q, k, v = (_sequences(x, start, count, length) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        _sequences(result, start, count, length).copy_(out)
    return result


@packed_attention.register_fake
def _allocate(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float | None, is_causal: bool
) -> Tensor:
    batch, heads, positions, _ = query.shape
    return query.new_empty(batch, positions, heads, value.shape[-1]).transpose(1, 2)


@torch.library.custom_op("paraxis::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. Scores are computed again, of some queries at a time."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // max(key.shape[1], 1)
    grads = [torch.zeros_like(x, dtype=torch.float32 if x.itemsize < 4 else x.dtype) for x in (query, key, value)]
    for start, count, length in _runs(offsets):
        q, k, v, g = (_sequences(x, start, count, length).to(grads[0].dtype) for x in (query, key, value, grad))
        k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (k, v))
        dq, dk, dv = (_sequences(x, start, count, length) for x in grads)
        for at in range(0, length, ROWS):
            rows = slice(at, at + ROWS)
            scores = q[..., rows, :] @ k.mT * scale
            if is_causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + at)
                scores = scores.masked_fill(later, -torch.inf)
            weights = scores.softmax(-1)
            products = g[..., rows, :] @ v.mT
            inner = weights * (products - (weights * products).sum(-1, keepdim=True)) * scale
            dq[..., rows, :] += inner @ k
            dk += _per_group(inner.mT @ q[..., rows, :], groups)
            dv += _per_group(weights.mT @ g[..., rows, :], groups)
    dq, dk, dv = (x.to(y.dtype) for x, y in zip(grads, (query, key, value), strict=True))
    return dq, dk, dv


@packed_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = packed_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.is_causal)
    return (*found, None, None, None)


packed_attention.register_autograd(_differentiate, setup_context=_save)
PACKED_ATTENTION = torch.ops.paraxis.packed_attention.default


def _runs(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, number of sequences, their length) of neighbours of one length: windows mostly have the same."""
    ends = offsets.tolist()
    start, count, length = 0, 0, 0
    for begin, end in pairwise(ends):
        if end - begin != length or not count:
            if count and length:
                yield start, count, length
            start, count, length = begin, 0, end - begin
        count += 1
    if count and length:
        yield start, count, length


def _sequences(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """These sequences of (batch, heads, positions, size), as a view; several of them in a dimension of their own."""
    part = x[:, :, start : start + count * length]
    return part if count == 1 else part.unflatten(2, (count, length)).transpose(1, 2)


def _per_group(x: Tensor, groups: int) -> Tensor:
    """The sum over the query heads of each KV head."""
    return x if groups == 1 else x.unflatten(-3, (-1, groups)).sum(-3)


# -- transformers' towers ------------------------------------------------------------------------------------------

NAMES = {"is_flash_attention_requested": "_paraxis_packs", "ALL_ATTENTION_FUNCTIONS": "_paraxis_attention"}
"""The global names of a modeling file that its packed attention reads, and those that it reads instead."""

_seen: set[str] = set()


def capture_packed_attention(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, let packed attention in the loaded models be one operator."""
    for name, module in list(sys.modules.items()):
        if name not in _seen and name.startswith("transformers") and "modeling" in name:
            _seen.add(name)
            _adapt(module, applies)


def _adapt(module: ModuleType, applies: Callable[[], bool]) -> None:
    namespace = vars(module)
    if not NAMES.keys() <= namespace.keys():
        return
    requested, functions = (namespace[name] for name in NAMES)
    adapted = False
    for cls in list(namespace.values()):
        forward = inspect.unwrap(vars(cls).get("forward")) if isinstance(cls, type) else None  # type: ignore[arg-type]
        if not isinstance(forward, FunctionType) or cls.__module__ != module.__name__ or not _packs(forward):
            continue
        code = forward.__code__
        forward.__code__ = code.replace(co_names=tuple(NAMES.get(name, name) for name in code.co_names))
        adapted = True
    if adapted:
        namespace["_paraxis_packs"] = _Requested(requested, applies)
        namespace["_paraxis_attention"] = _Functions(functions, applies)


def _packs(forward: FunctionType) -> bool:
    """Whether a forward splits its sequences at values of ``cu_seqlens`` where no kernel takes them."""
    parameters = inspect.signature(forward).parameters
    return (
        "cu_seqlens" in parameters
        and set(forward.__code__.co_names) >= NAMES.keys()
        and _calls(forward.__code__, "tolist")
    )


def _calls(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_calls(x, name) for x in code.co_consts if isinstance(x, CodeType))


def _takes(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == "sdpa"


class _Requested:
    """``is_flash_attention_requested``, which also says yes where packed attention is captured."""

    def __init__(self, requested: Callable[..., bool], applies: Callable[[], bool]) -> None:
        self.requested, self.applies = requested, applies

    def __call__(self, config: Any) -> bool:
        return self.requested(config) or (_takes(config) and self.applies())


class _Functions:
    """``ALL_ATTENTION_FUNCTIONS``, with the operator in the place of attention without lengths."""

    def __init__(self, functions: Any, applies: Callable[[], bool]) -> None:
        self.functions, self.applies = functions, applies

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The function that computes attention."""
        if implementation == "sdpa" and self.applies():
            return _attend
        return self.functions.get_interface(implementation, default)  # type: ignore[no-any-return]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What an attention function returns: (batch, positions, heads, size), and no weights."""
    causal = module.is_causal if is_causal is None else is_causal
    if cu_seq_lens_q is not None and attention_mask is None and not dropout:
        out = torch.ops.paraxis.packed_attention(query, key, value, cu_seq_lens_q, scaling, causal)
        return out.transpose(1, 2).contiguous(), None
    if cu_seq_lens_q is not None:
        mask = _same_sequence(cu_seq_lens_q, query.shape[2], causal)
        attention_mask = mask if attention_mask is None else mask & attention_mask
        causal = False
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=causal,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2).contiguous(), None


def _same_sequence(offsets: Tensor, positions: int, causal: bool) -> Tensor:
    """(positions, positions): whether one may attend to the other."""
    at = torch.arange(positions, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), at, right=True)
    same = sequence[:, None] == sequence
    return same & (at[:, None] >= at) if causal else same
