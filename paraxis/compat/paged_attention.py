"""Paged attention: tokens of many sequences in one row, each of which attends to its own sequence in a paged KV cache.

transformers leaves the graph for it in every layer. Here it is one operator, ``paraxis::paged_attention``, whose keys
and values of earlier positions are not among its arguments: whoever runs a step announces it with :func:`paged_step`,
and the calls of the operator in one step are the layers of the model, one after the other. So the program of a step has
token ids and positions as inputs and nothing else, whatever the lengths of the sequences, and one program serves all
layers. Seen on transformers 5.22; the interface of attention functions is public.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softmax

__all__ = [
    "PAGED",
    "PAGED_ATTENTION",
    "PagedStep",
    "Scoring",
    "attend_causal",
    "paged_step",
    "register_paged_attention",
]

PAGED = "paraxis_paged"
"""The attention implementation of transformers that calls the operator."""


class Scoring(NamedTuple):
    """How scores are computed and become weights.

    Attributes:
        scale: What products of queries and keys are multiplied by.
        window: How many positions a token sees, itself included; 0 for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks: A score of each head that takes part in the softmax, and has no value.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class PagedStep(Protocol):
    """A step of the model: where its tokens belong, and the KV cache of this rank."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring, kv_heads: Sequence[int]) -> Tensor:
        """Write keys and values of the next layer into its cache, and attend: (tokens, heads, size)."""
        ...


class _Current(threading.local):
    """The step that this thread runs: several models may have a batch each."""

    step: PagedStep | None = None


_current = _Current()


@contextmanager
def paged_step(step: PagedStep) -> Iterator[None]:
    """Inside, calls of the operator in this thread are the layers of this step."""
    if _current.step is not None:
        raise RuntimeError("this thread runs a step of a batch already")
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


@torch.library.custom_op("paraxis::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    kv_heads: Sequence[int],
) -> Tensor:
    """Attention of (1, heads, tokens, size), with fewer heads of keys and values if need be.

    Without a step that is announced, all tokens are one sequence from its beginning.

    Args:
        query, key, value: Of the new tokens.
        sinks, scale, window, softcap: As in :class:`Scoring`.
        kv_heads: Which heads of keys and values these are; empty for all.
    """
    step = _current.step
    if query.is_cuda and torch.cuda.is_current_stream_capturing() and not getattr(step, "on_device", False):
        raise RuntimeError("the tables of this step are on the host, which a CUDA graph would not replay")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    how = Scoring(scale, window, softcap, sinks)
    found = attend_causal(q, k, v, 0, how) if step is None else step.attend(q, k, v, how, kv_heads)
    return found.contiguous()[None].transpose(1, 2)


@paged_attention.register_fake
def _allocate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    kv_heads: Sequence[int],
) -> Tensor:
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)


PAGED_ATTENTION = torch.ops.paraxis.paged_attention.default


def attend_causal(query: Tensor, key: Tensor, value: Tensor, past: int, how: Scoring) -> Tensor:
    """Attention of the last tokens of one sequence: (tokens, heads, size) to (positions, KV heads, size).

    ``past`` is the position of the first query among the keys.
    """
    scale, window, softcap, sinks = how
    tokens, heads, positions = query.shape[0], query.shape[1], key.shape[0]
    q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    groups = heads // max(k.shape[0], 1)
    if sinks is None and not softcap and not (window and positions > window):
        mask = None
        if past and tokens > 1:
            mask = torch.ones(tokens, positions, dtype=torch.bool, device=q.device).tril(past)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=not past and tokens > 1,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return out[0].transpose(0, 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.mT).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(tokens, positions, dtype=torch.bool, device=q.device).tril(past)
    if window:
        seen = seen & ~seen.tril(-window + past)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(-1, 1, 1).expand(heads, tokens, 1)
        weights = softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    else:
        weights = softmax(scores, -1)
    return (weights.to(v.dtype) @ v).transpose(0, 1)


# -- transformers' interface of attention functions ----------------------------------------------------------------

_registered = False


def register_paged_attention() -> None:
    """Let transformers know the implementation. It has no mask function, so that models make no mask."""
    global _registered
    if not _registered:
        from transformers import AttentionInterface

        AttentionInterface.register(PAGED, _attend)
        _registered = True


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What an attention function returns: (batch, positions, heads, size), and no weights."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    problem = None
    if not causal:
        problem = "attends to later tokens"
    elif position_bias is not None:
        problem = "adds a bias of positions to its scores"
    elif attention_mask is not None:
        problem = "has a mask of its own"
    elif query.shape[2] != key.shape[2]:
        problem = "attends to keys of other tokens"
    if problem is not None:
        raise NotImplementedError(f"{type(module).__name__} {problem}: batches of mixed lengths cannot run it")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = getattr(module, "sinks", None) if s_aux is None else s_aux
    out = torch.ops.paraxis.paged_attention(
        query, key, value, sinks, scale, int(sliding_window or 0), float(softcap or 0.0), []
    )
    return out.transpose(1, 2).contiguous(), None
