"""The rule registry: how placements pass through operators.

A rule answers one question: given an operator call (global shapes and arguments) and where its inputs are now, under
which combinations of input and output placements does running the operator on the shards give the shards of the
result? Each such combination is a :class:`Strategy`. Running everything replicated is always one of them, so rules
only add to it; an operator without a rule is gathered and computed whole.

Rules are written for *values*. Gradients need no rule: a replicated input of a strategy with a sharded result is used
by each rank for its own part, and the engine treats it as shared (see :mod:`paraxis.placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..placement import REPLICATE, Layout, Partial, Placement, Replicate, Shard


class Free:
    """Stands for the placement of a parameter that nothing has fixed yet: it takes whatever a strategy asks for."""

    def __repr__(self) -> str:
        return "FREE"


FREE = Free()
Given = Placement | Free


@dataclass(frozen=True)
class Tensor:
    """A tensor argument in an operator call: its position among the tensor inputs, shape and dtype."""

    index: int
    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Call:
    """One operator call: the target and its arguments, tensors replaced by :class:`Tensor`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layouts: dict[tuple[int, int], tuple[Layout, ...]] = field(default_factory=dict)
    """Candidate layouts of (input, dimension) for parameters, from how their products are used later."""
    world: int = 1

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def out(self) -> Tensor:
        return self.outputs[0]


Localize = Callable[[Any, list[Any], dict[str, Any], int], tuple[Any, list[Any], dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class Strategy:
    """One way to run an operator on shards.

    ``localize(target, args, kwargs, rank)`` turns the global call into the local one (sizes made local, another
    function substituted); without it the call stays as it is.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    localize: Localize | None = None
    kind: str = ""
    """What the strategy is called in plans, for layers: "column", "row", "vocab"."""

    @property
    def is_sharded(self) -> bool:
        return not all(isinstance(p, Replicate) for p in self.outputs)


Rule = Callable[[Call, Sequence[Given]], Iterable[Strategy]]

_rules: dict[Any, Rule] = {}
_accepts_free: set[Any] = set()


def register(*targets: Any, free: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators, given as overloads or as packets (all their overloads).

    ``free=True`` says that the rule handles :data:`FREE` inputs itself; otherwise it is called once for every
    candidate placement of a parameter.
    """

    def decorate(rule: Rule) -> Rule:
        for target in targets:
            for overload in _overloads(target):
                _rules[overload] = rule
                if free:
                    _accepts_free.add(overload)
        return rule

    return decorate


def _overloads(target: Any) -> Iterator[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        for name in target.overloads():
            yield getattr(target, name)
    else:
        yield target


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator, or None: then it is computed whole."""
    if getattr(target, "pointwise", False) is True:  # a function with its own backward, elementwise in both
        target = torch.ops.aten.relu.default
    return _rules.get(target)


def accepts_free(target: Any) -> bool:
    return target in _accepts_free


def replicated(call: Call) -> Strategy:
    """Everything whole: always correct."""
    return Strategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


def is_shard(placement: Given) -> bool:
    return isinstance(placement, Shard)


def is_partial(placement: Given) -> bool:
    return isinstance(placement, Partial)


def draws(call: Call) -> bool:
    """Whether the call draws random numbers: ranks that hold the same elements would draw different ones."""
    target = call.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(call.arg(4, "dropout_p", 0.0))
    if target._schema.name in ("aten::dropout", "aten::native_dropout", "aten::feature_dropout"):
        return bool(call.arg(1, "p")) and call.arg(2, "train") is not False
    return True


def layouts_on(call: Call, given: Sequence[Given], index: int, dim: int) -> list[Layout]:
    """The layouts that an input may have on ``dim``: the one it has, if that is all that is sharded, or any candidate
    while it is free."""
    placement = given[index]
    if isinstance(placement, Free):
        return list(call.layouts.get((index, dim), ()))
    return [placement.dims[dim]] if isinstance(placement, Shard) and list(placement.dims) == [dim] else []


def normalize_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def unshardable(placement: Placement, dims: Iterable[int]) -> bool:
    """Whether the placement shards one of ``dims``, on which the operator needs everything."""
    return isinstance(placement, Shard) and any(d in placement.dims for d in dims)


def is_one(size: Any) -> bool:
    """Whether a size is one. A symbol may stand for a number that only the data knows, and must not be asked."""
    return isinstance(size, int) and size == 1


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same symbol."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    a, b = getattr(a, "node", a), getattr(b, "node", b)
    return str(getattr(a, "expr", a)) == str(getattr(b, "expr", b))
