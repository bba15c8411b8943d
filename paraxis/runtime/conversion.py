"""Changing the dtype of a parallel model: ``.half()``, ``.bfloat16()``, ``.float()``, ``.to(dtype)``.

A sharded parameter is converted in place: optimizers, caches of layers and the plan refer to this object. The model
does it, and each of its modules, since recipes cast the head or the norms alone. Compiled programs are for the dtypes
that they were compiled with, so that the next call compiles a new one.

The device is that of the process group's backend and of the plan. Moving a shard to another one is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..tensor.sharded_tensor import ShardedTensor, conversions, convert_shard

Function = Callable[[torch.Tensor], torch.Tensor]


def install_conversion(model: nn.Module) -> None:
    """Let the model and its modules convert their shards. A copied module has a copy of this: it converts itself."""
    for module in model.modules():
        module._apply = partial(convert_module, module)  # type: ignore[method-assign]


def convert_module(module: nn.Module, function: Function, recurse: bool = True) -> nn.Module:
    """What ``nn.Module._apply`` does, with sharded parameters.

    Raises:
        RuntimeError: The function moves tensors to another device. Nothing is converted.
    """
    modules = list(module.modules()) if recurse else [module]
    for each in modules:
        for kind in (each._parameters, each._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    _check_device(module, name, tensor, function)
    with torch.no_grad():
        done: dict[int, torch.Tensor | None] = {}  # by id: tied parameters are converted once
        for each in modules:
            for parameter in each._parameters.values():
                if parameter is not None and id(parameter) not in done:
                    done[id(parameter)] = None
                    _convert(parameter, function)
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    if done.get(id(buffer)) is None:
                        done[id(buffer)] = _converted_buffer(buffer, function)
                    each._buffers[name] = done[id(buffer)]
    return module


def _check_device(module: nn.Module, name: str, tensor: torch.Tensor, function: Function) -> None:
    after = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
    if after != tensor.device:
        raise RuntimeError(
            f"{type(module).__name__} is parallel and its ranks have their shards on {tensor.device}: {name} cannot be "
            f"moved to {after}. Choose the device before: ParallelExecutionCtx(current_device={str(after)!r}); or save "
            "the model with save_pretrained and load it there."
        )


def _convert(parameter: torch.Tensor, function: Function) -> None:
    """Convert a parameter and its gradient in place."""
    gradient, parameter.grad = parameter.grad, None
    if isinstance(parameter, ShardedTensor):
        convert_shard(parameter, function)
    else:
        parameter.data = function(parameter.data)
    if gradient is None:
        return
    if isinstance(gradient, ShardedTensor):
        parameter.grad = ShardedTensor(function(gradient.local), gradient.spec, gradient.shape)
    else:
        parameter.grad = function(gradient)


def _converted_buffer(buffer: torch.Tensor, function: Function) -> torch.Tensor:
    if isinstance(buffer, ShardedTensor):
        convert_shard(buffer, function)
        return buffer
    return function(buffer)


class Dtypes:
    """The dtypes of a module's parameters: notices when they change. Reads them only after some parameter in the
    process was converted."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._seen = module, conversions()
        self._known = self._dtypes()

    def _dtypes(self) -> list[Any]:
        return [p.dtype for p in self._module.parameters()]

    def changed(self) -> bool:
        """Whether the parameters have other dtypes than in the last call of this method, or at construction."""
        if self._seen == conversions():
            return False
        before, self._seen, self._known = self._known, conversions(), self._dtypes()
        return before != self._known
