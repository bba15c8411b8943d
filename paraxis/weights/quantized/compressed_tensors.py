"""Compressed tensors: integers in 32-bit words, and float8 or int8 as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from .activations import InputQuantization
from .bits import bytes_as_codes, pack_int32, pack_pairs, read_words, unpack_pairs
from .format import COLUMNS, CONSTANT, ROWS, Dim, Format, Index, PartForm, Read, Tensor, reduced_precision
from .fp8 import FLOATS
from .integers import as_blocks, from_blocks, integer_encoding, quantize_integers

SIGN = 128
"""What is added to signed integers of eight bits in a byte."""


def _groups(size: int, group: int) -> int:
    return -(-size // group) if group else 1


@dataclass(frozen=True)
class PackedIntegers(Format):
    """``weight_packed``: integers of four or eight bits in words, row by row; a scale per group of a row, or per row.

    Attributes:
        bits: Of an integer.
        group: How many columns have one scale; 0 for all.
        symmetric: Whether there are no zero points; they are packed along the rows.
        ordered: Whether the groups of columns are in ``weight_g_idx``, where it exists.
        inputs: How inputs of layers are quantized, if they are.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    ordered: bool = False
    inputs: InputQuantization | None = None

    name: ClassVar[str] = "pack-quantized"
    marker: ClassVar[str] = ".weight_packed"
    from_plain: ClassVar[bool] = True

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Groups of columns."""
        return integer_encoding((1, self.group or shape[-1]), self.bits, self.symmetric)

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """Values are computed in the dtype of the scales."""
        return reduced_precision(found[".weight_scale"])

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Codes of four bits are packed in pairs; groups that are not in order are on all ranks."""
        scales = found[".weight_scale"]
        ordered = ".weight_g_idx" in found
        groups = Dim(CONSTANT, size=scales.shape[-1]) if ordered else Dim(COLUMNS, self.group or 1 << 30)
        pair = Dim(COLUMNS, 2) if self.bits == 4 else Dim(COLUMNS)
        forms = {
            "codes": PartForm(torch.uint8 if self.bits == 4 else torch.int8, Dim(ROWS), pair),
            "scales": PartForm(scales.dtype, Dim(ROWS), groups),
        }
        if not self.symmetric:
            forms["zeros"] = PartForm(torch.uint8 if self.bits == 4 else torch.int8, Dim(ROWS), groups)
        if ordered:
            forms["columns"] = PartForm(torch.int32, Dim(CONSTANT), Dim(COLUMNS))
        return forms

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Words, scales, the shape, and what asymmetric and ordered groups add."""
        *stack, rows, columns = shape
        groups, count = _groups(columns, self.group), 32 // self.bits
        found = {
            ".weight_packed": Tensor((*stack, rows, -(-columns // count)), (torch.int32,)),
            ".weight_scale": Tensor((*stack, rows, groups), FLOATS),
            ".weight_shape": Tensor(None, (torch.int64, torch.int32)),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = Tensor((*stack, -(-rows // count), groups), (torch.int32,))
        if self.ordered:
            found[".weight_g_idx"] = Tensor((columns,), (torch.int32, torch.int64), optional=True)
        return found

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """As the checkpoint has it."""
        packed = found[".weight_packed"]
        shape = tuple(int(n) for n in read(".weight_shape", None)) if ".weight_shape" in found else ()
        if len(shape) != 2 or min(shape) < 1:
            raise KeyError(".weight_shape") if not shape else ValueError(f"weight_shape is {shape}")
        return (*packed.shape[:-2], *shape)

    def constants(self) -> tuple[str, ...]:
        """The shape."""
        return (".weight_shape",)

    def new_constants(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The shape."""
        return {".weight_shape": torch.tensor(shape[-2:])}

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """Only the words that have a code of the box are read."""
        if part == "scales":
            return read(".weight_scale", index)
        if part == "columns":
            return read(".weight_g_idx", index).to(torch.int32)
        if part == "zeros":
            codes = read_words(lambda box: read(".weight_zero_point", box), index, self.bits, -2, shape[-2])
            return codes if self.bits == 4 else (codes ^ SIGN).view(torch.int8)
        columns = bytes_as_codes(index[-1], shape[-1]) if self.bits == 4 else index[-1]
        box = (*index[:-1], columns)
        codes = read_words(lambda box: read(".weight_packed", box), box, self.bits, -1, shape[-1])
        return pack_pairs(codes) if self.bits == 4 else (codes ^ SIGN).view(torch.int8)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Packed again."""
        codes = parts["codes"]
        codes = unpack_pairs(codes, shape[-1]) if self.bits == 4 else codes.view(torch.uint8) ^ SIGN
        found = {".weight_packed": pack_int32(codes, self.bits, -1), ".weight_scale": parts["scales"]}
        if not self.symmetric:
            zeros = parts["zeros"] if self.bits == 4 else parts["zeros"].view(torch.uint8) ^ SIGN
            found[".weight_zero_point"] = pack_int32(zeros, self.bits, -2)
        if "columns" in parts:
            found[".weight_g_idx"] = parts["columns"]
        return found

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest, with groups in order."""
        block = (1, self.group or weight.shape[-1])
        codes, scales, zeros = quantize_integers(weight, block, self.bits, self.symmetric)
        offset = 1 << (self.bits - 1)
        found = {
            ".weight_packed": pack_int32((codes.int() + offset).to(torch.uint8), self.bits, -1),
            ".weight_scale": scales,
            **self.new_constants(tuple(weight.shape), weight.dtype),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = pack_int32((zeros.int() + offset).to(torch.uint8), self.bits, -2)
        return found


@dataclass(frozen=True)
class NaiveQuantized(Format):
    """``weight`` of float8 or int8 with ``weight_scale``: one, or one per row, group or block.

    Attributes:
        floating: Whether values are float8, otherwise int8.
        block: Rows and columns that have one scale; 0 for all of them.
        symmetric: Whether there are no zero points.
        inputs: How inputs of layers are quantized, if they are.
    """

    floating: bool = True
    block: tuple[int, int] = (1, 0)
    symmetric: bool = True
    inputs: InputQuantization | None = None

    name: ClassVar[str] = "compressed-tensors"
    marker: ClassVar[str] = ".weight_scale"
    from_plain: ClassVar[bool] = True

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.block[0] or shape[-2], self.block[1] or shape[-1]

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Blocks."""
        return Encoding(block=self._block(shape))

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """Values are computed in the dtype of the scales."""
        return reduced_precision(found[".weight_scale"])

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Values and scales."""
        weight, scales = found[".weight"], found[".weight_scale"]
        rows, columns = self._block(tuple(weight.shape))
        grid = (Dim(ROWS, rows), Dim(COLUMNS, columns))
        forms = {
            "codes": PartForm(weight.dtype, Dim(ROWS), Dim(COLUMNS)),
            "scales": PartForm(scales.dtype, *grid),
        }
        if not self.symmetric:
            forms["zeros"] = PartForm(found[".weight_zero_point"].dtype, *grid)
        return forms

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Values, scales, and perhaps zero points and a scale of the inputs."""
        *stack, rows, columns = shape
        block = self._block(shape)
        grid = None if not any(self.block) else (*stack, -(-rows // block[0]), -(-columns // block[1]))
        values = (torch.float8_e4m3fn, torch.float8_e5m2) if self.floating else (torch.int8,)
        return {
            ".weight": Tensor(shape, values),
            ".weight_scale": Tensor(grid, FLOATS),
            ".weight_zero_point": Tensor(grid, (torch.int8, torch.float8_e4m3fn), optional=self.symmetric),
            ".input_scale": Tensor(None, FLOATS, optional=True),
            ".input_zero_point": Tensor(None, (torch.int8, torch.float8_e4m3fn, *FLOATS), optional=True),
        }

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """That of the values."""
        return tuple(found[".weight"].shape)

    def constants(self) -> tuple[str, ...]:
        """What inputs are multiplied by; zero points of a symmetric format are zeros."""
        zeros = (".weight_zero_point",) if self.symmetric else ()
        return (".input_scale", ".input_zero_point", *zeros)

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """As stored; a scale of the entire weight may have fewer dimensions in the file."""
        suffix = {"codes": ".weight", "scales": ".weight_scale", "zeros": ".weight_zero_point"}[part]
        if part != "codes" and not any(self.block):
            return read(suffix, None).reshape((1,) * len(index))
        return read(suffix, index)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As they are."""
        found = {".weight": parts["codes"], ".weight_scale": parts["scales"]}
        return found | ({".weight_zero_point": parts["zeros"]} if "zeros" in parts else {})

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest value of a block becomes the largest of float8 or int8."""
        shape = tuple(weight.shape)
        block = self._block(shape)
        if not self.floating:
            codes, scales, zeros = quantize_integers(weight, block, 8, self.symmetric)
        else:
            largest = torch.finfo(torch.float8_e4m3fn).max
            tiles = as_blocks(weight, block)
            scales = (tiles.abs().amax((-3, -1)) / largest).to(weight.dtype)
            scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
            scaled = (tiles / scales.float()[..., :, None, :, None]).clamp(-largest, largest)
            codes, zeros = from_blocks(scaled, shape).to(torch.float8_e4m3fn), torch.zeros(())
        found = {".weight": codes, ".weight_scale": scales if any(self.block) else scales.reshape(1)}
        return found | ({} if self.symmetric else {".weight_zero_point": zeros.reshape(found[".weight_scale"].shape)})


def check_group(group: Any, what: str) -> int:
    """A number of columns that have one scale.

    Raises:
        CheckpointError: it is no positive even number.
    """
    if not isinstance(group, int) or group < 1 or (group > 1 and group % 2):
        raise CheckpointError(f"quantization_config: {what}={group!r} is not a positive even number")
    return group
