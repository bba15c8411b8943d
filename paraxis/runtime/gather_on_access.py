"""Training outputs whose sharded fields are all-gathered when somebody reads them.

The output of a model in training has the logits beside the loss. They are the largest tensor of the program, and a
training loop reads the loss alone. So they leave the program sharded, and the output gathers a field the first time it
is read. Reading such a field is a collective: every rank must read it, as every rank must call the model.

The output is an instance of a subclass of the model's own output class. Only reading *values* gathers: an attribute, a
key, a position, ``values()``, ``items()``, ``to_tuple()``. Printing, ``len``, ``in``, iterating over keys and copying
do not, and pickling an output with sharded fields is refused: a log line on one rank must not wait for the others.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..capture.mark_output import has_loss
from ..distributed.redistribute import redistribute
from ..placement import REPLICATE
from ..tensor.sharded_tensor import ShardedTensor

_Base: Any = OrderedDict if TYPE_CHECKING else object
_PENDING = "_pending_fields"
"""Where an output has its fields that are still sharded, by name."""


def gather_on_access(result: Any) -> Any:
    """An output with a loss, with its sharded fields to be gathered when they are read; any other result unchanged."""
    if not has_loss(result):
        return result
    sharded = {key: value for key in result if isinstance(value := dict.__getitem__(result, key), ShardedTensor)}
    if not sharded:
        return result
    plain: Any = type(result)
    pending = {key: _Field(value) for key, value in sharded.items()}
    return _new(_subclass(plain, tuple(sharded)), result, pending)


def _new(cls: type, source: Any, pending: dict[str, _Field]) -> Any:
    """An output of class ``cls`` with the contents of another, without running the constructors of its class."""
    output: Any = OrderedDict.__new__(cls)
    output.__dict__.update(source.__dict__)
    for key in source:
        OrderedDict.__setitem__(output, key, dict.__getitem__(source, key))
    output.__dict__[_PENDING] = dict(pending)
    return output


class _Field:
    """A sharded field. Copies of an output share it, so that it is gathered once for all of them."""

    def __init__(self, tensor: ShardedTensor) -> None:
        self._tensor: ShardedTensor | None = tensor
        self._full: torch.Tensor | None = None

    def full(self) -> torch.Tensor:
        """The full tensor, with the gradient that the program would have had for it. A collective, the first time."""
        if self._full is None:
            tensor = self._tensor
            assert tensor is not None and tensor.group is not None
            shape = tuple(tensor.shape)
            self._full = redistribute(_ToLocal.apply(tensor), tensor.placement, REPLICATE, shape, tensor.group)
            self._tensor = None
        return self._full


class _ToLocal(torch.autograd.Function):
    """This rank's shard of a result. Where ranks hold replicas, their gradients are partial: the program sums them."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor.spec, tensor.shape
        return tensor.local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        return ShardedTensor(grad.contiguous(), ctx.spec, ctx.size)


class _Attribute:
    """A field as an attribute: reading it gathers it, setting it replaces it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, output: Any, owner: type) -> Any:
        if output is None:
            return getattr(super(owner, owner), self.name)  # the default of the model's own class
        output._gather(self.name)
        return output.__dict__[self.name]

    def __set__(self, output: Any, value: Any) -> None:
        output.__dict__[_PENDING].pop(self.name, None)
        output.__dict__[self.name] = value


class _GatherOnAccess(_Base):
    """What the subclass of an output class adds to it."""

    _plain: type
    """The model's own output class."""

    def _gather(self, *names: str) -> None:
        """Replace these sharded fields, or all, by full tensors. A collective, if one of them is still sharded."""
        pending: dict[str, _Field] = self.__dict__[_PENDING]
        for name in names or sorted(pending):
            if name in pending:
                self.__dict__[name] = full = pending[name].full()
                OrderedDict.__setitem__(self, name, full)
                del pending[name]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self._gather(key)
            return dict.__getitem__(self, key)
        names = list(self)[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 -- that is this method

    def values(self) -> Any:
        self._gather()
        return super().values()

    def items(self) -> Any:
        self._gather()
        return super().items()

    def popitem(self, last: bool = True) -> Any:
        self._gather()
        return super().popitem(last)

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # all output classes are dataclasses
        return f"{type(self).__name__}({', '.join(f'{name}={self.__dict__.get(name)!r}' for name in names)})"

    def __copy__(self) -> Any:
        return _new(type(self), self, self.__dict__[_PENDING])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(**dict(self.items())), memo)

    def __reduce__(self) -> Any:
        pending = self.__dict__[_PENDING]
        if pending:
            raise TypeError(
                f"cannot pickle {type(self).__name__} while {', '.join(sorted(pending))} is sharded over ranks: read "
                f"it on all ranks first (output.{min(pending)})"
            )
        return self._plain(**dict(self.items())).__reduce__()


@cache
def _subclass(plain: Any, names: tuple[str, ...]) -> type:
    """The subclass of an output class with these sharded fields. Called, it makes a plain output: libraries rebuild an
    output as ``type(output)(...)``."""
    contents = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs),
        "_plain": plain,
        **{name: _Attribute(name) for name in names},
    }
    return type(plain.__name__, (_GatherOnAccess, plain), contents)
