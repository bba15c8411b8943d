"""The formats that are tested: what quantizes, the configuration, and what the stored tensors stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from models.quantized import of_blocks

from paraxis.weights.quantized.format import Format
from paraxis.weights.quantized.fp8 import BlockFP8

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A format as it is tested.

    Attributes:
        format: What quantizes each weight.
        config: The ``quantization_config``.
        dequantize: The reference: from the stored tensors of a weight, by suffix, and its shape to the weight.
        kinds: The architectures that have it; all by default.
        overrides: Fields of the configuration.
    """

    format: Format
    config: Mapping[str, Any]
    dequantize: Callable[[Tensors, tuple[int, ...]], torch.Tensor]
    kinds: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)


def fp8(block: tuple[int, int] | None, **options: Any) -> Case:
    """``quant_method: fp8``."""
    config = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": "dynamic"}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        scales = tensors[".weight_scale_inv"]
        return of_blocks(tensors[".weight"], scales.reshape(-1, 1) if block is None else scales, block or shape)

    return Case(BlockFP8(block, **options), {**config, **({"scale_fmt": "ue8m0"} if options else {})}, dequantize)


CASES = {
    "fp8-blocks": fp8((16, 16)),
    "fp8-blocks-ue8m0": fp8((16, 32), power_of_two=True),
    "fp8-tensor": fp8(None),
}
