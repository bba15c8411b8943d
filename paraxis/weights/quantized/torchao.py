"""torchao as transformers saves it: ``_weight_qdata`` of int8 or float8 with ``_weight_scale``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from .activations import InputQuantization
from .format import COLUMNS, ROWS, Dim, Format, Index, PartForm, Quantization, Read, Rule, Tensor
from .fp8 import FLOATS
from .integers import quantize_integers

WEIGHT_ONLY = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig")
INT8_INPUTS, FLOAT8_INPUTS = "Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig"


@dataclass(frozen=True)
class TorchAO(Format):
    """A byte per value, and a scale per weight, row or group of columns, perhaps with a zero point.

    Attributes:
        grid: Rows and columns of the scales; what the checkpoint has.
        inputs: How inputs of layers are quantized, if they are.
    """

    grid: tuple[int, int] = (0, 1)
    inputs: InputQuantization | None = None

    name: ClassVar[str] = "torchao"
    marker: ClassVar[str] = "._weight_qdata"
    stacks: ClassVar[bool] = False
    zero_scales: ClassVar[bool] = True

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows = self.grid[0] or shape[-2]
        return -(-shape[-2] // rows), -(-shape[-1] // self.grid[1])

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Rows and groups of columns."""
        return Encoding(block=self._block(shape))

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Values, scales and zero points."""
        rows, columns = self._block(shape)
        parts = {"codes": "._weight_qdata", "scales": "._weight_scale", "zeros": "._weight_zero_point"}
        dims = {"codes": (Dim(ROWS), Dim(COLUMNS))}
        grid = (Dim(ROWS, rows), Dim(COLUMNS, columns))
        return {part: PartForm(found[key].dtype, *dims.get(part, grid)) for part, key in parts.items() if key in found}

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Values, scales and zero points."""
        grid = (self.grid[0] or shape[-2], self.grid[1])
        return {
            "._weight_qdata": Tensor(shape, (torch.int8, torch.float8_e4m3fn)),
            "._weight_scale": Tensor(grid, FLOATS),
            "._weight_zero_point": Tensor(grid, (torch.int8,), optional=True),
        }

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """That of the values."""
        return tuple(found["._weight_qdata"].shape)

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """Groups are those of the scales."""
        if "._weight_scale" not in found:
            raise KeyError("._weight_scale")
        shape, scales = found["._weight_qdata"].shape, tuple(found["._weight_scale"].shape)
        fits = len(scales) == 2 and scales[0] in (1, shape[0]) and scales[1] > 0 and shape[1] % scales[1] == 0
        if not fits:
            raise CheckpointError(f"_weight_scale has shape {scales} for a weight of {tuple(shape)}")
        return replace(self, grid=(0 if scales[0] == shape[0] else 1, scales[1]))

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """As stored."""
        key = {"codes": "._weight_qdata", "scales": "._weight_scale", "zeros": "._weight_zero_point"}[part]
        return read(key, index)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As they are."""
        found = {"._weight_qdata": parts["codes"], "._weight_scale": parts["scales"]}
        return found | ({"._weight_zero_point": parts["zeros"]} if "zeros" in parts else {})

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Integers, rounded to the nearest."""
        codes, scales, zeros = quantize_integers(weight, self._block(tuple(weight.shape)), 8, True)
        return {"._weight_qdata": codes, "._weight_scale": scales, "._weight_zero_point": zeros}


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: torchao``."""
    if data.get("include_input_output_embeddings"):
        raise CheckpointError("quantization_config of torchao: include_input_output_embeddings is not supported")
    kinds = data.get("quant_type")
    if not isinstance(kinds, Mapping) or set(kinds) != {"default"}:
        raise CheckpointError(f"quantization_config of torchao: quant_type={kinds!r} is not one for all modules")
    kind, options = kinds["default"].get("_type"), kinds["default"].get("_data") or {}
    if kind in WEIGHT_ONLY:
        inputs = None
    elif kind == INT8_INPUTS and _name(options.get("act_mapping_type")) in (None, "SYMMETRIC"):
        inputs = InputQuantization(8, False, reciprocal=True)
    elif kind == FLOAT8_INPUTS and not options.get("activation_value_ub") and not options.get("activation_value_lb"):
        inputs = InputQuantization(8, True, group=0 if "PerRow" in str(options.get("granularity")) else -1)
    else:
        known = ", ".join([*WEIGHT_ONLY, INT8_INPUTS, FLOAT8_INPUTS])
        raise CheckpointError(f"quantization_config of torchao: {kind} with {options!r} is not supported; {known} are")
    return Quantization("torchao", [Rule(TorchAO(inputs=inputs))], data.get("modules_to_not_convert"), data=data)


def _name(value: Any) -> str | None:
    found = value.get("_data") if isinstance(value, Mapping) else value
    return None if found is None else str(found)
