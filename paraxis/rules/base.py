"""What a rule is: how placements propagate through an operator.

A rule takes an operator call (global shapes and arguments) and the current placements of its inputs. It returns the
combinations of input and output placements under which running the operator on the shards gives the shards of the
result. Each combination is a :class:`Strategy`. Running everything replicated is always allowed, so a rule only adds to
that; the inputs of an operator without a rule are gathered, and it runs replicated.

Rules are about *values*. Gradients need no rule: where a strategy has a sharded result, each rank uses a replicated
input for its own part of the work, and the engine treats that input as shared (see :mod:`paraxis.placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..compat.torch import OpOverload, schema_or_none
from ..placement import REPLICATE, Layout, Partial, Placement, Replicate, Shard


class Unplaced:
    """Stands for the placement of a parameter that is not placed yet: it takes whatever a strategy asks for."""

    def __repr__(self) -> str:
        return "UNPLACED"


UNPLACED = Unplaced()
"""The only instance."""
InputPlacement = Placement | Unplaced
"""The current placement of an input."""


@dataclass(frozen=True)
class Tensor:
    """A tensor argument in an operator call: its position among the tensor inputs, shape and dtype.

    ``itemsize``: the bytes of an element in memory, where they are not those of the dtype (a quantized parameter).
    """

    index: int
    shape: tuple[Any, ...]
    dtype: torch.dtype
    itemsize: float | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
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
    """Candidate layouts of (input, dimension) for parameters, from how later operators use the results."""
    world: int = 1

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outputs[0]

    @property
    def op_name(self) -> str:
        """The name of the operator without its overload, and without ``aten::``; empty for a Python function."""
        schema = schema_or_none(self.target)
        return "" if schema is None else str(schema.name).removeprefix("aten::")


LocalCall = tuple[Any, list[Any], dict[str, Any]]
"""The call one rank makes: (target, args, kwargs)."""
Localize = Callable[[Any, list[Any], dict[str, Any], int], LocalCall]
"""From (target, args, kwargs) of the global call and a rank to the call of that rank."""


@dataclass(frozen=True, eq=False)
class Strategy:
    """One way to run an operator on shards.

    ``localize(target, args, kwargs, rank)`` rewrites the global call into the local one (local sizes, another
    function); without it every rank makes the same call on its shards.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    localize: Localize | None = None
    kind: str = ""
    """The name of the strategy in plans, for layers: "column", "row", "vocab"."""

    @property
    def is_sharded(self) -> bool:
        """Whether a result is not replicated."""
        return not all(isinstance(p, Replicate) for p in self.outputs)


Rule = Callable[[Call, Sequence[InputPlacement]], Iterable[Strategy]]
"""``rule(call, placements)``: the strategies for a call whose inputs are placed like this."""


class Sample(NamedTuple):
    """A call with real tensors, on which the strategies of a rule are run and compared with the unsharded operator."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def sample(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A call to check a rule on, written like the call itself: ``sample(torch.ops.my.gate.default, a, b)``.

    Use float64 tensors, which are compared strictly, and dimensions of different sizes of four or more, which can be
    sharded in more ways.
    """
    return Sample(target, args, kwargs)


Structures = dict[tuple[int, int], list[tuple[tuple[int, int], ...]]]
"""For (input, dimension): the ways it may be split, each as (size, indivisible unit) per segment."""

Samples = str | Iterable[Sample] | Callable[[], Iterable[Sample]]
"""Sample calls, a function that returns them, or the name of a family of them in ``rules/validation``."""


def replicated(call: Call) -> Strategy:
    """Everything replicated: always correct."""
    return Strategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


def is_shard(placement: InputPlacement) -> bool:
    """Whether a placement is a shard, of no dimension too."""
    return isinstance(placement, Shard)


def is_partial(placement: InputPlacement) -> bool:
    """Whether a placement is partial."""
    return isinstance(placement, Partial)


def draws(call: Call) -> bool:
    """Whether the call draws random numbers: ranks that hold the same elements would draw different ones."""
    target = call.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(call.arg(4, "dropout_p", 0.0))
    if call.op_name in ("dropout", "native_dropout", "feature_dropout"):
        return bool(call.arg(1, "p")) and call.arg(2, "train") is not False
    return True


def layouts_on(call: Call, placements: Sequence[InputPlacement], index: int, dim: int) -> list[Layout]:
    """The layouts that an input may have on ``dim``.

    For a placed input, the one it has, if no other dimension is sharded; for an unplaced one, all candidates.
    """
    placement = placements[index]
    if isinstance(placement, Unplaced):
        return list(call.layouts.get((index, dim), ()))
    return [placement.dims[dim]] if isinstance(placement, Shard) and list(placement.dims) == [dim] else []


def normalize_dim(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a negative one counts from the end."""
    return dim + ndim if dim < 0 else dim


def is_one(size: Any) -> bool:
    """Whether a size is the number one. False for a symbol: comparing one may guard, or fail if the data decides it."""
    return isinstance(size, int) and size == 1


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same symbol."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    a, b = getattr(a, "node", a), getattr(b, "node", b)
    return str(getattr(a, "expr", a)) == str(getattr(b, "expr", b))
