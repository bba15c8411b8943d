"""The sharded tensor: global shape outside, this rank's shard inside.

``torch.compile`` sees the global shape and captures the global program; the backend takes the inner tensor. Outside a
compiled graph the tensor still answers every operator (see :mod:`.dispatch`, which :mod:`paraxis.tensor` installs):
elementwise ones run on the shards, all others on the gathered full tensor, with a warning, because correct and slow
beats fast and wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..compat.torch import FakeTensor, make_wrapper_subclass, mark_as_parameter, pytree, set_data
from ..distributed.dp_shard import DPShard
from ..distributed.redistribute import slice_box, sum_copies
from ..errors import WrapperError
from ..placement import Placement, Shard, local_shape
from . import unshard
from .checkpoint_chunks import chunk_at, chunk_list, write_items
from .dtensor import as_dtensor
from .parameter_meta import ParameterMeta
from .sharding import ShardSpec, full_tensor_of, shard_of, spec_of

__all__ = [
    "ShardSpec",
    "ShardedTensor",
    "UnplacedError",
    "conversions",
    "convert_shard",
    "full_tensor_of",
    "materialize",
    "override_shards",
    "shard_gradient",
    "shard_of",
    "shards_version",
    "spec_of",
    "swap_values",
    "unwrap",
    "wrap",
]


class UnplacedError(RuntimeError):
    """A parameter was used before the plan set its placement.

    Attributes:
        name: The parameter.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"parameter {name!r} has no placement yet: not planned")
        self.name = name


class ShardedTensor(torch.Tensor):
    """A tensor of which this process holds a shard. See the module's docstring."""

    _local: torch.Tensor
    _spec: ShardSpec | ParameterMeta
    _token: torch.Tensor
    """What the compiler sees inside a parameter: an empty tensor. A parameter gets its shard after the first capture,
    and compiled code is guarded on which parameter it sees (its metadata), not on the shard."""
    _dispatch: ClassVar[Callable[[Any, Any, Any, list[ShardedTensor]], Any]]
    """Runs an operator outside of graphs. Set by ``paraxis.tensor``: the implementations build on this class."""

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        spec: ShardSpec | ParameterMeta,
        size: Sequence[int],
        requires_grad: bool = False,
    ) -> ShardedTensor:
        tensor: Any = make_wrapper_subclass(
            cls, tuple(size), dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        tensor._local = local
        tensor._spec = spec
        if isinstance(spec, ParameterMeta):
            # As many dimensions as the shard: the compiler expects the same of a parameter and its gradient.
            tensor._token = local if isinstance(local, FakeTensor) else local.new_empty((0,) * len(size))
        return tensor

    # -- the shard and the full tensor -------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Where the elements live, across the tensor-parallel ranks. See ``dp_shard`` for the data-parallel ranks."""
        if self._spec.placement is None:
            raise UnplacedError(getattr(self._spec, "name", ""))
        return self._spec.placement

    @property
    def dp_shard(self) -> DPShard | None:
        """How data-parallel ranks divide the shard between them (FSDP); None if they do not."""
        return self._spec.dp_shard

    @property
    def local(self) -> torch.Tensor:
        """The memory of this rank's shard, outside of autograd. See :meth:`to_local` for the differentiable form."""
        return self._local

    @property
    def spec(self) -> ShardSpec | ParameterMeta:
        """Placement and process group; of a parameter, its :class:`~paraxis.tensor.parameter_meta.ParameterMeta`."""
        return self._spec

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks that hold the shards."""
        return self._spec.group

    def to_local(self) -> torch.Tensor:
        """What this rank holds; gradients flow back to the sharded tensor."""
        if self.dp_shard is None or not torch.is_grad_enabled():
            return unwrap(self) if self.dp_shard is None else self._local
        return _Unwrap.apply(self)  # type: ignore[no-any-return]

    def full_tensor(self) -> torch.Tensor:
        """The full tensor, on every rank. A collective: all ranks must call it."""
        return _FullTensor.apply(self)  # type: ignore[no-any-return]

    def to_dtensor(self) -> DTensor:
        """The same tensor as a DTensor; layouts DTensor cannot express are gathered and replicated."""
        return as_dtensor(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to a part of the full tensor: gather, assign, and take the shard again. A collective."""
        if isinstance(self._local, FakeTensor):
            super().__setitem__(index, value)
            return
        with torch.no_grad():
            full = full_tensor_of(self).clone()
            full[index] = value.full_tensor() if isinstance(value, ShardedTensor) else value
            self._local.copy_(shard_of(full, self))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same tensor, detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take values of the same shape, and their dtype. The values from before stay what they were: two tensors can
        swap theirs. The shard of a tensor that is sharded alike is shared; of any other it is a copy."""
        if value.shape != self.shape or value.device != self.device:
            raise RuntimeError(
                f"a sharded tensor keeps its shape and device: {tuple(self.shape)} on {self.device} cannot become "
                f"{tuple(value.shape)} on {value.device}"
            )
        alike = isinstance(value, ShardedTensor) and (value.placement, value.dp_shard) == (
            self.placement,
            self.dp_shard,
        )
        if alike:
            local = value._local  # type: ignore[attr-defined]
        else:
            local = torch.empty_like(self._local, dtype=value.dtype)
            ShardedTensor(local, self._spec, self.shape).copy_(value)
        if local.dtype != self.dtype:
            convert_shard(self, lambda _: local)
        else:
            self._local = local
            _Shards.version += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """A copy with its own shard. The copy of a parameter is a new parameter with the same placement."""
        if id(self) not in memo:
            meta = isinstance(self._spec, ParameterMeta)
            spec = replace(self._spec, source=None) if meta else self._spec  # type: ignore[type-var]
            copied: Any = ShardedTensor(self._local.detach().clone(), spec, self.shape, self.requires_grad)
            if meta:
                mark_as_parameter(copied)
                copied.meta_info = spec
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __copy__(self) -> ShardedTensor:
        """The same shard as a new tensor; of a parameter, a new parameter."""
        copied: Any = ShardedTensor(self._local, self._spec, self.shape, self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            mark_as_parameter(copied)
        if isinstance(self._spec, ParameterMeta):
            copied.meta_info = self._spec
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickling (``torch.save``) is refused: what one rank could write is neither the tensor nor a checkpoint."""
        name = getattr(self._spec, "name", "")
        raise TypeError(
            f"cannot pickle {f'the parameter {name!r}' if name else 'a tensor'} of shape {tuple(self.shape)}, which is "
            "sharded over ranks. Use model.save_pretrained(directory) for an ordinary checkpoint, "
            "paraxis.save_state(directory, model, optimizer) to resume a training run, or save "
            "tensor.full_tensor(): each of them on all ranks."
        )

    @property
    def _fsdp_flattened(self) -> bool:
        """``FullyShardedDataParallel`` asks this of each parameter before it flattens them: refused."""
        raise WrapperError("FullyShardedDataParallel", f"the parameter {getattr(self._spec, 'name', '')!r}")

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

    def _is_view(self) -> bool:
        """To the compiler never a view: autograd calls the result of a view operator on a sharded tensor a view, but it
        is a tensor with a shard of its own, and the compiler cannot derive it from another one."""
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = "unplaced" if self._spec.placement is None else str(self._spec.placement)
        return f"ShardedTensor(shape={tuple(self.shape)}, local={tuple(self._local.shape)}, placement={where})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        sharded = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)]
        if isinstance(sharded[0]._local, FakeTensor):
            return _on_global_fakes(func, args, kwargs, sharded[0]._local.fake_mode)
        return cls._dispatch(func, args, kwargs, sharded)


def _on_global_fakes(func: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """While tracing, a sharded tensor is a plain tensor of the global shape."""

    def plain(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, ShardedTensor) else x

    with mode:
        args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)


class _Unwrap(torch.autograd.Function):
    """The shard of a sharded tensor. The gradient has the same placement, summed over ranks that hold copies."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        return tensor._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> ShardedTensor | None:
        if grad is None:  # nobody differentiates what was computed with it
            return None
        spec, dp_shard = ctx.spec, ctx.spec.dp_shard
        placement = spec.placement
        if isinstance(placement, Shard) and placement.has_copies:
            held, group = (
                (placement, spec.group) if dp_shard is None else (dp_shard.mesh_placement, dp_shard.world_group)
            )
            grad = sum_copies(grad, held, ctx.size, group)
        return ShardedTensor(grad.contiguous(), ShardSpec(placement, spec.group, dp_shard), ctx.size)


class _Unshard(torch.autograd.Function):
    """FSDP: all-gather the parts of a parameter's shard; reduce-scatter (mean) its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        return unshard.unshard(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        spec, placement = ctx.spec, ctx.spec.placement
        if isinstance(placement, Shard) and placement.has_copies:
            grad = sum_copies(grad, placement, ctx.size, spec.group)
        part = spec.dp_shard.reduce_scatter(grad)
        return ShardedTensor(part, ShardSpec(placement, spec.group, spec.dp_shard), ctx.size)


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


class _FullTensor(torch.autograd.Function):
    """The full tensor of a sharded one. The gradient is sharded again."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.spec, ctx.size = tensor._spec, tensor.shape
        full = full_tensor_of(tensor)
        return full.detach().clone() if full is tensor._local else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        return _sharded_gradient(grad, ctx.spec, ctx.size)


_overrides: dict[int, torch.Tensor] = {}


@contextmanager
def override_shards(tensors: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, ``unwrap`` returns ``shards`` for ``tensors``: a compiler traces the program on these."""
    before = dict(_overrides)
    _overrides.update({id(tensor): shard for tensor, shard in zip(tensors, shards, strict=True)})
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor behind ``tensor`` (itself, if it is not sharded); differentiable."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    if _overrides and id(tensor) in _overrides:
        return _overrides[id(tensor)]
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return tensor._local if tensor.dp_shard is None else unshard.unsharded(tensor)
    function = _Unwrap if tensor.dp_shard is None else _Unshard
    return function.apply(tensor)  # type: ignore[no-any-return]


def wrap(local: torch.Tensor, spec: ShardSpec, size: Sequence[int]) -> ShardedTensor:
    """A sharded tensor around this rank's shard; differentiable."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return ShardedTensor(local.detach() if local.requires_grad else local, spec, size)
    return _Wrap.apply(local, spec, tuple(size))  # type: ignore[no-any-return]


class _Shards:
    """Counts how often any parameter got a new shard: compiled programs check their shards again when it changes."""

    version = 0
    conversions = 0


def conversions() -> int:
    """A number that changes whenever the dtype of some sharded tensor changes."""
    return _Shards.conversions


def shards_version() -> int:
    """A number that changes whenever some parameter gets a new shard."""
    return _Shards.version


def materialize(tensor: ShardedTensor, local: torch.Tensor) -> None:
    """Set the shard of an empty sharded parameter in place, so that it stays the same object."""
    placement, rank = tensor.placement, dist.get_rank(tensor._spec.group)
    if tensor.dp_shard is not None:
        placement, rank = tensor.dp_shard.mesh_placement, tensor.dp_shard.rank
    expected = local_shape(placement, tensor.shape, rank)
    if tuple(local.shape) != expected:
        raise ValueError(f"{getattr(tensor._spec, 'name', 'tensor')}: shard {tuple(local.shape)} is not {expected}")
    tensor._local = local
    _Shards.version += 1


def convert_shard(tensor: ShardedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert this rank's shard to the dtype that ``function`` gives it. In place: an optimizer knows the object."""
    local = function(tensor._local)
    if local.dtype == tensor.dtype:
        return
    set_data(tensor, ShardedTensor(local, tensor._spec, tensor.shape))
    tensor._local = local
    if isinstance(tensor._spec, ParameterMeta):
        tensor._spec.dtype = local.dtype
        tensor._token = local.new_empty((0,) * tensor.ndim)
    _Shards.version += 1
    _Shards.conversions += 1


def swap_values(one: torch.Tensor, other: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` where one of the tensors is sharded: each object keeps its placement and gets the
    values of the other one. A collective, unless both are sharded alike."""
    if one is other:
        return
    if one.shape != other.shape:
        name = next((n for n in (getattr(getattr(t, "_spec", None), "name", "") for t in (one, other)) if n), "")
        raise RuntimeError(
            f"cannot swap {repr(name) if name else 'a sharded tensor'} of shape {tuple(one.shape)} and a tensor of "
            f"shape {tuple(other.shape)}: a sharded parameter keeps its shape. Change the model (a parametrization "
            "whose right_inverse has another shape, for example) before parallelize_model."
        )
    with torch.no_grad():
        values = [t.data if isinstance(t, ShardedTensor) else t.detach().clone() for t in (one, other)]
        for tensor, value in ((one, values[1]), (other, values[0])):
            if isinstance(value, ShardedTensor) and not isinstance(tensor, ShardedTensor):
                value = value.full_tensor()
            tensor.data = value


def shard_gradient(parameter: ShardedTensor, gradient: torch.Tensor) -> torch.Tensor:
    """Shard the gradient of a parameter that was used outside a compiled graph, where it arrives as a full tensor."""
    if isinstance(gradient, ShardedTensor):
        return gradient
    return _sharded_gradient(gradient, parameter._spec, parameter.shape)


def _sharded_gradient(full: torch.Tensor, spec: Any, size: Sequence[int]) -> ShardedTensor:
    """A full gradient, sharded as its parameter; averaged over data-parallel ranks that shard the parameter."""
    local = slice_box(full, spec.placement, dist.get_rank(spec.group)).contiguous()
    if spec.dp_shard is not None:
        local = spec.dp_shard.reduce_scatter(local)
    return ShardedTensor(local, ShardSpec(spec.placement, spec.group, spec.dp_shard), size)
