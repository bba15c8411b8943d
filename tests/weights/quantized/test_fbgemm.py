"""FP8 per row: the configuration, and inputs with a ceiling."""

from __future__ import annotations

import pytest
import torch

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.activations import quantize_inputs
from paraxis.weights.quantized.fbgemm import RowwiseFP8, parse


def test_rows_of_weights_and_inputs() -> None:
    (format,) = parse({"activation_scale_ub": 3.0, "modules_to_not_convert": ["lm_head"]}).formats
    assert isinstance(format, RowwiseFP8) and format.inputs is not None and not format.stacks
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    tensors = format.quantize(weight)
    assert tensors[".weight"].dtype == torch.float8_e4m3fn and tensors[".weight_scale"].shape == (8, 1)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1] = 5.0, 0.5 * x[1]
    found = quantize_inputs(x, format.inputs)
    assert float(found[0, 0]) == pytest.approx(3.0) and float((found[1] - x[1]).abs().max()) < 0.1
    with pytest.raises(CheckpointError, match="activation_scale_ub=0 is not a positive number"):
        parse({"activation_scale_ub": 0})
