"""Checks the placement and the strides of sharded inputs (KV caches), instead of guards on each of them.

The compiler expresses sizes and strides by a few symbols, many of them shared: a cache of eight heads has the strides
``(8*r, r, 64, 1)``, and so have those of all layers. Caches that were reordered, cropped or created elsewhere may not
match, and the compiled program would fail with an assertion of its own.
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


class ShardGuard:
    """Whether sharded inputs have the placements and strides that a program was compiled for.

    Args:
        examples: The (fake) sharded inputs that it was compiled for, by their position among its arguments.
    """

    def __init__(self, examples: dict[int, ShardedTensor]) -> None:
        self._select = picker(examples)
        self._specs = [x._spec for x in examples.values()]
        self._strides = StrideGuard([x._local for x in examples.values()])
        self._seen: list[Any] = [_nothing] * len(examples)

    def matches(self, args: tuple[Any, ...]) -> bool:
        """Whether the program can run with these arguments. Objects of the call before are not checked again."""
        tensors = self._select(args)
        if all(map(is_, [ref() for ref in self._seen], tensors)):
            return True
        for x, spec in zip(tensors, self._specs, strict=True):
            if x._spec != spec:
                return False
        if not self._strides.matches([x._local for x in tensors]):
            return False
        self._seen = [weakref.ref(x) for x in tensors]
        return True


class StrideGuard:
    """Sizes and strides of several tensors, as expressions of the same symbols.

    Among tensors whose expressions are equal up to symbols of their own, such as the caches of all layers, only one is
    checked in detail, as long as the others have the same sizes and strides.
    """

    def __init__(self, examples: list[torch.Tensor]) -> None:
        found = [_expressions(x) for x in examples]
        uses = Counter(str(s) for sizes in found for s in _symbols(sizes))
        self._constants = [[(i, n) for i, n in enumerate(sizes) if isinstance(n, int)] for sizes in found]
        self._defined_by: dict[str, tuple[int, int]] = {}  # where the value of a symbol is read: tensor, position
        for k, sizes in enumerate(found):
            for i, n in enumerate(sizes):
                if not isinstance(n, int) and n.is_Symbol:
                    self._defined_by.setdefault(str(n), (k, i))
        self._formulas = [
            [
                (i, _function(n, list(self._defined_by)))
                for i, n in enumerate(sizes)
                if not isinstance(n, int) and self._defined_by.get(str(n)) != (k, i) and _is_known(n, self._defined_by)
            ]
            for k, sizes in enumerate(found)
        ]
        equal: dict[Any, list[int]] = {}
        for k, (x, sizes) in enumerate(zip(examples, found, strict=True)):
            own = sorted((s for s in _symbols(sizes) if uses[str(s)] == 1), key=str)
            renamed = {s: sympy.Symbol(f"own_{i}", integer=True) for i, s in enumerate(own)}
            key = tuple(str(n if isinstance(n, int) else n.xreplace(renamed)) for n in sizes)
            equal.setdefault((key, x.dtype, x.device), []).append(k)
        self._groups = list(equal.values())
        self._kinds = [(x.dtype, x.device) for x in examples]
        self._counts = [len(sizes) for sizes in found]

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors have the dtypes, devices, sizes and strides that the expressions allow."""
        sizes = [(*x.shape, *x.stride()) for x in tensors]
        if [(x.dtype, x.device) for x in tensors] != self._kinds:
            return False
        values = [sizes[k][i] if i < len(sizes[k]) else -1 for k, i in self._defined_by.values()]
        for group in self._groups:
            same = len({sizes[k] for k in group}) == 1
            if not all(self._matches_one(k, sizes[k], values) for k in (group[:1] if same else group)):
                return False
        return True

    def _matches_one(self, k: int, sizes: tuple[int, ...], values: list[int]) -> bool:
        constants, formulas = self._constants[k], self._formulas[k]
        if len(sizes) != self._counts[k] or any(sizes[i] != n for i, n in constants):
            return False
        return all(sizes[i] == formula(*values) for i, formula in formulas)


def _expressions(x: torch.Tensor) -> list[Any]:
    """Sizes and strides; dynamic ones as expressions of the compiler's symbols."""
    sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (*x.shape, *x.stride())]
    return [int(n) if isinstance(n, int) or n.is_number else n for n in sizes]


def _symbols(sizes: list[Any]) -> set[Any]:
    return {s for n in sizes if not isinstance(n, int) for s in n.free_symbols}


def _is_known(expression: Any, names: dict[str, Any]) -> bool:
    """Whether each of its symbols is a size or stride of one of the tensors."""
    return all(str(s) in names for s in expression.free_symbols)


def _function(expression: Any, names: list[str]) -> Any:
    """An expression as a function of these symbols."""
    arguments = [sympy.Symbol(name) for name in names]
    by_name = {s: sympy.Symbol(str(s)) for s in expression.free_symbols}
    return sympy.lambdify(arguments, expression.xreplace(by_name))


def _nothing() -> None:
    return None
