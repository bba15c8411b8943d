"""Inputs that are rounded, by scalar arithmetic, and layers that round them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paraxis.errors import CheckpointError
from paraxis.weights.quantized.activations import InputQuantization, quantize_inputs, quantize_inputs_of

X = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))


def rows_rounded(x: torch.Tensor, how: InputQuantization) -> torch.Tensor:
    """Row by row."""
    found = []
    for row in x.reshape(-1, x.shape[-1]):
        if how.floating:
            scale = float(row.abs().max()) / 448
            found.append((row / scale).to(torch.float8_e4m3fn).float() * scale)
            continue
        low, high = min(float(row.min()), 0), max(float(row.max()), 0)
        scale = max(-low, high) / 127.5 if how.symmetric else (high - low) / 255
        zero = 0 if how.symmetric else round(-128 - low / scale)
        found.append(((row / scale + zero).round().clamp(-128, 127) - zero) * scale)
    return torch.stack(found).view(x.shape)


@pytest.mark.parametrize("how", [InputQuantization(), InputQuantization(8, False), InputQuantization(8, False, False)])
def test_rows_are_rounded_one_by_one(how: InputQuantization) -> None:
    found = quantize_inputs(X, how)
    assert torch.allclose(found, rows_rounded(X, how), atol=1e-6)
    assert torch.equal(quantize_inputs(torch.zeros(2, 16), how), torch.zeros(2, 16))


def test_groups_and_inputs_with_one_scale() -> None:
    found = quantize_inputs(X, InputQuantization(group=16))
    assert torch.allclose(found, rows_rounded(X.view(3, 5, 3, 16), InputQuantization()).view(X.shape), atol=1e-6)
    scale = X.abs().max() / 448
    expected = (X / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.allclose(quantize_inputs(X, InputQuantization(group=-1)), expected, atol=1e-6)
    static = InputQuantization(group=-1, dynamic=False)
    assert static.needs == ("scale",) and torch.equal(quantize_inputs(X, static, torch.tensor([scale])), expected)


def test_numbers_of_four_bits() -> None:
    how = InputQuantization(4, True, group=16, rounds_scales=True)
    found = quantize_inputs(X, how, global_scale=torch.tensor([100.0])).view(3, 5, 3, 16)
    scale = (X.view(3, 5, 3, 16).abs().amax(-1, keepdim=True) / 6 * 100).to(torch.float8_e4m3fn).float() / 100
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert bool(((found / scale).abs().unsqueeze(-1) - numbers).abs().amin(-1).max() < 1e-5)
    assert how.needs == ("global_scale",)


def test_columns_with_outliers_are_not_rounded() -> None:
    how = InputQuantization(8, False, outliers=6.0, through="float16")
    x = X.clone()
    x[0, 0, 3] = 9.0
    found = quantize_inputs(x, how)
    assert torch.equal(found[..., 3], x[..., 3]) and not torch.equal(found[..., 4], x[..., 4])
    rest = [i for i in range(48) if i != 3]
    expected = x.half().float()[..., rest]
    scale = x.half().float().where(x.abs() < 6, 0).abs().amax(-1, keepdim=True) / 127
    assert torch.allclose(found[..., rest], (expected / scale).round() * scale, atol=1e-6)


def test_without_a_threshold_all_columns_are_rounded() -> None:
    found = quantize_inputs(9 * X, InputQuantization(8, False, outliers=0.0, through="float16"))
    x = (9 * X).half().float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert torch.allclose(found, (x / scale).round() * scale, atol=1e-6)


def test_a_layer_that_rounds_its_inputs() -> None:
    layer = nn.Linear(48, 8)
    plain, weight = layer(X), layer.weight
    quantize_inputs_of(layer, "fc", InputQuantization(), {}, torch.device("cpu"))
    quantize_inputs_of(layer, "fc", InputQuantization(), {}, torch.device("cpu"))
    assert type(layer).__name__ == "Linear" and isinstance(layer, nn.Linear) and layer.weight is weight
    expected = torch.nn.functional.linear(quantize_inputs(X, InputQuantization()), weight, layer.bias)
    assert torch.equal(layer(X), expected) and not torch.equal(plain, expected)
    assert layer.state_dict().keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is missing"),
        (torch.ones(2), r"has shape \(2,\)"),
        (torch.tensor(0.0), "is 0.0"),
        (torch.tensor(float("nan")), "is nan"),
    ],
)
def test_scales_in_the_checkpoint(value: torch.Tensor | None, message: str) -> None:
    how, found = InputQuantization(group=-1, dynamic=False), {} if value is None else {".input_scale": value}
    with pytest.raises(CheckpointError, match=f"fc: input_scale, by which its inputs are quantized, {message}"):
        quantize_inputs_of(nn.Linear(4, 4), "fc", how, found, torch.device("cpu"))
