"""Gathered parameters are let go of as soon as they were used, and gathered again for the backward pass.

Where data-parallel ranks split a parameter, its shard is gathered before it is used. Autograd would keep it until the
backward pass, and with all of them there the split would have saved no memory. So while a program runs, what autograd
is to keep is looked at: of a gathered shard, or a view of one, it keeps a note of which parameter it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

_live: dict[int, tuple[Any, ShardedTensor]] = {}
"""By the address of its storage: a weak reference that tells of the end of a gathered shard, and its parameter."""
_latest: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""The gathered shard, if it is still there, by the identity of the part that this rank holds."""
_kept: dict[int, torch.Tensor] = {}
"""Gathered shards that are kept while :func:`keeping` is active, by the identity of the part."""


@dataclass(frozen=True)
class Note:
    """What is kept instead of a gathered shard: the parameter, the view of it, and the version of its values."""

    parameter: ShardedTensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: tuple[int, int]


def gather(parameter: ShardedTensor) -> torch.Tensor:
    """The shard that a rank computes with, from the parts of it. A collective of the data-parallel ranks."""
    split = parameter.dp_shard
    assert split is not None
    shard = split.gather(parameter._local)
    storage = shard.untyped_storage()
    address = storage._cdata
    _live[address] = weakref.ref(storage, lambda _: _live.pop(address, None)), parameter
    return shard


def unsharded(parameter: ShardedTensor) -> torch.Tensor:
    """The shard, without a collective where it was gathered for a longer time. See :func:`keeping`."""
    found = _kept.get(id(parameter._local))
    return gather(parameter) if found is None else found


@contextmanager
def keeping(parameters: Iterable[Any]) -> Iterator[None]:
    """Gather the shards of all these parameters once, for calls without gradients; a collective.

    Within, data-parallel ranks may call the model with different inputs and any number of times.
    """
    added = {id(p._local): gather(p) for p in parameters if p.dp_shard is not None and id(p._local) not in _kept}
    _kept.update(added)
    try:
        yield
    finally:
        for key in added:
            del _kept[key]


def _pack(tensor: torch.Tensor) -> Any:
    found = _live.get(tensor.untyped_storage()._cdata) if _live else None
    if found is None or tensor.dtype != found[1].dtype:
        return tensor
    parameter = found[1]
    return Note(parameter, tensor.size(), tensor.stride(), tensor.storage_offset(), _version(parameter))


def _version(parameter: ShardedTensor) -> tuple[int, int]:
    """How often it was written to, as a whole and as the part that this rank holds."""
    return parameter._version, parameter._local._version


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, Note):
        return kept  # type: ignore[no-any-return]
    parameter = kept.parameter
    if _version(parameter) != kept.version:
        raise RuntimeError(
            f"parameter {getattr(parameter._spec, 'name', '')!r} was changed between the forward and the backward "
            "pass, which needs the values that it had. Call backward before optimizer.step()."
        )
    key = id(parameter._local)
    shard = _latest.get(key)
    if shard is None:
        shard = _latest[key] = gather(parameter)
    return shard.as_strided(kept.size, kept.stride, kept.offset)


def reshard_after_forward(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program after which no gathered shard is kept for the backward pass."""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return program(*args)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return program(*args)

    return run
