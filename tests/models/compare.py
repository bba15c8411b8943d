"""Comparing a parallel model with the unsharded one, on a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def context(group: Any = None, device: str = "cpu") -> Any:
    """The context of a test: all ranks, this device."""
    from paraxis import ParallelExecutionCtx

    return ParallelExecutionCtx(tp_group=group or dist.group.WORLD, current_device=torch.device(device))


def parallel(folder: str, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """(parallel model, its context); ``options`` are those of ``parallelize_model``."""
    from paraxis import parallelize_model

    ctx = context(device=device)
    return parallelize_model(folder, ctx, show_progress=False, **options), ctx


def reference(folder: str, **options: Any) -> Any:
    """The unsharded model, loaded by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def parallel_module(make: Callable[[], nn.Module], inputs: Any, **options: Any) -> tuple[Any, Any, Any]:
    """(parallel module, unsharded module with the same weights, context) of a module that is no transformers model."""
    from paraxis import parallelize_model

    torch.manual_seed(0)
    unsharded = make()
    model, ctx = copy.deepcopy(unsharded), context()
    parallelize_model(model, ctx, example_inputs=inputs, show_progress=False, **options)
    return model, unsharded, ctx


def batch(vocab_size: int, rows: int = 2, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), with some labels to be ignored."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, vocab_size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def max_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference of an element; none between infinities of the same sign."""
    return float((found - expected).detach().masked_fill(found == expected, 0.0).abs().max())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, of a sharded tensor or of a plain one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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
        errors[name] = float((full(found) - full(right)).norm()) / (scale if scale > 1e-6 * largest else largest)
    return errors


def parameter_errors(model: Any, unsharded: Any) -> dict[str, float]:
    """Relative error of every parameter."""
    pairs = zip(model.named_parameters(), unsharded.parameters(), strict=True)
    return {
        name: float((full(found) - right).detach().norm() / right.norm().clamp(min=1e-6))
        for (name, found), right in pairs
    }


def step_errors(model: Any, unsharded: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Errors of logits, loss and gradients of one training step; without labels, the logits are differentiated."""
    output, expected = model(**inputs), unsharded(**inputs)
    for result in (output, expected):
        (result.loss if "labels" in inputs else result.logits.square().sum()).backward()
    return {
        "logits": max_difference(output.logits, expected.logits),
        "loss": max_difference(output.loss, expected.loss) if "labels" in inputs else 0.0,
        "gradients": max(gradient_errors(model, unsharded).values()),
    }


def module_errors(model: nn.Module, unsharded: nn.Module, *inputs: torch.Tensor) -> dict[str, float]:
    """Errors of outputs and gradients of one forward and backward of a module that is no transformers model."""
    results, expected = ([*r.values()] if isinstance(r, dict) else [r] for r in (model(*inputs), unsharded(*inputs)))
    for tensors in (results, expected):
        sum(tensor.square().mean() for tensor in tensors).backward()
    return {
        "outputs": max(max_difference(a, b) for a, b in zip(results, expected, strict=True)),
        "gradients": max(gradient_errors(model, unsharded).values()),
    }


def same_tokens(model: Any, unsharded: Any, ids: torch.Tensor, count: int, **options: Any) -> bool:
    """Whether both models generate the same ``count`` tokens, greedily."""
    options = {"max_new_tokens": count, "do_sample": False, **options}
    return torch.equal(model.generate(ids, **options), unsharded.generate(ids, **options))
