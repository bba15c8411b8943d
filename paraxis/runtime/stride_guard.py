"""Whether the caches that a compiled program is called with lie in memory as those did that it was compiled for.

The compiler takes sizes and strides for expressions of a few unknowns, many of them shared: a cache of eight heads has
strides ``(8*r, r, 64, 1)``, and so have those of all layers. Whoever brings caches that were reordered, cut or made
elsewhere may break that, and the program would end with an assertion of its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from operator import is_
from typing import Any

import sympy
import torch

from ..tensor.sharded_tensor import ShardedTensor
from .guards import picker


class KnownShards:
    """Whether sharded inputs are sharded, and laid out, as those that a program was compiled for."""

    def __init__(self, examples: dict[int, ShardedTensor]) -> None:
        self._given = picker(examples)
        self._specs = [x._spec for x in examples.values()]
        self._layout = Layout([x._local for x in examples.values()])
        self._seen: list[Any] = [_nothing] * len(examples)

    def fits(self, args: tuple[Any, ...]) -> bool:
        tensors = self._given(args)
        if all(map(is_, [ref() for ref in self._seen], tensors)):
            return True
        for x, spec in zip(tensors, self._specs, strict=True):
            if x._spec != spec:
                return False
        if not self._layout.fits([x._local for x in tensors]):
            return False
        self._seen = [weakref.ref(x) for x in tensors]
        return True


class Layout:
    """Sizes and strides of several tensors, as expressions of the same unknowns.

    Of tensors alike up to unknowns of their own, such as the caches of all layers, one is looked at closely, as long as
    the numbers of the others are the same.
    """

    def __init__(self, examples: list[torch.Tensor]) -> None:
        found = [_expressions(x) for x in examples]
        symbols = Counter(str(s) for numbers in found for s in _symbols(numbers))
        self._constant = [[(i, n) for i, n in enumerate(numbers) if isinstance(n, int)] for numbers in found]
        self._unknown: dict[str, tuple[int, int]] = {}
        for k, numbers in enumerate(found):
            for i, n in enumerate(numbers):
                if not isinstance(n, int) and n.is_Symbol:
                    self._unknown.setdefault(str(n), (k, i))
        self._rules = [
            [
                (i, _function(n, list(self._unknown)))
                for i, n in enumerate(numbers)
                if not isinstance(n, int) and self._unknown.get(str(n)) != (k, i) and _is_told(n, self._unknown)
            ]
            for k, numbers in enumerate(found)
        ]
        alike: dict[Any, list[int]] = {}
        for k, (x, numbers) in enumerate(zip(examples, found, strict=True)):
            own = sorted((s for s in _symbols(numbers) if symbols[str(s)] == 1), key=str)
            renamed = {s: sympy.Symbol(f"own_{i}", integer=True) for i, s in enumerate(own)}
            key = tuple(str(n if isinstance(n, int) else n.xreplace(renamed)) for n in numbers)
            alike.setdefault((key, x.dtype, x.device), []).append(k)
        self._groups = list(alike.values())
        self._kinds = [(x.dtype, x.device) for x in examples]
        self._counts = [len(numbers) for numbers in found]

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        numbers = [(*x.shape, *x.stride()) for x in tensors]
        if [(x.dtype, x.device) for x in tensors] != self._kinds:
            return False
        values = [numbers[k][i] if i < len(numbers[k]) else -1 for k, i in self._unknown.values()]
        for group in self._groups:
            same = len({numbers[k] for k in group}) == 1
            if not all(self._agrees(k, numbers[k], values) for k in (group[:1] if same else group)):
                return False
        return True

    def _agrees(self, k: int, numbers: tuple[int, ...], values: list[int]) -> bool:
        constant, rules = self._constant[k], self._rules[k]
        if len(numbers) != self._counts[k] or any(numbers[i] != n for i, n in constant):
            return False
        return all(numbers[i] == rule(*values) for i, rule in rules)


def _expressions(x: torch.Tensor) -> list[Any]:
    """Sizes and strides, where they may change as expressions of the compiler's unknowns."""
    numbers = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (*x.shape, *x.stride())]
    return [int(n) if isinstance(n, int) or n.is_number else n for n in numbers]


def _symbols(numbers: list[Any]) -> set[Any]:
    return {s for n in numbers if not isinstance(n, int) for s in n.free_symbols}


def _is_told(expression: Any, names: dict[str, Any]) -> bool:
    """Whether all its unknowns are sizes or strides of one of the tensors."""
    return all(str(s) in names for s in expression.free_symbols)


def _function(expression: Any, names: list[str]) -> Any:
    """An expression as a function of these unknowns."""
    arguments = [sympy.Symbol(name) for name in names]
    by_name = {s: sympy.Symbol(str(s)) for s in expression.free_symbols}
    return sympy.lambdify(arguments, expression.xreplace(by_name))


def _nothing() -> None:
    return None
