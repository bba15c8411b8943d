"""Functions of integers that run in Python inside a captured graph: positions, offsets and indices of images.

Models compute them from the sizes of images with loops over values, which Dynamo cannot trace, and read no parameters
for them. Such a call is one operator of the graph, that runs the function as it is. Its results have sizes that are
values. transformers collects these functions in ``vision_utils``; positions of tokens are a method of the model. Seen
on transformers 5.17 and 5.22.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .torch import disable_dispatch_modes

__all__ = ["HOST_FUNCTION", "HostFunctionError", "capture_host_functions"]

Size = int | str
"""A size of a result: a number, or a name for one that is a value."""

Result = tuple[tuple[Size, ...], torch.dtype]


class HostFunctionError(RuntimeError):
    """A function has results of other shapes than its captured call says."""


# -- the operator --------------------------------------------------------------------------------------------------


class _Call:
    """A call of a function: its results, the names of its tensor arguments, and its other arguments."""

    def __init__(self, function: _Function, names: tuple[str, ...], constants: dict[str, Any]) -> None:
        self.function, self.names, self.constants = function, names, constants

    def results(self, tensors: Sequence[Tensor]) -> list[Result]:
        """The sizes and dtypes of what the function returns for these."""
        return self.function.describe(self._arguments(tensors))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function."""
        result = self.function.plain(**self._arguments(tensors))
        found = [result] if isinstance(result, Tensor) else list(result)
        expected = self.results(tensors)
        for (sizes, _), x in zip(expected, found, strict=True):
            known = [m if isinstance(n, str) else n for n, m in zip(sizes, x.shape, strict=False)]
            if len(sizes) != x.dim() or known != list(x.shape):
                raise HostFunctionError(
                    f"{self.function.plain.__name__} returned a tensor {tuple(x.shape)}, and its graph expects {sizes}"
                )
        device = tensors[0].device
        return [x.to(device, dtype, copy=True) for (_, dtype), x in zip(expected, found, strict=True)]

    def _arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        return {**self.constants, **dict(zip(self.names, tensors, strict=True))}


_calls: dict[int, _Call] = {}
_numbers = itertools.count()


@torch.library.custom_op("paraxis::host_function", mutates_args=())
def host_function(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    """Run the function of a captured call."""
    return _calls[call].run(tensors)


@host_function.register_fake
def _(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    sizes: dict[str, Any] = {}
    context = torch.library.get_ctx()
    found = []
    for shape, dtype in _calls[call].results(tensors):
        for n in shape:
            if isinstance(n, str) and n not in sizes:
                sizes[n] = context.new_dynamic_size()
        size = [sizes[n] if isinstance(n, str) else n for n in shape]
        found.append(tensors[0].new_empty(size, dtype=dtype))
    return found


HOST_FUNCTION = torch.ops.paraxis.host_function.default


# -- which functions -----------------------------------------------------------------------------------------------

Describe = Callable[[dict[str, Any]], list[Result]]


class _Function:
    """A function, what it returns, and the names under which callers may hand in what they have computed already."""

    def __init__(self, plain: Callable[..., Any], describe: Describe, precomputed: tuple[str, ...] = ()) -> None:
        self.plain, self.describe, self.precomputed = plain, describe, precomputed


def _positions(arguments: dict[str, Any]) -> list[Result]:
    return [(("patches", 3 if arguments.get("include_temporal") else 2), torch.int64)]


def _taps(arguments: dict[str, Any]) -> list[Result]:
    count = 4 if arguments.get("mode", "bilinear") == "bilinear" else 16
    return [(("patches", count), torch.int64), (("patches", count), torch.float32)]


FUNCTIONS: dict[str, tuple[Describe, tuple[str, ...]]] = {
    "get_vision_cu_seqlens": (lambda _: [(("sequences",), torch.int32)], ("cu_seqlens",)),
    "get_vision_position_ids": (_positions, ("position_ids",)),
    "get_vision_window_index": (
        lambda _: [(("patches",), torch.int64), (("windows",), torch.int32)],
        ("window_index", "cu_window_seqlens"),
    ),
    "get_vision_interpolation_indices_and_weights": (_taps, ("interp_indices", "interp_weights")),
    "get_vision_nearest_position_ids": (lambda _: [(("patches",), torch.int64)], ("position_ids",)),
}
"""By name: what a function returns, and the names under which a caller may hand in what it has computed already."""

METHOD = "get_rope_index"
"""The method of models that computes the positions of all tokens: (axes, rows, tokens), and an offset of every row."""


def _tokens(plain: Callable[..., Any]) -> Describe:
    """What the method of this class returns."""
    names = inspect.signature(plain).parameters
    text = [name for name in ("input_ids", "mm_token_type_ids", "attention_mask") if name in names]
    axes_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def axes(model: Any) -> int:
        """How many axes positions have: what the method returns for text alone."""
        if model not in axes_of:
            try:
                with disable_dispatch_modes():  # Dynamo's fake tensors have no values
                    passed = dict.fromkeys(text, torch.zeros(1, 2, dtype=torch.int64))
                    axes_of[model] = int(plain(model, **passed)[0].shape[0])
            except Exception:  # it does not take text alone
                axes_of[model] = 3
        return axes_of[model]

    def describe(arguments: dict[str, Any]) -> list[Result]:
        rows, length = arguments["input_ids"].shape
        return [((axes(arguments["self"]), rows, length), torch.int64), ((rows, 1), torch.int64)]

    return describe


_seen: set[str] = set()


def capture_host_functions(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, let these functions of the loaded models run in Python inside the graph."""
    vision = sys.modules.get("transformers.vision_utils")
    for name, module in list(sys.modules.items()):
        if name in _seen or not name.startswith("transformers") or not ("modeling" in name or module is vision):
            continue
        _seen.add(name)
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == "transformers.vision_utils" and key in FUNCTIONS:
                setattr(module, key, _adapted(_Function(value, *FUNCTIONS[key]), applies))
            elif (
                isinstance(value, type)
                and value.__module__ == name
                and isinstance(vars(value).get(METHOD), FunctionType)
            ):
                method = vars(value)[METHOD]
                setattr(value, METHOD, _adapted(_Function(method, _tokens(method)), applies))


def _adapted(function: _Function, applies: Callable[[], bool]) -> Callable[..., Any]:
    names = tuple(inspect.signature(function.plain).parameters)
    plain, precomputed = function.plain, function.precomputed

    @torch.compiler.assume_constant_result
    def number(tensors: tuple[str, ...], constants: tuple[Any, ...], owner: int) -> int:
        call = _Call(function, tensors, dict(constants))
        if owner:
            call.constants["self"] = ctypes.cast(owner, ctypes.py_object).value  # it is alive: its forward is traced
        found = next(_numbers)
        _calls[found] = call
        return found

    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not applies():
            return plain(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        caller = arguments.pop("kwargs", None)
        if caller is not None and any(name in caller for name in precomputed):
            return plain(*args, **kwargs)
        owner = id(arguments.pop("self")) if "self" in arguments else 0  # torch 2.11 takes no objects as constants
        tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        constants = [(name, value) for name, value in arguments.items() if not isinstance(value, Tensor)]
        values = [arguments[name] for name in tensors]
        results = torch.ops.paraxis.host_function(values, number(tuple(tensors), tuple(constants), owner))
        return results[0] if len(results) == 1 else tuple(results)

    return run
