"""Rows that are zero whatever the checkpoint has in them, because the model's class writes zeros there after loading.

``from_pretrained`` lets the class initialize every module once more when the weights are loaded. Parameters that came
from the checkpoint are protected, but a row of one (that of the padding token) is a tensor of its own, without
protection. A model that was trained further has other values there, and its predictions would differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat.transformers import initializers, protected_from_initialization
from ..placement import local_index
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor
from .load import storage_placement

Rows = tuple[int, int]
"""First row, and the one after the last."""


class _WrittenRows(TorchFunctionMode):
    """Notes which rows of parameters are set to zero, and runs nothing on parameters.

    Attributes:
        zeroed: The rows, by the ``id`` of the parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.zeroed: dict[int, list[Rows]] = {}
        self._views: dict[int, tuple[torch.Tensor, int, Rows]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is torch.Tensor.__getitem__ and isinstance(first, ShardedTensor):
            view = torch.empty(0, dtype=first.dtype)
            rows = _rows(args[1], first.shape[0]) if first.ndim else None
            if rows is not None:
                self._views[id(view)] = (view, id(first), rows)
            return view
        if func is torch.Tensor.zero_ and id(first) in self._views:
            _, parameter, rows = self._views[id(first)]
            self.zeroed.setdefault(parameter, []).append(rows)
        if isinstance(first, ShardedTensor) and getattr(func, "__name__", "").endswith("_"):
            return first  # a write
        return func(*args, **(kwargs or {}))


def _rows(index: Any, size: int) -> Rows | None:
    """The rows that an index selects; None for anything but one row and a slice of them."""
    if isinstance(index, int) and -size <= index < size:
        return index % size, index % size + 1
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop, _ = index.indices(size)
        return (start, stop) if start < stop else None
    return None


def mark_zero_rows(model: nn.Module) -> None:
    """Note in the metadata of the (empty, sharded) parameters which rows the model's class sets to zero."""
    with protected_from_initialization(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        written = _WrittenRows()
        for module, initialize in initializers(model):
            with written, suppress(Exception):  # it computes with the values of a parameter, and so writes no zeros
                initialize(module)
    for parameter in model.parameters():
        if id(parameter) in written.zeroed:
            _meta(parameter).zero_rows = tuple(dict.fromkeys(written.zeroed[id(parameter)]))


def zero_rows(parameters: Iterable[nn.Parameter], rank: int) -> None:
    """Set the rows that :func:`mark_zero_rows` has noted to zero in the shards of this rank."""
    with torch.no_grad():
        for parameter in parameters:
            meta, start = _meta(parameter), 0
            if not meta.zero_rows:
                continue
            for first, end in local_index(*_placed(meta, rank))[0]:
                for low, high in meta.zero_rows:
                    if max(low, first) < min(high, end):
                        part = slice(start + max(low, first) - first, start + min(high, end) - first)
                        parameter.local[part] = 0  # type: ignore[attr-defined]
                start += end - first


def _placed(meta: ParameterMeta, rank: int) -> tuple[Any, tuple[int, ...], int]:
    placement, mine = storage_placement(meta, rank)
    return placement, meta.shape, mine


def _meta(parameter: nn.Parameter) -> ParameterMeta:
    return parameter.spec  # type: ignore[attr-defined,no-any-return]
