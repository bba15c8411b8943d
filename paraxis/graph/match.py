"""Patterns of operators as data: what a subgraph looks like, with names for what a rewrite needs of it.

    X, COS = Capture("x"), Capture("cos")
    SCALED = Op(aten.mul.Tensor, X, COS, commutes=True)
    match(SCALED, node)  # {"x": ..., "cos": ...}, or None

A pattern describes a node by its operator and its arguments, which are patterns in turn. Lists match lists of the same
length, and any other value matches its equals. A name stands for one value: where it occurs again, the same node must
be there. Matching backtracks: :func:`matches` yields every way to match, so that a caller can go on to the next
one where a condition of its own does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

Captures = dict[str, Any]
"""What the names of a pattern stand for: nodes, or constants of the program."""


class Pattern:
    """What an argument of a node may be. Constants and lists are patterns too, without being of this class."""

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """Every way in which the value matches: ``known`` and the names that matching adds."""
        raise NotImplementedError


def matches(pattern: Any, value: Any, known: Captures | None = None) -> Iterator[Captures]:
    """Every way in which a value matches a pattern, with the names of ``known`` fixed beforehand."""
    known = known or {}
    if isinstance(pattern, Pattern):
        yield from pattern.find(value, known)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from _each(pattern, value, known)
    elif _is_same(pattern, value):
        yield known


def match(pattern: Any, value: Any, known: Captures | None = None) -> Captures | None:
    """The first way in which a value matches a pattern; None if it does not."""
    return next(matches(pattern, value, known), None)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values are the same node, or equal constants."""
    return a is b or (not (isinstance(a, Node) or isinstance(b, Node)) and bool(a == b))


def _each(patterns: Sequence[Any], values: Sequence[Any], known: Captures) -> Iterator[Captures]:
    """Every way in which all values match their patterns, the first value first."""
    if not patterns:
        yield known
        return
    for found in matches(patterns[0], values[0], known):
        yield from _each(patterns[1:], values[1:], found)


@dataclass(frozen=True)
class Where(Pattern):
    """A value for which a predicate holds and that matches another pattern, by default any."""

    test: Callable[[Any], bool]
    pattern: Any = None

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """As the inner pattern, if the predicate holds."""
        if self.test(value):
            yield from [known] if self.pattern is None else matches(self.pattern, value, known)


ANY = Where(lambda value: True)
"""Any value."""
FALSY = Where(lambda value: not value)
"""None, zero, False or an empty list: an option that is off."""
NODE = Where(lambda value: isinstance(value, Node))
"""A result of the program, and no constant."""


@dataclass(frozen=True)
class Capture(Pattern):
    """A value with a name. The same name stands for the same value in the entire pattern."""

    name: str
    pattern: Any = ANY

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """As the inner pattern; if the name is known already, the value must be the same."""
        if self.name in known:
            if _is_same(known[self.name], value):
                yield known
        else:
            yield from matches(self.pattern, value, {**known, self.name: value})


class AnyOf(Pattern):
    """One of several patterns, tried in order."""

    def __init__(self, *patterns: Any) -> None:
        self.patterns = patterns

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """Every way in which one of them matches."""
        for pattern in self.patterns:
            yield from matches(pattern, value, known)


@dataclass(frozen=True)
class Via(Pattern):
    """A value that leads to another one which matches: ``Via(without_casts, X)`` is X, cast or not."""

    step: Callable[[Any], Any]
    pattern: Any

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """Every way in which the other value matches."""
        yield from matches(self.pattern, self.step(value), known)


@dataclass(frozen=True)
class Arg(Pattern):
    """An argument that a call may leave out, which is ``default`` then, or pass by name unless ``keyword`` is None."""

    keyword: str | None
    pattern: Any = ANY
    default: Any = None

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """As the inner pattern."""
        yield from matches(self.pattern, value, known)


class Op(Pattern):
    """A call of an operator, or of one of several, with these arguments and no others.

    Args:
        targets: The operator, or a tuple of them.
        args: A pattern for every argument. The last ones may be :class:`Arg`.
        commutes: The two arguments may be in either order.
        users: How many nodes use the result, if that matters.
        ignore: Keyword arguments that may be anything.
    """

    def __init__(
        self,
        targets: Any,
        *args: Any,
        commutes: bool = False,
        users: int | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args, self.commutes, self.users = args, commutes, users
        self.keywords = {*ignore, *(arg.keyword for arg in args if isinstance(arg, Arg))}

    def find(self, value: Any, known: Captures) -> Iterator[Captures]:
        """Every way in which the arguments match."""
        if not isinstance(value, Node) or value.op != "call_function" or value.target not in self.targets:
            return
        if self.users is not None and len(value.users) != self.users:
            return
        values = self._arguments(value)
        if values is None:
            return
        yield from _each(self.args, values, known)
        if self.commutes:
            yield from _each(self.args, values[::-1], known)

    def _arguments(self, node: Node) -> list[Any] | None:
        """A value for every pattern of an argument; None if the call has too few or others."""
        if len(node.args) > len(self.args) or not self.keywords.issuperset(node.kwargs):
            return None
        values = list(node.args)
        for pattern in self.args[len(values) :]:
            if not isinstance(pattern, Arg):
                return None
            values.append(node.kwargs.get(pattern.keyword or "", pattern.default))
        return values
