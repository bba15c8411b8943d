"""FP8 with a scale per block of rows and columns, or one per weight: ``quant_method: fp8``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from .format import COLUMNS, ROWS, Dim, Format, PartForm, Quantization, Read, Rule, Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class BlockFP8(Format):
    """``weight`` of float8, ``weight_scale_inv`` per block.

    Attributes:
        block: Rows and columns of a block; None for one scale per weight.
        power_of_two: Whether scales are powers of two (UE8M0).
        static: Whether the inputs of layers have a scale in the checkpoint.
        scale: The suffix of the scales.
    """

    block: tuple[int, int] | None = (128, 128)
    power_of_two: bool = False
    static: bool = False
    scale: str = ".weight_scale_inv"

    name: ClassVar[str] = "fp8"
    marker: ClassVar[str] = ".weight_scale_inv"
    from_plain: ClassVar[bool] = True

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Blocks, or all of the weight as one. Inputs are not rounded: kernels that do so were not run on a GPU."""
        return Encoding(block=(shape[-2], shape[-1]) if self.block is None else self.block)

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """The codes and the scales."""
        weight, scales = found[".weight"], found[self.scale]
        block = self.block or (weight.shape[-2], weight.shape[-1])
        return {
            "codes": PartForm(weight.dtype, Dim(ROWS), Dim(COLUMNS)),
            "scales": PartForm(scales.dtype, Dim(ROWS, block[0]), Dim(COLUMNS, block[1])),
        }

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The values, the scales, and perhaps a scale of the inputs."""
        *stack, rows, columns = shape
        grid = () if self.block is None else (*stack, -(-rows // self.block[0]), -(-columns // self.block[1]))
        scales = (*FLOATS, torch.float8_e8m0fnu)
        return {
            ".weight": Tensor(shape, (torch.float8_e4m3fn, torch.float8_e5m2)),
            self.scale: Tensor(grid if self.block else None, scales),
            ".activation_scale": Tensor(None, FLOATS, optional=True),
        }

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """That of the values."""
        return tuple(found[".weight"].shape)

    def constants(self) -> tuple[str, ...]:
        """The scale of the inputs."""
        return (".activation_scale",)

    def load(self, part: str, index: Any, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """As stored; a scale of the entire weight has no dimensions in the file."""
        if part == "codes":
            return read(".weight", index)
        if self.block is None:
            return read(self.scale, None).reshape((1,) * len(index))
        return read(self.scale, index)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As they are."""
        return {".weight": parts["codes"], self.scale: parts["scales"]}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest value of a block becomes the largest of float8."""
        rows, columns = weight.shape[-2:]
        block = self.block or (rows, columns)
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
        tiles = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        largest = tiles.abs().amax((-3, -1))
        forward = torch.where(largest > 0, LARGEST / torch.where(largest > 0, largest, 1.0), 1.0)
        scales = 1.0 / forward
        if self.power_of_two:
            exponent = torch.ceil(torch.log2(scales.clamp(min=torch.finfo(torch.float32).tiny)))
            scales = torch.pow(2.0, exponent).to(torch.float8_e8m0fnu)
            forward = 1.0 / scales.float()
        scaled = (tiles * forward.unsqueeze(-1).unsqueeze(-3)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        values = scaled.flatten(-4, -3).flatten(-2)[..., :rows, :columns].contiguous()
        return {".weight": values, self.scale: scales if self.block else scales.reshape(())}


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: fp8``."""
    block = data.get("weight_block_size", (128, 128) if "weight_block_size" not in data else None)
    if block is not None:
        valid = (
            isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        )
        if not valid:
            raise CheckpointError(f"quantization_config: weight_block_size={block!r} is not two positive numbers")
        block = (int(block[0]), int(block[1]))
    kind = data.get("fmt", data.get("weight_format", "e4m3"))
    if kind not in ("e4m3", "e5m2"):
        raise CheckpointError(f"quantization_config: fmt={kind!r} is not known: e4m3 and e5m2 are")
    power = data.get("scale_fmt") == "ue8m0"
    found = BlockFP8(block, power, data.get("activation_scheme") == "static")
    return Quantization("fp8", [Rule(found)], data.get("modules_to_not_convert"), data=data)
