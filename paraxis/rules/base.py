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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..placement import REPLICATE, Layout, Partial, Placement, Replicate, Shard


class Unplaced:
    """Stands for the placement of a parameter that nothing has fixed yet: it takes whatever a strategy asks for."""

    def __repr__(self) -> str:
        return "UNPLACED"


UNPLACED = Unplaced()
InputPlacement = Placement | Unplaced


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


Rule = Callable[[Call, Sequence[InputPlacement]], Iterable[Strategy]]


class Sample(NamedTuple):
    """A call of an operator with real tensors, on which its rule is carried out and compared with the whole."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def sample(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A call to check a rule on, written like the call itself: ``sample(torch.ops.my.gate.default, a, b)``.

    Tensors in float64 show the most, and dimensions of different sizes from four on can be cut in the most ways.
    """
    return Sample(target, args, kwargs)


Structures = dict[tuple[int, int], list[tuple[tuple[int, int], ...]]]
"""For (input, dimension): the ways it may be cut, each as (size, unit that stays together) per segment."""

Samples = str | Iterable[Sample] | Callable[[], Iterable[Sample]]

_rules: dict[Any, Rule] = {}
_accepts_free: set[Any] = set()
_structures: dict[Any, Callable[[Call], Structures]] = {}
_families: dict[Any, str] = {}
"""For operators with a built-in rule, the family of sample calls in ``rules/validation`` that the tests run."""
_built_in = True
"""While the modules of this package register theirs."""


def register(
    *targets: Any, samples: Samples, free: bool = False, structures: Callable[[Call], Structures] | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule for operators, given as overloads or as packets (all their overloads that write nothing).

    ``samples`` are calls of the operators (see :func:`sample`), or a function that returns them. Before it is
    registered, the rule is asked about each of them under many placements, on 2, 3 and 4 ranks; what it offers is
    carried out on shards, and its values and gradients are compared with the whole. :class:`paraxis.UnsoundRuleError`
    is raised, and nothing is registered, if a strategy is wrong, if an overload has no samples, or if no strategy with
    a sharded tensor came out of them. Of operators that draw random numbers (``torch.Tag.nondeterministic_seeded``) the
    values cannot be compared: the shapes are, and no element of a result may live on two ranks.

    The rules of this package name a family of sample calls instead, which the tests run.

    ``free=True`` says that the rule handles :data:`UNPLACED` inputs itself; otherwise it is called once for every
    candidate placement of a parameter. ``structures`` says which inputs can be cut in whole units or segments only, so
    that parameters are cut alike; a table says so itself. A later rule for an operator replaces the earlier one.
    """

    def decorate(rule: Rule) -> Rule:
        overloads = [overload for target in targets for overload in _overloads(target)]
        if not (_built_in and isinstance(samples, str)):
            from .validation.check import prove

            prove(overloads, rule, samples, free)
        for overload in overloads:
            unregister(overload)
            _rules[overload] = rule
            if free:
                _accepts_free.add(overload)
            if isinstance(samples, str):
                _families[overload] = samples
            wanted = structures or getattr(rule, "structures", None)
            if wanted is not None:
                _structures[overload] = wanted
        return rule

    return decorate


register_rule = register


def unregister(target: Any) -> None:
    """Forget the rule of an operator, if it has one: it is computed whole from now on."""
    for overload in _overloads(target):
        _rules.pop(overload, None)
        _families.pop(overload, None)
        _structures.pop(overload, None)
        _accepts_free.discard(overload)


@contextmanager
def temporary_rules() -> Iterator[None]:
    """What is registered or unregistered inside lasts until the end of the block: for tests and for trying."""
    before = dict(_rules), set(_accepts_free), dict(_families), dict(_structures)
    try:
        yield
    finally:
        for registry, saved in zip((_rules, _accepts_free, _families, _structures), before):
            registry.clear()  # type: ignore[attr-defined]
            registry.update(saved)  # type: ignore[attr-defined]


def _overloads(target: Any) -> Iterator[Any]:
    target = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns
    if isinstance(target, torch._ops.OpOverloadPacket):
        for name in target.overloads():
            overload = getattr(target, name)
            if not overload._schema.is_mutable:  # what writes into memory is never asked about
                yield overload
    else:
        yield target


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator, or None: then it is computed whole."""
    return _rules.get(_known(target))


def structures_for(call: Call) -> Structures:
    """What the rule of an operator says about how its inputs must be cut."""
    wanted = _structures.get(call.target)
    return wanted(call) if wanted is not None else {}


def accepts_unplaced(target: Any) -> bool:
    return _known(target) in _accepts_free


def _known(target: Any) -> Any:
    """The operator whose rule it is: of any elementwise one for a function with its own backward that is elementwise in
    both, and for operators that torch calls elementwise but had not loaded when the rules were."""
    if target in _rules:
        return target
    if isinstance(target, torch._ops.OpOverload):
        pointwise = torch.Tag.pointwise in target.tags and not target._schema.is_mutable
    else:
        pointwise = getattr(target, "pointwise", False) is True
    return torch.ops.aten.relu.default if pointwise else target


def replicated(call: Call) -> Strategy:
    """Everything whole: always correct."""
    return Strategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


def is_shard(placement: InputPlacement) -> bool:
    return isinstance(placement, Shard)


def is_partial(placement: InputPlacement) -> bool:
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


def layouts_on(call: Call, given: Sequence[InputPlacement], index: int, dim: int) -> list[Layout]:
    """The layouts that an input may have on ``dim``: the one it has, if that is all that is sharded, or any candidate
    while it is free."""
    placement = given[index]
    if isinstance(placement, Unplaced):
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
