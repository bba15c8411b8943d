"""Sample calls that nobody wrote by hand: from operator schemas, or recorded from torch's operator database (op_db)."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ...compat.torch import OpOverload, TorchDispatchMode, operator_database, overload_of, schema_of
from ..base import Sample
from .run import tensors_in

Shapes = Sequence[Sequence[int]]

_SCALARS = {"number": 2, "Scalar": 2, "int": 1, "SymInt": 1, "float": 0.5, "bool": False, "str": "none"}


# -- from a schema, for pointwise operators ------------------------------------------------------------------------


def from_schema(op: Any, shapes: Shapes, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an operator: tensors of these shapes in turn, small numbers for the other required ones."""
    turn = iter([*shapes, *[shapes[-1]] * 8])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema_of(op).arguments:
        kind = str(argument.type)
        if argument.has_default_value() and kind != "Tensor":
            if not argument.kwarg_only:
                break
            continue
        if kind == "Tensor":
            value: Any = random_tensor(next(turn), dtype)
        elif kind in _SCALARS:
            value = _SCALARS[kind]
        elif kind.startswith("Optional"):
            value = None
        else:
            raise NotImplementedError(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Values inside most functions' domains, all different."""
    if dtype == torch.bool:
        return torch.rand(tuple(shape)) > 0.5
    if dtype.is_floating_point:
        return torch.rand(tuple(shape), dtype=dtype) * 0.8 + 0.1
    if dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype)
    return torch.randint(1, 7, tuple(shape), dtype=dtype)


def working_call(op: Any, shapes: Shapes) -> tuple[list[Any], dict[str, Any]] | None:
    """A call of the operator that runs, with the first dtype it supports."""
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float32, torch.complex128):
        try:
            args, kwargs = from_schema(op, shapes, dtype)
            results = op(*args, **kwargs)
        except Exception:
            continue
        if tensors_in(results):
            return args, kwargs
    return None


def pointwise_overloads(rules: Iterable[Any]) -> Iterator[Any]:
    """The operators among the registered ones that torch tags as pointwise."""
    for op in rules:
        if isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags:
            yield op


# -- from a schema, for any operator -------------------------------------------------------------------------------

SIZES = (3, 4, 6, 12)
"""Sizes of dimensions. All different; the last, which numbers of heads must divide, has many divisors."""
NUMBERS = (4, 3, 6, 2, 1, 0)
"""Values for integer arguments."""
MAX_CALLS = 20
"""How many calls of an operator are returned, without and with its optional tensors."""


def schema_samples(target: Any) -> list[Sample]:
    """Calls of an operator from its schema alone: whatever runs, of many shapes, integers and flags.

    Tensors have shapes that operators usually take together: all equal, matrices that can be multiplied, vectors along
    the last or the first dimension of the first. Every call of this function draws new values.
    """
    target = overload_of(target)
    arguments = schema_of(target).arguments
    kinds = [str(a.type) for a in arguments]
    optional = {k for k, kind in enumerate(kinds) if kind == "Optional[Tensor]"}
    found: list[Sample] = []
    for passed in (set(), optional) if optional else (set(),):
        tensors = [k for k, kind in enumerate(kinds) if kind == "Tensor" or k in passed]
        by_shape = [calls for shapes in _shapes(len(tensors)) if (calls := _variants(target, tensors, shapes))]
        rounds = max(map(len, by_shape), default=0)
        # One of each shape, then another of each, with other integers than for the shapes before.
        mixed = [
            calls[(p + k) % len(calls)] for k in range(rounds) for p, calls in enumerate(by_shape) if k < len(calls)
        ]
        found += mixed[:MAX_CALLS]
    return found


def _variants(target: Any, tensors: Sequence[int], shapes: Shapes) -> list[Sample]:
    """Calls with tensors of these shapes, in the first dtypes that the operator supports."""
    arguments = schema_of(target).arguments
    for dtypes in _dtypes(len(tensors)):
        found = []
        for values in _numbers(arguments):
            drawn = {k: random_tensor(s, d) for k, s, d in zip(tensors, shapes, dtypes)}
            call = _call(target, arguments, {**values, **drawn})
            if call is not None:
                found.append(call)
        if found:
            return found
    return []


def _shapes(count: int) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes for ``count`` tensors, the most common ones first."""
    if count == 0:
        return []
    found: list[tuple[tuple[int, ...], ...]] = [(SIZES[-ndim:],) * count for ndim in (3, 2, 4, 1)]
    if count in (2, 3):
        bias = ((12,),) * (count - 2)
        pairs = [((4, 6), (6, 12)), ((4, 6), (12, 6)), ((3, 4, 6), (12, 6)), ((3, 4, 6), (3, 6, 12))]
        found += [(*pair, *bias) for pair in pairs]
    for ndim in (3, 2, 4):
        full = SIZES[-ndim:]
        forms = [full, full[-1:], full[:1], (*full[:-1], 1)]
        for rest in itertools.product(forms, repeat=min(count - 1, 2)):
            found.append((full, *rest, *[(rest or (full,))[-1]] * (count - 1 - len(rest))))
    # The same with one size for all: lines that only hold because sizes differ fail there.
    equal = [tuple((6,) * len(shape) for shape in shapes) for shapes in found]
    return list(dict.fromkeys(shapes for pair in zip(found, equal) for shapes in pair))


def _dtypes(count: int) -> list[tuple[torch.dtype, ...]]:
    """Dtypes for ``count`` tensors, the most common ones first."""
    real, integer = torch.float64, torch.int64
    mixed = [tuple(integer if k == i else real for k in range(count)) for i in range(count)] if count > 1 else []
    return [(real,) * count, *mixed, (torch.float32,) * count, (integer,) * count]


def _numbers(arguments: Any) -> list[dict[int, Any]]:
    """Values for integer and boolean arguments: all equal first, then different ones."""
    integers = [k for k, a in enumerate(arguments) if str(a.type) in ("int", "SymInt")]
    flags = [k for k, a in enumerate(arguments) if str(a.type) == "bool"]
    equal = [(n,) * len(integers) for n in NUMBERS]
    others = list(itertools.product((4, 2, 1), repeat=min(len(integers), 3))) if len(integers) > 1 else []
    defaults = [tuple(a.default_value if a.has_default_value() else 4 for a in (arguments[k] for k in integers))]
    found = []
    for values in dict.fromkeys([*defaults, *equal, *others] if integers else [()]):
        padded = [*values, *[values[-1]] * (len(integers) - len(values))] if integers else []
        for on in itertools.product((False, True), repeat=min(len(flags), 3)):
            found.append({**dict(zip(integers, padded)), **dict(zip(flags, on))})
    return found


def _call(target: Any, arguments: Any, values: dict[int, Any]) -> Sample | None:
    """The call with these values by position, if it runs and its results vary: constants prove nothing."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for k, argument in enumerate(arguments):
        if k in values:
            value = values[k]
        elif argument.has_default_value():
            value = argument.default_value
        elif str(argument.type).startswith("Optional"):
            value = None
        elif str(argument.type) in _SCALARS:
            value = _SCALARS[str(argument.type)]
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        results = tensors_in(target(*args, **kwargs))
    except Exception:
        return None
    varied = all(t.numel() and len(t.unique()) > t.numel() // 4 for t in results)
    return Sample(target, tuple(args), kwargs) if results and varied else None


# -- recorded ------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Records a few calls of every operator of interest, as they reach the dispatcher."""

    def __init__(self, interesting: Any, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.interesting, self.limit = interesting, limit
        self.calls: dict[Any, list[Sample]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.interesting and len(self.calls[func]) < self.limit:
            tensors = tensors_in((args, kwargs))
            plain = all(x.layout is torch.strided and 0 < x.numel() < 3000 for x in tensors)
            if tensors and plain and max(x.ndim for x in tensors) >= 2:
                self.calls[func].append(Sample(func, args, kwargs))
        return func(*args, **kwargs)


def recorded_calls(operators: Iterable[Any], limit: int = 2) -> dict[Any, list[Sample]]:
    """Calls of these operators in torch's operator database, on tensors of at least two dimensions."""
    own = {op for op in operators if isinstance(op, OpOverload)}
    interesting = {op for op in own if torch.Tag.nondeterministic_seeded not in op.tags}
    recorder = _Recorder(interesting, limit)
    stand_in: Any = None
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")  # torch's test utilities import it, the database does not need it
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        with ThreadPoolExecutor(1) as thread:  # the database inspects the stack often: faster on a short one
            thread.submit(_record, recorder).result()
    finally:
        if stand_in is not None:
            del sys.modules["expecttest"]
    return {op: calls for op, calls in recorder.calls.items() if calls}


def _record(recorder: _Recorder) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operator_database():
            if torch.float64 not in op.dtypes:
                continue
            try:
                for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 4):
                    with recorder:
                        op.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                continue  # an operator that does not run here gives no samples
