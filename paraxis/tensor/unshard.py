"""FSDP: unshard parameters right before use, reshard after forward, and unshard again for the backward pass.

Where data-parallel ranks shard a parameter, its parts are all-gathered before use. Autograd would save the unsharded
tensor for the backward pass, and with all of them alive sharding would save no memory. So while a program runs, saved
tensor hooks replace every unsharded tensor, or view of one, by a :class:`SavedParameter`, from which it is restored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..compat.torch import storage_key

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

_parameter_of: dict[int, tuple[Any, ShardedTensor]] = {}
"""By the address of an unsharded tensor's storage: a weak reference that removes the entry, and the parameter."""
_backward_cache: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Unsharded tensors that the backward pass still uses, by the identity of the part that this rank holds."""
_inference_cache: dict[int, torch.Tensor] = {}
"""Unsharded tensors while :func:`unsharded_for_inference` is active, by the identity of this rank's part."""


@dataclass(frozen=True)
class SavedParameter:
    """What autograd saves instead of an unsharded tensor: the parameter, the view of it, and the version of its values.

    Attributes:
        parameter: The parameter to unshard again.
        size, stride, offset: The view of it that autograd wanted to save.
        version: Version counters of the parameter: the backward pass needs the values of the forward pass.
    """

    parameter: ShardedTensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: tuple[int, int]


def unshard(parameter: ShardedTensor) -> torch.Tensor:
    """All-gather the tensor-parallel shard that a rank computes with. A collective of the data-parallel ranks."""
    dp_shard = parameter.dp_shard
    assert dp_shard is not None
    shard = dp_shard.unshard(parameter._local)
    storage = shard.untyped_storage()
    address = storage_key(storage)
    _parameter_of[address] = weakref.ref(storage, lambda _: _parameter_of.pop(address, None)), parameter
    return shard


def unsharded(parameter: ShardedTensor) -> torch.Tensor:
    """The unsharded tensor, from the cache where :func:`unsharded_for_inference` is active, else by a collective."""
    found = _inference_cache.get(id(parameter._local))
    return unshard(parameter) if found is None else found


@contextmanager
def unsharded_for_inference(parameters: Iterable[Any]) -> Iterator[None]:
    """Unshard all these parameters once, for calls without gradients, and reshard them at the end. A collective.

    Inside, data-parallel ranks may call the model with different inputs and a different number of times.
    """
    sharded = (p for p in parameters if p.dp_shard is not None)
    added = {id(p._local): unshard(p) for p in sharded if id(p._local) not in _inference_cache}
    _inference_cache.update(added)
    try:
        yield
    finally:
        for key in added:
            del _inference_cache[key]


def _pack(tensor: torch.Tensor) -> Any:
    found = _parameter_of.get(storage_key(tensor.untyped_storage())) if _parameter_of else None
    if found is None or tensor.dtype != found[1].dtype:
        return tensor
    parameter = found[1]
    return SavedParameter(parameter, tensor.size(), tensor.stride(), tensor.storage_offset(), _version(parameter))


def _version(parameter: ShardedTensor) -> tuple[int, int]:
    """Version counters of the sharded tensor and of the part that this rank holds."""
    return parameter._version, parameter._local._version


def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, SavedParameter):
        return saved  # type: ignore[no-any-return]
    parameter = saved.parameter
    if _version(parameter) != saved.version:
        raise RuntimeError(
            f"parameter {getattr(parameter._spec, 'name', '')!r} was changed between the forward and the backward "
            "pass, which needs its old values. Call backward before optimizer.step()."
        )
    key = id(parameter._local)
    shard = _backward_cache.get(key)
    if shard is None:
        shard = _backward_cache[key] = unshard(parameter)
    return shard.as_strided(saved.size, saved.stride, saved.offset)


def reshard_after_forward(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same program, after which autograd keeps no unsharded parameter alive for the backward pass."""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return program(*args)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return program(*args)

    return run
