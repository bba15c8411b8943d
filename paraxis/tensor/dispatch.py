"""Operators on sharded tensors outside a compiled graph.

This is what optimizers, hooks and users do to parameters, gradients and results. Elementwise operators run on the
shards; norms and the unscaling of gradients have implementations of their own; then come the planner's rules. For any
other operator the tensors are gathered and it is computed replicated, with a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat.torch import DisableTorchFunctionSubclass, operator_name, pytree, schema_of
from ..distributed.random import run_as_first_rank
from ..utils.user_line import warn_user
from .grad_scaler import unscale
from .norms import norms
from .rule_dispatch import dispatch_by_rule
from .sharded_tensor import ShardedTensor, full_tensor_of, shard_of, spec_of

aten = torch.ops.aten


def dispatch(func: Any, args: Any, kwargs: Any, sharded: list[ShardedTensor]) -> Any:
    """The result of an operator, some of whose arguments are sharded."""
    if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):  # view_as() of a tensor of the same shape
        func, args = aten.alias.default, args[:1]
    if _runs_on_shards(func, args, kwargs, sharded):
        return _on_shards(func, args, kwargs, sharded[0])
    result = norms(func, args, kwargs)
    result = unscale(func, args, kwargs) if result is NotImplemented else result
    result = dispatch_by_rule(func, args, kwargs) if result is NotImplemented else result
    return _replicated(func, args, kwargs) if result is NotImplemented else result


_LIKE = {
    aten.detach.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.zero_.default,
    aten.fill_.Scalar,
}
_SAME = {aten.detach.default, aten.alias.default}
"""Operators that return the same tensor as a new object, parameter metadata included."""
_REDUCING_FOREACH = ("norm", "max")
_FUSED = ("_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Fused steps of optimizers."""


def _is_elementwise(func: Any) -> bool:
    name = operator_name(func).removeprefix("aten::")
    if name.startswith("_foreach_"):
        return not any(word in name for word in _REDUCING_FOREACH)
    return func in _LIKE or torch.Tag.pointwise in func.tags or name.startswith(_FUSED)


def _writes(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    written = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [x for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)]


def _runs_on_shards(func: Any, args: Any, kwargs: Any, sharded: list[ShardedTensor]) -> bool:
    """Whether the shards of the result are the result on the shards."""
    if func is aten.new_empty_strided.default:
        return tuple(args[1]) == tuple(args[0].shape)
    if not _is_elementwise(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(not isinstance(x, ShardedTensor) and x.ndim for x in _writes(func, args, kwargs)):
        return False  # it writes to a replicated tensor: a slice of the result is not enough
    if operator_name(func).startswith("aten::_f"):
        return all(_same_placement(row) for row in _rows(args))
    first = sharded[0]
    if len(sharded) == 1 and func in _SAME:
        return True
    if any(x.shape != first.shape or _where(x) != _where(first) for x in sharded):
        return False
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return all(x.ndim == 0 or x.shape == first.shape for x in tensors)


def _rows(args: Any) -> list[tuple[Any, ...]]:
    """The tensors of each single operation in a ``foreach`` call."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    return list(zip(*lists, strict=True)) if len({len(x) for x in lists}) == 1 else [tuple(pytree.tree_leaves(lists))]


def _same_placement(row: tuple[Any, ...]) -> bool:
    """Whether one operation of the lists may run on shards: one placement, or plain tensors of the same shape."""
    big = [x for x in row if isinstance(x, torch.Tensor) and x.ndim]
    sharded = [x for x in big if isinstance(x, ShardedTensor)]
    return not sharded or (
        all(x.shape == sharded[0].shape for x in big) and all(_where(x) == _where(sharded[0]) for x in sharded)
    )


def _foreach_on_shards(func: Any, args: Any, kwargs: Any) -> Any:
    """A ``foreach`` operator: results have the placement of the arguments at the same position in the lists."""
    likes = [next((x for x in row if isinstance(x, ShardedTensor)), None) for row in _rows(args)]

    def local(x: Any, like: ShardedTensor | None) -> Any:
        if isinstance(x, ShardedTensor):
            return x._local
        if like is not None and isinstance(x, torch.Tensor) and x.ndim:
            return shard_of(x, like)
        return x

    def locals_of(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and len(arg) == len(likes):
            return [local(x, like) for x, like in zip(arg, likes, strict=True)]
        return pytree.tree_map(lambda x: local(x, None), arg)

    result = func(*(locals_of(a) for a in args), **{k: locals_of(v) for k, v in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return result
    return [
        x if like is None else ShardedTensor(x, spec_of(like), like.shape)
        for x, like in zip(result, likes, strict=True)
    ]


def _on_shards(func: Any, args: Any, kwargs: Any, like: ShardedTensor) -> Any:
    if func is aten.new_empty_strided.default:
        func, args = aten.empty_like.default, (args[0],)
    if func in _SAME:
        return ShardedTensor(func(like._local), like._spec, like.shape)
    if operator_name(func).startswith("aten::_f"):
        return _foreach_on_shards(func, args, kwargs)
    wrappers: dict[int, ShardedTensor] = {}

    def local(x: Any) -> Any:
        if isinstance(x, ShardedTensor):
            wrappers[id(x._local)] = x
            return x._local
        if isinstance(x, DTensor):
            x = x.full_tensor()
        if isinstance(x, torch.Tensor) and x.ndim and x.shape == like.shape:
            return shard_of(x, like)
        return x

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in wrappers:  # an in-place operator returns its argument
            return wrappers[id(x)]
        return ShardedTensor(x, spec_of(like), like.shape)

    args, kwargs = pytree.tree_map(local, (args, kwargs))
    return pytree.tree_map(wrap, func(*args, **kwargs))


def _is_write(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and name[-2:-1] != "_")


_WRITES = frozenset(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if _is_write(name))
"""The methods that write: Dynamo, which traces the question, can look up a function but not its name."""


class GatheredView(torch.Tensor):
    """A view of a sharded tensor outside a compiled graph, which is a copy: reading works, a write would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func in _WRITES if torch.compiler.is_compiling() else _is_write(getattr(func, "__name__", ""))
        if writes and args and isinstance(args[0], GatheredView):
            raise RuntimeError(
                f"{func.__name__} on a view of a sharded tensor would change a gathered copy and be lost. Write to the "
                "tensor itself (`tensor[index] = value`, `tensor.copy_(...)`), or to `tensor.to_local()`."
            )
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_warned: set[Any] = set()


def _replicated(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather, compute replicated, and warn once per operator. Writes to a sharded argument go back to its shard."""
    if func not in _warned:
        _warned.add(func)
        warn_user(
            f"{func} was called on a sharded tensor outside the compiled model: the tensor is gathered first, which "
            "is correct but slow. Call the model, or work on `tensor.to_local()`."
        )
    gathered: list[tuple[ShardedTensor, torch.Tensor]] = []

    def gather(x: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return x.full_tensor() if isinstance(x, DTensor) else x
        for known, full in gathered:
            if known is x:
                return full
        gathered.append((x, full_tensor_of(x).clone()))
        return gathered[-1][1]

    full_args, full_kwargs = pytree.tree_map(gather, (args, kwargs))
    if torch.Tag.nondeterministic_seeded in func.tags:
        tensor = gathered[0][0]
        world_group = getattr(tensor._spec, "world_group", None) or tensor._spec.group
        assert world_group is not None
        result = run_as_first_rank(func, world_group, tensor.device, *full_args, **full_kwargs)
    else:
        result = func(*full_args, **full_kwargs)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns):
        return pytree.tree_map(lambda x: x.as_subclass(GatheredView) if isinstance(x, torch.Tensor) else x, result)
    if schema_of(func).is_mutable:
        for tensor, full in gathered:
            tensor._local.copy_(shard_of(full, tensor))
            if result is full:
                result = tensor
    return result


def _where(tensor: ShardedTensor) -> Any:
    """Placement over both kinds of ranks, to compare."""
    return tensor.placement, tensor.dp_shard
