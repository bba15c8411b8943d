"""FP8 with a scale per row, and inputs that are rounded row by row: ``quant_method: fbgemm_fp8``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import CheckpointError
from .activations import InputQuantization
from .compressed_tensors import NaiveQuantized
from .format import Quantization, Rule

CEILING = 1200.0
"""The largest value of a row of inputs that counts, unless the configuration says another."""


@dataclass(frozen=True)
class RowwiseFP8(NaiveQuantized):
    """``weight`` of float8, ``weight_scale`` per row."""

    name: ClassVar[str] = "fbgemm_fp8"
    stacks: ClassVar[bool] = False


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: fbgemm_fp8``."""
    ceiling = data.get("activation_scale_ub", CEILING)
    if not isinstance(ceiling, (int, float)) or not ceiling > 0:
        raise CheckpointError(f"quantization_config: activation_scale_ub={ceiling!r} is not a positive number")
    format = RowwiseFP8(True, (1, 0), inputs=InputQuantization(ceiling=float(ceiling)))
    return Quantization("fbgemm_fp8", [Rule(format)], data.get("modules_to_not_convert"), data=data)
