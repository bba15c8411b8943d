"""The sharded tensor: global shape outside, this rank's shard inside.

``torch.compile`` sees the global shape and captures the global program; the backend takes the inner tensor. Outside a
compiled graph the tensor still answers every operator: elementwise ones run on the shards, all others on the gathered
whole, with a warning, because correct and slow beats fast and wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..distributed.checkpoint_chunks import chunk_at, chunk_list, write_items
from ..distributed.dp_shard import DPShard
from ..distributed.redistribute import gather_box, slice_box, sum_copies
from ..placement import Placement, Shard, local_shape
from . import unshard as unshard
from .parameter_meta import ParameterMeta

aten = torch.ops.aten


class ShardSpec:
    """The placement of an activation or a cache tensor, compared by value: compiled code is guarded on it."""

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None, split: DPShard | None = None) -> None:
        self.placement = placement
        self.group = group
        self.split = split
        """How data-parallel ranks split the shard further: what a gradient and an optimizer's state have."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardSpec)
            and other.placement == self.placement
            and other.group is self.group
            and other.split == self.split
        )

    def __hash__(self) -> int:
        return hash(self.placement)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self


class UnplacedError(RuntimeError):
    """A parameter was used before the plan gave it a place."""


class ShardedTensor(torch.Tensor):
    """A tensor of which this process holds a shard. See the module's docstring."""

    _local: torch.Tensor
    _spec: ShardSpec | ParameterMeta
    _token: torch.Tensor
    """What the compiler sees inside a parameter: nothing. A parameter gets its shard after the first capture, and
    compiled code is guarded on which parameter it sees (its metadata), not on the shard."""

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        spec: ShardSpec | ParameterMeta,
        size: Sequence[int],
        requires_grad: bool = False,
    ) -> ShardedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(size), dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        tensor._local = local
        tensor._spec = spec
        if isinstance(spec, ParameterMeta):
            # As many dimensions as the shard: the compiler treats a parameter and its gradient alike.
            tensor._token = local if isinstance(local, FakeTensor) else local.new_empty((0,) * len(size))
        return tensor

    # -- the shard and the whole -------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where the elements live. Of a parameter that data-parallel ranks split further (``dp_shard``): its shards."""
        if self._spec.placement is None:
            raise UnplacedError(f"parameter {getattr(self._spec, 'name', '')!r} has no placement yet: not planned")
        return self._spec.placement

    @property
    def dp_shard(self) -> DPShard | None:
        """How data-parallel ranks split the shard between them, if they do."""
        return self._spec.split

    def to_local(self) -> torch.Tensor:
        """What this rank holds; gradients flow back to the sharded tensor."""
        if self.dp_shard is None or not torch.is_grad_enabled():
            return unwrap(self) if self.dp_shard is None else self._local
        return _Unwrap.apply(self)  # type: ignore[no-any-return]

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank. A collective: all ranks must call it."""
        return _Full.apply(self)  # type: ignore[no-any-return]

    def to_dtensor(self) -> DTensor:
        """The same tensor as a DTensor; layouts DTensor cannot express are gathered and replicated."""
        from .dtensor import as_dtensor

        return as_dtensor(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to a part of the whole: gathered, changed, and taken apart again. A collective."""
        if isinstance(self._local, FakeTensor):
            super().__setitem__(index, value)
            return
        with torch.no_grad():
            whole = full_tensor_of(self).clone()
            whole[index] = value.full_tensor() if isinstance(value, ShardedTensor) else value
            self._local.copy_(shard_of(whole, self))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without gradients, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take over other values of the same shape and dtype: a sharded tensor's, or the shard of a whole one."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"a sharded tensor keeps its shape and dtype: {tuple(self.shape)} of {self.dtype} cannot become "
                f"{tuple(value.shape)} of {value.dtype}"
            )
        self.detach().copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """A copy with a shard of its own. That of a parameter is another parameter, placed alike."""
        if id(self) not in memo:
            meta = isinstance(self._spec, ParameterMeta)
            spec = replace(self._spec, source=None) if meta else self._spec  # type: ignore[type-var]
            twin: Any = ShardedTensor(self._local.detach().clone(), spec, self.shape, self.requires_grad)
            if meta:
                twin._is_param, twin.meta_info = True, spec
            if self.grad is not None:
                twin.grad = deepcopy(self.grad, memo)
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[no-any-return]

    # -- protocol of torch.distributed.checkpoint --------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return chunk_at(self, index.offset)

    # -- protocol of traceable wrapper subclasses --------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_inner"], self._spec

    @property
    def _inner(self) -> torch.Tensor:
        return self._token if isinstance(self._spec, ParameterMeta) else self._local

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], spec: Any, size: Any, stride: Any) -> ShardedTensor:
        (local,) = inner.values()
        return ShardedTensor(local, spec, size)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = "unplaced" if self._spec.placement is None else str(self._spec.placement)
        return f"ShardedTensor(shape={tuple(self.shape)}, local={tuple(self._local.shape)}, placement={where})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        sharded = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)]
        if isinstance(sharded[0]._local, FakeTensor):
            return _on_global_fakes(func, args, kwargs, sharded[0]._local.fake_mode)
        from .dispatch import dispatch

        return dispatch(func, args, kwargs, sharded)


def _on_global_fakes(func: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """While tracing, a sharded tensor is a plain tensor of the global shape."""

    def plain(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, ShardedTensor) else x

    with mode:
        args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)


class _Unwrap(torch.autograd.Function):
    """The shard of a sharded tensor; the gradient comes back sharded alike, parts on copies summed."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        return tensor._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        spec, split = ctx.spec, ctx.spec.split
        placement = spec.placement
        if isinstance(placement, Shard) and placement.has_copies:
            held, group = (placement, spec.group) if split is None else (split.held, split.world_group)
            grad = sum_copies(grad, held, ctx.size, group)
        return ShardedTensor(grad.contiguous(), ShardSpec(placement, spec.group, split), ctx.size)


class _Gathered(torch.autograd.Function):
    """The shard of a parameter that data-parallel ranks split: gathered; the gradient is averaged and scattered."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        return unshard.gather(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        spec, placement = ctx.spec, ctx.spec.placement
        if isinstance(placement, Shard) and placement.has_copies:
            grad = sum_copies(grad, placement, ctx.size, spec.group)
        return ShardedTensor(spec.split.average(grad), ShardSpec(placement, spec.group, spec.split), ctx.size)


class _Wrap(torch.autograd.Function):
    """The inverse of :class:`_Unwrap`, for results that stay sharded."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: ShardSpec, size: Sequence[int]) -> ShardedTensor:
        ctx.spec = spec
        return ShardedTensor(local.detach(), spec, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if isinstance(grad, ShardedTensor):
            return grad._local, None, None
        return slice_box(grad, ctx.spec.placement, dist.get_rank(ctx.spec.group)), None, None


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        full = full_tensor_of(tensor)
        return full.detach().clone() if full is tensor._local else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        return _gradient(grad, ctx.spec, ctx.size)


_given: dict[int, torch.Tensor] = {}


@contextmanager
def shards_of(tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, ``unwrap`` gives these shards for these sharded tensors: those that a compiler traces."""
    before = dict(_given)
    _given.update({id(tensor): local for tensor, local in zip(tensors, locals_, strict=True)})
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor behind ``tensor`` (itself, if it is not sharded); differentiable."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    if _given and id(tensor) in _given:
        return _given[id(tensor)]
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return tensor._local if tensor.dp_shard is None else unshard.unsharded(tensor)
    function = _Unwrap if tensor.dp_shard is None else _Gathered
    return function.apply(tensor)  # type: ignore[no-any-return]


def wrap(local: torch.Tensor, spec: ShardSpec, size: Sequence[int]) -> ShardedTensor:
    """A sharded tensor around this rank's shard; differentiable."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return ShardedTensor(local.detach(), spec, tuple(size))
    return _Wrap.apply(local, spec, tuple(size))  # type: ignore[no-any-return]


class _Shards:
    """How often a parameter was given a shard, in all: compiled programs look at their shards again when it changes."""

    given = 0


def times_given() -> int:
    """A number that is another one after some parameter was given another shard."""
    return _Shards.given


def materialize(tensor: ShardedTensor, local: torch.Tensor) -> None:
    """Give an empty sharded parameter its shard, in place, so that it stays the same object."""
    placement, rank = tensor.placement, dist.get_rank(tensor._spec.group)
    if tensor.dp_shard is not None:
        placement, rank = tensor.dp_shard.held, tensor.dp_shard.rank
    expected = local_shape(placement, tensor.shape, rank)
    if tuple(local.shape) != expected:
        raise ValueError(f"{getattr(tensor._spec, 'name', 'tensor')}: shard {tuple(local.shape)} is not {expected}")
    tensor._local = local
    _Shards.given += 1


def shard_gradient(parameter: ShardedTensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that was used outside a compiled graph: it comes whole, and is kept sharded."""
    if isinstance(gradient, ShardedTensor):
        return gradient
    return _gradient(gradient, parameter._spec, parameter.shape)


def _gradient(whole: torch.Tensor, spec: Any, size: Sequence[int]) -> ShardedTensor:
    """A gradient that comes whole, as a parameter keeps it; averaged where data-parallel ranks split the parameter."""
    local = slice_box(whole, spec.placement, dist.get_rank(spec.group)).contiguous()
    if spec.split is not None:
        local = spec.split.average(local)
    return ShardedTensor(local, ShardSpec(spec.placement, spec.group, spec.split), size)


# -- the whole and the part ----------------------------------------------------------------------------------------


def spec_of(tensor: ShardedTensor) -> ShardSpec:
    """Where a tensor is, for another one that is there too."""
    return ShardSpec(tensor.placement, tensor._spec.group, tensor.dp_shard)


def full_tensor_of(tensor: ShardedTensor) -> torch.Tensor:
    """The whole tensor; this rank's own memory if that is all of it. A collective."""
    local = tensor._local if tensor.dp_shard is None else tensor.dp_shard.gather(tensor._local)
    return gather_box(local, tensor.placement, tensor.shape, tensor._spec.group)


def shard_of(whole: torch.Tensor, like: ShardedTensor) -> torch.Tensor:
    """The part of a whole tensor that a rank has if it is sharded as another one."""
    local = slice_box(whole, like.placement, dist.get_rank(like._spec.group))
    if like.dp_shard is None:
        return local
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"a gradient of shape {tuple(whole.shape)} comes in part from a compiled graph and in part from Python "
            "code that read the parameter itself. With data_parallel='shard' these cannot be added: use 'replicate'."
        )
    return like.dp_shard.take(local)
