"""Results that are made whole when they are read.

The output of a model that trains has the logits beside the loss. They are the largest tensor of the program, and a
training loop reads the loss alone. So they leave the program sharded, and the output gathers a field the first time
somebody reads it. Every rank must read it then, as every rank must call the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..capture.mark_output import has_loss
from ..distributed.redistribute import redistribute
from ..placement import REPLICATE
from ..tensor.sharded_tensor import ShardedTensor

_Base: Any = dict if TYPE_CHECKING else object
_FIELDS = "_sharded_fields"
"""Where an output notes which of its fields are still sharded."""


def gather_on_access(result: Any) -> Any:
    """The output of a model with its sharded fields to be gathered on demand; anything else as it is."""
    if not has_loss(result):
        return result
    fields = {key: value for key in result if isinstance(value := dict.__getitem__(result, key), ShardedTensor)}
    if not fields:
        return result
    result.__dict__[_FIELDS] = set(fields)
    result.__class__ = _pending(type(result))  # type: ignore[arg-type]
    return result


def _whole(tensor: ShardedTensor) -> torch.Tensor:
    """The whole tensor, with the gradient that the program would have had for it."""
    group = tensor._spec.group
    assert group is not None
    return redistribute(_Inner.apply(tensor), tensor.placement, REPLICATE, tuple(tensor.shape), group)


class _Inner(torch.autograd.Function):
    """What this rank holds of a result. Of copies, the gradient comes in parts, which the program sums."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        return tensor._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        return ShardedTensor(grad.contiguous(), ctx.spec, ctx.size)


def _gather(output: Any, key: str | None = None) -> None:
    """Make one field whole, or all. With the last of them the output is of its own class again. A collective."""
    state = object.__getattribute__(output, "__dict__")
    fields = state[_FIELDS]
    for name in sorted(fields) if key is None else [key]:
        state[name] = whole = _whole(dict.__getitem__(output, name))
        dict.__setitem__(output, name, whole)
        fields.discard(name)
    if not fields:
        del state[_FIELDS]
        output.__class__ = type(output).__bases__[1]


def _after_gathering(name: str) -> Callable[..., Any]:
    """A method that reads all fields: they are gathered first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _gather(self)
        return getattr(type(self), name)(self, *args, **kwargs)

    method.__name__ = name
    return method


class _Pending(_Base):
    """What an output does until its fields are whole: reading a field gathers it, reading all gathers all."""

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get(_FIELDS, ()):
            _gather(self, name)
        return object.__getattribute__(self, name)

    def __getitem__(self, key: Any) -> Any:
        fields = self.__dict__[_FIELDS]
        if key == 0:
            key = next(iter(self))
        if not isinstance(key, str):
            _gather(self)
            return self[key]
        if key in fields:
            _gather(self, key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401


_READING = (
    "items",
    "values",
    "to_tuple",
    "copy",
    "pop",
    "popitem",
    "__eq__",
    "__repr__",
    "__reduce__",
    "__reduce_ex__",
)
for _name in _READING:
    setattr(_Pending, _name, _after_gathering(_name))


@cache
def _pending(plain: Any) -> type:
    """The class of a pending output. Called, it makes a plain one: tools rebuild an output as ``type(output)(...)``."""
    fields = {"__module__": plain.__module__, "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs)}
    return type(plain.__name__, (_Pending, plain), fields)
