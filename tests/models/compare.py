"""Comparing a parallel model with the unsharded one, on a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def context(group: Any = None, device: str = "cpu") -> Any:
    """The context of a test: all ranks, this device."""
    from paraxis import ParallelExecutionCtx

    return ParallelExecutionCtx(tp_group=group or dist.group.WORLD, current_device=torch.device(device))


def parallel(folder: str, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """(parallel model, its context)"""
    from paraxis import parallelize_model

    ctx = context(device=device)
    return parallelize_model(folder, ctx, show_progress=False, **options), ctx


def reference(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def batch(vocab_size: int, rows: int = 2, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), with a part of the labels to be ignored."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, vocab_size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def gradient_errors(model: Any, unsharded: Any) -> dict[str, float]:
    """Relative error of every gradient.

    A gradient that is zero but for rounding (a bias before a softmax) is measured against the largest one instead.
    """
    expected = {name: p.grad for name, p in unsharded.named_parameters()}
    largest = max(float(g.norm()) for g in expected.values() if g is not None)
    errors = {}
    for name, parameter in model.named_parameters():
        right, found = expected[name], parameter.grad
        if right is None or found is None:
            errors[name] = 0.0 if right is None and found is None else float("inf")
            continue
        scale = float(right.norm())
        errors[name] = float((found.full_tensor() - right).norm()) / (scale if scale > 1e-6 * largest else largest)
    return errors
