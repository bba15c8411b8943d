"""FP4 (E2M1), two codes per byte, with a scale per 32 or 16 columns: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from ...kernels.quantized.encoding import FP4
from ...placement import Ranges
from .activations import InputQuantization
from .bits import pack_pairs
from .format import (
    COLUMNS,
    CONSTANT,
    ROWS,
    Dim,
    Format,
    Index,
    PartForm,
    Quantization,
    Read,
    Rule,
    Tensor,
    covering,
    scalar_problem,
)

MX_BLOCK, NV_BLOCK = 32, 16
LARGEST_FP4, LARGEST_FP8 = 6.0, 448.0
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between the numbers: of these, the even ones are rounded down and the odd ones up."""


def to_fp4(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest numbers; halfway between two, of the one whose code is even."""
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for i, middle in enumerate(_BETWEEN):
        code += (size > middle) if i % 2 == 0 else (size >= middle)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def exponents_of(largest: torch.Tensor) -> torch.Tensor:
    """The exponents, with 127 added, by which blocks with these largest values are divided."""
    exponent = torch.floor(torch.log2(largest.clamp(min=torch.finfo(torch.float32).tiny))) - 2
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def quantize_mx(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of two codes, exponents) of blocks of 32 columns."""
    tiles = _blocks(weight, MX_BLOCK)
    exponents = exponents_of(tiles.abs().amax(-1))
    scaled = tiles / torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return pack_pairs(to_fp4(scaled).flatten(-2)[..., : weight.shape[-1]]), exponents


def _blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % block))
    return padded.unflatten(-1, (-1, block))


@dataclass(frozen=True)
class ExpertsMXFP4(Format):
    """``*_blocks`` ``[experts, out, in / 32, 16]`` and ``*_scales``; the parameter is ``[experts, in, out]``."""

    name: ClassVar[str] = "mxfp4"
    marker: ClassVar[str] = "_scales"
    weight: ClassVar[str] = ""
    transposed: ClassVar[bool] = True
    linears: ClassVar[bool] = False

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Blocks of 32 columns."""
        return Encoding(block=(1, MX_BLOCK), table=FP4, exponents=True)

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Codes in pairs, and exponents."""
        return {
            "codes": PartForm(torch.uint8, Dim(ROWS), Dim(COLUMNS, 2)),
            "scales": PartForm(torch.uint8, Dim(ROWS), Dim(COLUMNS, MX_BLOCK)),
        }

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Blocks and scales."""
        *stack, rows, columns = shape
        blocks = -(-columns // MX_BLOCK)
        return {
            "_blocks": Tensor((*stack, rows, blocks, MX_BLOCK // 2), (torch.uint8,)),
            "_scales": Tensor((*stack, rows, blocks), (torch.uint8,)),
        }

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """Columns are a multiple of 32."""
        *rows, blocks, half = found["_blocks"].shape
        return (*rows, blocks * half * 2)

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """Only the blocks that have a byte of the box are read."""
        if part == "scales":
            return read("_scales", index)
        blocks, chosen = _bytes_in_blocks(index[-1], shape[-1])
        found = read("_blocks", (*index[:-1], blocks, ((0, MX_BLOCK // 2),))).flatten(-2)
        return found if len(chosen) == found.shape[-1] else found.index_select(-1, chosen)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """In blocks again."""
        return {"_blocks": parts["codes"].unflatten(-1, (-1, MX_BLOCK // 2)), "_scales": parts["scales"]}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest, with the exponent of the largest of a block."""
        codes, exponents = quantize_mx(weight)
        return {"_blocks": codes.unflatten(-1, (-1, MX_BLOCK // 2)), "_scales": exponents}


def _bytes_in_blocks(ranges: Ranges, columns: int) -> tuple[Ranges, torch.Tensor]:
    return covering(ranges, MX_BLOCK // 2, columns // 2)


@dataclass(frozen=True)
class PackedFP4(Format):
    """``weight_packed``: FP4 in pairs; ``weight_scale``: exponents per 32 columns, or float8 per 16 columns.

    Attributes:
        nvidia: Whether scales are float8, and divided by the number in ``weight_global_scale``.
        inputs: How inputs of layers are quantized, if they are.
    """

    nvidia: bool = False
    inputs: InputQuantization | None = None

    name: ClassVar[str] = "fp4-pack-quantized"
    marker: ClassVar[str] = ".weight_packed"
    zero_scales: ClassVar[bool] = True

    @property
    def block(self) -> int:
        """Columns that have one scale."""
        return NV_BLOCK if self.nvidia else MX_BLOCK

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Blocks of columns."""
        return Encoding(block=(1, self.block), table=FP4, exponents=not self.nvidia)

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """The library computes values in bfloat16, in which those of MXFP4 are exact."""
        return "bfloat16" if self.nvidia else ""

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Codes in pairs, scales, and what all scales of a row are multiplied by."""
        forms = {
            "codes": PartForm(torch.uint8, Dim(ROWS), Dim(COLUMNS, 2)),
            "scales": PartForm(found[".weight_scale"].dtype, Dim(ROWS), Dim(COLUMNS, self.block)),
        }
        return forms | ({"factor": PartForm(torch.float32, Dim(ROWS), Dim(CONSTANT))} if self.nvidia else {})

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Bytes, scales, and the numbers that all scales, and inputs, are divided by."""
        *stack, rows, columns = shape
        found = {
            ".weight_packed": Tensor((*stack, rows, -(-columns // 2)), (torch.uint8,)),
            ".weight_scale": Tensor(
                (*stack, rows, -(-columns // self.block)), (torch.float8_e4m3fn if self.nvidia else torch.uint8,)
            ),
            ".input_global_scale": Tensor(None, (torch.float32,), optional=True),
        }
        return found | ({".weight_global_scale": Tensor(None, (torch.float32,))} if self.nvidia else {})

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """Two columns per byte."""
        *rows, half = found[".weight_packed"].shape
        return (*rows, 2 * half)

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """The number that scales are divided by is one that can be divided by."""
        if self.nvidia and ".weight_global_scale" in found:
            problem = scalar_problem("weight_global_scale", read(".weight_global_scale", None))
            if problem:
                raise CheckpointError(problem)
        return self

    def units(self) -> tuple[int, int]:
        """All of a weight has the number that scales are divided by."""
        return (1 << 30, 1 << 30) if self.nvidia else super().units()

    def constants(self) -> tuple[str, ...]:
        """The numbers that scales are divided by."""
        return (".weight_global_scale", ".input_global_scale") if self.nvidia else (".input_global_scale",)

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """Bytes and scales as they are."""
        if part == "factor":
            sizes = [sum(b - a for a, b in ranges) for ranges in index]
            value = read(".weight_global_scale", None).to(torch.float32).reshape((1,) * len(index))
            return (1.0 / value).expand(sizes)
        return read(".weight_packed" if part == "codes" else ".weight_scale", index)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As they are."""
        return {".weight_packed": parts["codes"], ".weight_scale": parts["scales"]}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest."""
        if not self.nvidia:
            codes, exponents = quantize_mx(weight)
            return {".weight_packed": codes, ".weight_scale": exponents}
        tiles = _blocks(weight, NV_BLOCK)
        largest = weight.float().abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        factor = LARGEST_FP4 * LARGEST_FP8 / largest
        scales = (tiles.abs().amax(-1) / LARGEST_FP4 * factor).to(torch.float8_e4m3fn)
        divisor = (scales.float() / factor).clamp(min=torch.finfo(torch.float32).tiny)
        codes = to_fp4((tiles / divisor.unsqueeze(-1)).clamp(-LARGEST_FP4, LARGEST_FP4))
        return {
            ".weight_packed": pack_pairs(codes.flatten(-2)[..., : weight.shape[-1]]),
            ".weight_scale": scales,
            ".weight_global_scale": factor.reshape(1),
        }


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: mxfp4``."""
    if data.get("dequantize"):
        raise CheckpointError("quantization_config: dequantize=True is not supported: weights stay in MXFP4")
    return Quantization("mxfp4", [Rule(ExpertsMXFP4())], data.get("modules_to_not_convert"), data=data)
