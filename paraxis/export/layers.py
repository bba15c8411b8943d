"""Subclasses of Linear and Embedding with their own forward (scaled, shifted): whether it runs on a sharded weight.

The libraries call such a forward with DTensors. DTensor's results are exact; the question is whether the code runs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..plan.offline import simulated_group
from .candidates import generic


def failing_layers(model: nn.Module, patterns: set[str], inputs: dict[str, Any], world: int) -> dict[str, str]:
    """Run these modules on DTensors with the arguments that the model passes; those that fail, with the reason."""
    calls: dict[str, tuple[nn.Module, Any, Any, Any]] = {}

    def record(pattern: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.setdefault(pattern, (module, args, kwargs, output))

        return hook

    hooks = [
        module.register_forward_hook(record(generic(name)), with_kwargs=True)
        for name, module in model.named_modules()
        if generic(name) in patterns
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    found = dict.fromkeys(sorted(patterns - set(calls)), "it is not called")
    with simulated_group(world):
        for pattern, (module, args, kwargs, output) in calls.items():
            try:
                _run(copy.deepcopy(module), args, kwargs, output, world)
            except Exception as error:
                reason = f"the forward of {type(module).__name__} does not run on a sharded weight"
                found[pattern] = f"{reason} ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    return found


def _run(module: nn.Module, args: Any, kwargs: Any, output: Any, world: int) -> None:
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for hooks in (module._forward_hooks, module._forward_hooks_with_kwargs):
        hooks.clear()
    mesh = init_device_mesh("cpu", (world,))
    styles: list[Any] = [RowwiseParallel(input_layouts=Replicate())]
    if isinstance(module, nn.Linear):
        styles.append(ColwiseParallel(output_layouts=Replicate()))
    for style in styles:
        with torch.no_grad():
            found = parallelize_module(copy.deepcopy(module), mesh, style)(*args, **kwargs)
        if not isinstance(found, Tensor) or found.shape != output.shape:
            raise TypeError("its output has another shape")
