"""Quantized weights: one logical tensor that is stored as several.

A :class:`QuantizedWeight` says of a parameter how it is encoded and which tensors it consists of; each of these follows
the placement of the parameter by its axes (:mod:`paraxis.placement.blocks`). The shard of a quantized parameter is a
:class:`QuantizedTensor`: it has the shape and dtype of the dequantized shard and the memory of the encoded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ..compat.torch import make_wrapper_subclass, plain_torch_function, pytree, schema_or_none
from ..kernels.quantized import Encoding, Parts
from ..kernels.quantized.encoding import encoding_of
from ..placement import Placement, Shard, local_index, local_shape
from ..placement.blocks import Axis, Run, is_granular, stored_placement

aten = torch.ops.aten
_ops = torch.ops.paraxis


@dataclass(frozen=True)
class Part:
    """One of the tensors of a quantized weight: its dtype and how its dimensions follow those of the weight."""

    dtype: torch.dtype
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(axis.size for axis in self.axes)


@dataclass(eq=False)
class QuantizedWeight:
    """How a parameter is quantized.

    Attributes:
        format: The name of the format, for people.
        encoding: What codes and scales mean.
        shape: The global shape of the parameter.
        transposed: Whether its last two dimensions are ``[in, out]``; the parts have them as ``[out, in]``.
        parts: The tensors it consists of, by their names in :class:`~paraxis.kernels.quantized.Parts`.
        source: What reads and writes it in files; the tensor itself knows nothing of files.
    """

    format: str
    encoding: Encoding
    shape: tuple[int, ...]
    transposed: bool
    parts: dict[str, Part]
    source: Any = field(default=None, repr=False)

    @property
    def row_dim(self) -> int:
        """The dimension of the parameter that is ``out``."""
        return len(self.shape) - (1 if self.transposed else 2)

    @property
    def column_dim(self) -> int:
        """The dimension of the parameter that is ``in``."""
        return len(self.shape) - (2 if self.transposed else 1)

    def placements(self, placement: Placement) -> dict[str, Placement]:
        """The placement of every part, from that of the parameter."""
        return {name: stored_placement(part.axes, placement, self.shape) for name, part in self.parts.items()}

    def nbytes(self, placement: Placement, rank: int) -> int:
        """The memory of the shard of ``rank``."""
        total = 0
        for name, where in self.placements(placement).items():
            part = self.parts[name]
            total += prod(local_shape(where, part.shape, rank)) * part.dtype.itemsize
        return total + sum(4 * self._length(dim, placement, rank) for dim in self.irregular(placement, rank))

    def _length(self, dim: int, placement: Placement, rank: int) -> int:
        return int(local_shape(placement, self.shape, rank)[dim])

    def irregular(self, placement: Placement, rank: int) -> dict[int, list[Run]]:
        """The dimensions of the parameter whose indices in a shard need an index of blocks."""
        index = local_index(placement, self.shape, rank)
        found = {}
        for axis in self.parts["scales"].axes:
            if axis.dim in (self.row_dim, self.column_dim) and axis.block > 1:
                runs = axis.runs(index[axis.dim], self.shape[axis.dim])
                if not axis.is_regular(runs):
                    found[axis.dim] = runs
        return found

    @property
    def units(self) -> dict[int, tuple[int, int]]:
        """By dimension: how many indices cannot be separated, and how many have one scale."""
        rows, columns = self.encoding.block
        return {self.row_dim: (1, rows), self.column_dim: (2 if self.encoding.packed else 1, columns)}

    def problems(self, placement: Placement) -> str:
        """Why a placement is impossible; empty if it is not."""
        if not isinstance(placement, Shard):
            return ""
        unit = 2 if self.encoding.packed else 1
        layout = placement.dims.get(self.column_dim)
        if layout is None or is_granular(layout, self.shape[self.column_dim], unit):
            return ""
        return f"dimension {self.column_dim} is cut inside of a byte of two codes: {placement}"

    def assemble(
        self, tensors: Mapping[str, torch.Tensor], placement: Placement, rank: int, dtype: torch.dtype
    ) -> QuantizedTensor:
        """The shard of ``rank``, from its slices of the parts."""
        device = tensors["codes"].device
        found: dict[str, torch.Tensor] = dict(tensors)
        for dim, runs in self.irregular(placement, rank).items():
            name = "rows" if dim == self.row_dim else "columns"
            block = self.encoding.block[0 if name == "rows" else 1]
            found[name] = block_index(runs, block).to(device)
        shape = local_shape(placement, self.shape, rank)
        return QuantizedTensor(Parts(**found), self.encoding, tuple(shape), dtype, self.transposed)


@lru_cache(maxsize=1)
def use_kernels() -> bool:
    """Register what operators on quantized weights run on a GPU; whether there is a compiler for it."""
    try:
        from ..kernels.triton import quantized_operators
    except ImportError:  # without Triton they run operator by operator
        return False
    return quantized_operators is not None


def part_of(weight: QuantizedTensor, name: str) -> torch.Tensor:
    """One of the tensors of a weight. Programs call it."""
    return getattr(weight.parts, name)  # type: ignore[no-any-return]


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that hold the memory of some tensors: of a quantized weight, its parts."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if type(tensor) is QuantizedTensor:
            found += tensor.held
        else:
            found.append(tensor)
    return found


def block_index(runs: Sequence[Run], block: int) -> torch.Tensor:
    """The block of every index of a shard."""
    pieces = [
        torch.arange(run.phase, run.phase + run.length).div(block, rounding_mode="floor") + run.first for run in runs
    ]
    return torch.cat(pieces).to(torch.int32) if pieces else torch.empty(0, dtype=torch.int32)


class QuantizedTensor(torch.Tensor):
    """A weight with the shape and dtype of what it dequantizes to, and the memory of its encoding.

    Matmuls, linear layers, look-ups and views along the stack of experts run on the encoding; for any other operator it
    is dequantized first. It cannot be written to, and gradients flow through it, not into it.
    """

    parts: Parts
    encoding: Encoding
    transposed: bool
    held: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(
        cls, parts: Parts, encoding: Encoding, shape: Sequence[int], dtype: torch.dtype, transposed: bool = False
    ) -> QuantizedTensor:
        tensor: Any = make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=parts.codes.device)
        tensor.parts, tensor.encoding, tensor.transposed = parts, encoding, transposed
        tensor.held = tuple(part for part in parts if part is not None)
        if parts.codes.is_cuda:
            use_kernels()
        return tensor

    @property
    def inputs(self) -> int:
        """The size of the dimension ``in``."""
        return self.shape[-2 if self.transposed else -1]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The memory of the encoding."""
        return self.parts.nbytes

    def dequantized(self) -> torch.Tensor:
        """The plain tensor."""
        weight = _ops.dequantize(*self.parts, self.encoding.key, self.inputs, self.dtype)
        return weight.transpose(-1, -2) if self.transposed else weight

    def with_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """The same encoding, which dequantizes to another dtype."""
        return QuantizedTensor(self.parts, self.encoding, self.shape, dtype, self.transposed)

    def flipped(self) -> QuantizedTensor:
        """The last two dimensions exchanged."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return QuantizedTensor(self.parts, self.encoding, shape, self.dtype, not self.transposed)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"_{name}" for name, _ in self.parts.present()]
        return names, (self.encoding.key, self.dtype, self.transposed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name[1:] in Parts._fields:
            return getattr(self.parts, name[1:])
        raise AttributeError(name)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], spec: Any, size: Any, stride: Any) -> QuantizedTensor:
        key, dtype, transposed = spec
        parts = Parts(**{name[1:]: tensor for name, tensor in inner.items()})
        return QuantizedTensor(parts, encoding_of(key), size, dtype, transposed)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return _clone(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a quantized weight cannot be pickled: save the model and its adapters with save_pretrained, and a "
            "training run with save_state"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, codes={self.parts.codes.dtype})"

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or (_grouped_mm if _is_grouped_mm(func) else None)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if any(isinstance(x, QuantizedTensor) for x in _written(func, args, kwargs)):
            raise RuntimeError(
                "a quantized weight cannot be written to: load the checkpoint without quantization to change it, or "
                "add an adapter (LoRA) beside it"
            )
        args, kwargs = pytree.tree_map(_dequantized, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _dequantized(x: Any) -> Any:
    return x.dequantized() if isinstance(x, QuantizedTensor) else x


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    schema = schema_or_none(func)
    found = []
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return pytree.tree_leaves(found)


# -- operators that run on the encoding ----------------------------------------------------------------------------


def _same(x: QuantizedTensor, *_: Any, **__: Any) -> QuantizedTensor:
    return QuantizedTensor(x.parts, x.encoding, x.shape, x.dtype, x.transposed)


def _clone(x: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return QuantizedTensor(x.parts.map(torch.clone), x.encoding, x.shape, x.dtype, x.transposed)


def _copy(x: QuantizedTensor, **kwargs: Any) -> Any:
    """To another device; to another dtype it is dequantized, since both roundings count."""
    device = kwargs.get("device")
    if kwargs.get("dtype") in (None, x.dtype):
        parts = x.parts.map(lambda t: t.to(device=device) if device is not None else t.clone())
        return QuantizedTensor(parts, x.encoding, x.shape, x.dtype, x.transposed)
    return NotImplemented


def _transpose(x: QuantizedTensor, first: int = 0, second: int = 1) -> Any:
    last = {x.dim() - 1, x.dim() - 2}
    return x.flipped() if {first % x.dim(), second % x.dim()} == last else NotImplemented


def _permute(x: QuantizedTensor, dims: Sequence[int]) -> Any:
    order = [d % x.dim() for d in dims]
    plain = list(range(x.dim()))
    if order == plain:
        return _same(x)
    return x.flipped() if order == [*plain[:-2], plain[-1], plain[-2]] else NotImplemented


def _along_stack(x: QuantizedTensor, dim: int, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A view of some of the weights of a stack."""
    if x.dim() < 3 or dim % x.dim() != 0:
        return NotImplemented
    codes, scales, zeros, rows, columns, factor = x.parts
    found = [None if t is None else function(t) for t in (codes, scales, zeros, factor)]
    parts = Parts(found[0], found[1], found[2], rows, columns, found[3])  # type: ignore[arg-type]
    shape = (*parts.codes.shape[:-2], *x.shape[-2:])
    return QuantizedTensor(parts, x.encoding, shape, x.dtype, x.transposed)


def _select(x: QuantizedTensor, dim: int, index: int) -> Any:
    return _along_stack(x, dim, lambda t: t.select(0, index))


def _slice(x: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return _along_stack(x, dim, lambda t: aten.slice.Tensor(t, 0, start, end, step))


def _unbind(x: QuantizedTensor, dim: int = 0) -> Any:
    if x.dim() < 3 or dim % x.dim() != 0:
        return NotImplemented
    return [_select(x, 0, i) for i in range(x.shape[0])]


def _index_select(x: QuantizedTensor, dim: int, index: torch.Tensor) -> Any:
    return _along_stack(x, dim, lambda t: t.index_select(0, index))


def _index(x: QuantizedTensor, indices: Sequence[Any]) -> Any:
    plain = isinstance(x, QuantizedTensor) and len(indices) == 1 and indices[0] is not None and indices[0].dim() == 1
    return _along_stack(x, 0, lambda t: t[indices[0]]) if plain else NotImplemented


def _view(x: QuantizedTensor, shape: Sequence[int]) -> Any:
    return _same(x) if tuple(shape) == tuple(x.shape) else NotImplemented


def _mm(x: Any, weight: Any) -> Any:
    if isinstance(x, QuantizedTensor) or weight.dim() != 2:
        return NotImplemented
    key = weight.encoding.key
    if weight.transposed:
        return _ops.quantized_linear(x, *weight.parts, key, None)
    return _ops.quantized_mm(x, *weight.parts, key, weight.inputs)


def _addmm(bias: Any, x: Any, weight: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    plain = not isinstance(x, QuantizedTensor) and isinstance(weight, QuantizedTensor) and beta == 1 and alpha == 1
    if not plain or not weight.transposed or bias.dim() != 1:
        return NotImplemented
    return _ops.quantized_linear(x, *weight.parts, weight.encoding.key, bias)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor) or weight.transposed:
        return NotImplemented
    return _ops.quantized_linear(x, *weight.parts, weight.encoding.key, bias)


def _embedding(weight: Any, ids: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Looks rows up in the encoding and dequantizes them alone."""
    if weight.transposed or weight.dim() != 2:
        return NotImplemented
    flat = ids.reshape(-1)
    codes, scales, zeros, rows, columns, factor = weight.parts
    block = (
        (flat if weight.encoding.block[0] == 1 else flat // weight.encoding.block[0]) if rows is None else rows[flat]
    )

    def of_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor.index_select(0, block)

    chosen = Parts(
        codes.view(torch.uint8).index_select(0, flat).view(codes.dtype),
        of_rows(scales),  # type: ignore[arg-type]
        of_rows(zeros),
        None,
        columns,
        None if factor is None else factor.index_select(0, flat),
    )
    encoding = Encoding(**{**vars(weight.encoding), "block": (1, weight.encoding.block[1])})
    found = _ops.dequantize(*chosen, encoding.key, weight.inputs, weight.dtype)
    return found.view(*ids.shape, weight.inputs)


def _grouped_mm(x: Any, weight: Any, ends: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    plain = isinstance(weight, QuantizedTensor) and not isinstance(x, QuantizedTensor) and weight.dim() == 3
    if not plain or ends is None or bias is not None or x.dim() != 2 or out_dtype not in (None, x.dtype):
        return NotImplemented
    key, transposed = weight.encoding.key, weight.transposed
    return _ops.quantized_grouped_mm(x, *weight.parts, key, ends, weight.inputs, transposed)


def _is_grouped_mm(func: Any) -> bool:
    """Whether an operator is the grouped matmul of torch, or the one that transformers has where torch has none."""
    packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return packet is not None and func is packet.default


def _mm_out(x: Any, weight: Any, *, out: torch.Tensor) -> Any:
    result = _mm(x, weight)
    return NotImplemented if result is NotImplemented else out.copy_(result)


def _empty(x: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """A plain tensor like it: nothing has to be dequantized for that."""
    size = args[0] if args and isinstance(args[0], (tuple, list)) else x.shape
    return torch.empty(tuple(size), dtype=kwargs.get("dtype") or x.dtype, device=kwargs.get("device") or x.device)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _copy,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unbind.int: _unbind,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.mm.default: _mm,
    aten.mm.out: _mm_out,
    aten.addmm.default: _addmm,
    aten.linear.default: _linear,
    aten.embedding.default: _embedding,
    aten.new_empty.default: _empty,
    aten.empty_like.default: _empty,
}
if hasattr(aten, "_grouped_mm"):
    _HANDLERS[aten._grouped_mm.default] = _grouped_mm
