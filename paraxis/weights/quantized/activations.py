"""Quantized inputs of linear layers: formats whose values were chosen for layers that round their inputs too.

The input is rounded to the numbers of a format and back before the linear layer, as the unsharded model does. It is
written with ordinary operators, so that ranks that hold some columns of an input agree on the scale of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError

CHUNK = 16
"""Columns whose largest values are taken first: a shard of inputs has complete ones."""
BUFFERS = {"scale": "input_scale", "zero": "input_zero_point", "global_scale": "input_global_scale"}


@dataclass(frozen=True)
class InputQuantization:
    """How inputs are rounded.

    Attributes:
        bits: Of a code.
        floating: Whether codes are numbers of float8 or FP4, otherwise integers.
        symmetric: Whether there is no zero point.
        group: The columns that have one scale: 0 for all of a row, -1 for all of the input.
        dynamic: Whether scales are those of each input; otherwise they are in the checkpoint.
        rounds_scales: Whether scales of groups are rounded to float8, after a number in the checkpoint.
        outliers: With ``through``, columns with a value of at least this size are not rounded; 0 if all are.
        through: The dtype that inputs are converted to before they are rounded to integers of -127 to 127.
        ceiling: The largest value of a row that counts for its scale; 0 if any does.
        reciprocal: Whether inputs are multiplied by the inverse of the scale, which rounds otherwise than dividing.
    """

    bits: int = 8
    floating: bool = True
    symmetric: bool = True
    group: int = 0
    dynamic: bool = True
    rounds_scales: bool = False
    outliers: float = 0.0
    through: str = ""
    ceiling: float = 0.0
    reciprocal: bool = False

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest code."""
        if self.floating:
            largest = torch.finfo(torch.float8_e4m3fn).max if self.bits == 8 else 6.0
            return -largest, largest
        return float(-(1 << (self.bits - 1))), float((1 << (self.bits - 1)) - 1)

    @property
    def needs(self) -> tuple[str, ...]:
        """The buffers that it has."""
        if self.rounds_scales:
            return ("global_scale",)
        return () if self.dynamic else ("scale",) if self.symmetric else ("scale", "zero")


def quantize_inputs(
    x: torch.Tensor,
    how: InputQuantization,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x``, rounded to numbers that the format has."""
    if how.through:
        return _beside_outliers(x, how)
    shape, (low, high) = x.shape, how.limits
    if how.group > 0:
        x = x.unflatten(-1, (-1, how.group))
    if how.dynamic:
        scale, zero = _scales(x, how, global_scale)
    assert scale is not None
    if global_scale is not None:
        scale = scale / global_scale
    codes = x * (1.0 / scale) if how.reciprocal else x / scale
    if zero is not None:
        codes = codes + zero.to(x.dtype)
    codes = codes.clamp(low, high)
    if how.floating:
        codes = codes.to(torch.float8_e4m3fn).to(x.dtype) if how.bits == 8 else _round_to_fp4(codes)
    else:
        codes = codes.round()
    if zero is not None:
        codes = codes - zero.to(x.dtype)
    return (codes * scale).to(x.dtype).reshape(shape)


def _beside_outliers(x: torch.Tensor, how: InputQuantization) -> torch.Tensor:
    """Rows are rounded to integers of -127 to 127, but for columns that have an outlier in some row."""
    values = x.to(getattr(torch, how.through)).to(torch.float32)
    large = values.abs() >= (how.outliers or torch.inf)
    columns = large.reshape(-1, large.shape[-1]).any(0)
    inside = torch.where(large, 0.0, values)
    scale = _reduce(inside.abs(), torch.amax, how) / 127
    codes = (inside / torch.where(scale == 0, 1.0, scale)).round()
    return torch.where(columns, x, (codes * scale).to(x.dtype))


def _scales(
    x: torch.Tensor, how: InputQuantization, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    low, high = how.limits
    if how.symmetric:
        largest = _reduce(x.abs(), torch.amax, how)
        scale, zero = (largest.clamp(max=how.ceiling) if how.ceiling else largest) / ((high - low) / 2), None
    else:
        least, most = _reduce(x, torch.amin, how).clamp(max=0), _reduce(x, torch.amax, how).clamp(min=0)
        scale = (most - least) / (high - low)
        zero = (low - least / scale).clamp(low, high).nan_to_num(low).round()
    if global_scale is not None:
        scale = (global_scale * scale).clamp(max=448.0).to(torch.float8_e4m3fn).to(x.dtype)
        return torch.where(scale == 0, torch.finfo(torch.float8_e4m3fn).eps, scale), zero
    return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale), zero


def _reduce(x: torch.Tensor, function: Any, how: InputQuantization) -> torch.Tensor:
    """The largest or least value of a group, a row, or all: of short runs of columns first."""
    if how.group > 0:
        return function(x, -1, keepdim=True)  # type: ignore[no-any-return]
    chunk = gcd(x.shape[-1], CHUNK)
    if chunk > 1:
        x = function(x.unflatten(-1, (-1, chunk)), -1)
    x = function(x, -1, keepdim=True)
    return function(x).reshape((1,) * x.dim()) if how.group < 0 else x


def _round_to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Numbers of at most 6 to the nearest of FP4; halfway to the even one."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round() * step


class QuantizesInputs(nn.Module):
    """What a linear layer is when its inputs are quantized; see :func:`quantize_inputs_of`."""

    how_inputs_are_quantized: InputQuantization

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer, with its input rounded."""
        buffers = {name: getattr(self, BUFFERS[name]) for name in self.how_inputs_are_quantized.needs}
        return super().forward(quantize_inputs(input, self.how_inputs_are_quantized, **buffers))  # type: ignore[misc,no-any-return]


_CLASSES: dict[type, type] = {}


def quantize_inputs_of(
    module: nn.Module, name: str, how: InputQuantization, found: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Make a linear layer round its inputs. Its class gets a base class, and it is an instance of the same one still.

    Args:
        module: The layer.
        name: Its name, for errors.
        how: How inputs are rounded.
        found: What the checkpoint has for that: scales of inputs, by suffix.
        device: Where they go.

    Raises:
        CheckpointError: a scale is missing, no number or zero, or there are several.
    """
    for need in how.needs:
        value = found.get(f".{BUFFERS[need]}")
        if value is None or value.numel() != 1:
            what = (
                "is missing in the checkpoint"
                if value is None
                else f"has shape {tuple(value.shape)}, and not one number"
            )
            raise CheckpointError(f"{name}: {BUFFERS[need]}, by which its inputs are quantized, {what}")
        number = value.float().reshape(())
        if not bool(torch.isfinite(number)) or (need != "zero" and float(number) <= 0):
            raise CheckpointError(f"{name}: {BUFFERS[need]}, by which its inputs are quantized, is {float(number)}")
        module.register_buffer(BUFFERS[need], value.reshape(1).to(device), persistent=False)
    kind = type(module)
    if not issubclass(kind, QuantizesInputs):
        if kind not in _CLASSES:
            _CLASSES[kind] = type(kind.__name__, (QuantizesInputs, kind), {"__module__": kind.__module__})
        module.__class__ = _CLASSES[kind]
    module.how_inputs_are_quantized = how  # type: ignore[assignment]
