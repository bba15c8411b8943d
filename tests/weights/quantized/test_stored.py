"""Quantized checkpoints that are damaged, or whose configuration is wrong: one clear error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weights.quantized.checkpoint import damaged, error

from ranks import RankPool

Q = "model.layers.0.self_attn.q_proj"
GATE = "model.layers.0.mlp.gate_proj"


def change(key: str, function: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[dict[str, Any]], None]:
    """Change a tensor, or remove it."""

    def apply(state: dict[str, torch.Tensor]) -> None:
        value = state.pop(key)
        if function is not None:
            state[key] = function(value).contiguous()

    return apply


def set_at(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return apply


def options(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["quantization_config"].update(values)


BAD: dict[str, tuple[Any, Any, str]] = {
    "scales are missing": (
        change(f"{Q}.weight_scale_inv", None),
        None,
        f"{Q}.weight: quantized (fp8) by quantization_config, but the checkpoint has no {Q}.weight_scale_inv",
    ),
    "values are missing": (change(f"{Q}.weight", None), None, f"{Q} (fp8): {Q}.weight is missing in the checkpoint"),
    "scales of another shape": (
        change(f"{Q}.weight_scale_inv", lambda t: t[:, :5]),
        None,
        f"{Q} (fp8): weight_scale_inv has shape (6, 5) for a weight of (96, 96), which needs (6, 6)",
    ),
    "scales of another dtype": (
        change(f"{Q}.weight_scale_inv", lambda t: t.to(torch.int32)),
        None,
        f"{Q} (fp8): weight_scale_inv is int32, not float32",
    ),
    "values of another dtype": (
        change(f"{Q}.weight", lambda t: t.to(torch.int8)),
        None,
        f"{Q} (fp8): weight is int8, not float8_e4m3fn or float8_e5m2",
    ),
    "NaN on the last rank": (
        change(f"{GATE}.weight_scale_inv", set_at((10, 0), float("nan"))),
        None,
        f"{GATE}.weight (fp8, (176, 96)): scales have NaN or infinity",
    ),
    "zero": (
        change(f"{GATE}.weight_scale_inv", set_at((0, 0), 0.0)),
        None,
        f"{GATE}.weight (fp8, (176, 96)): a scale is zero",
    ),
    "another block size": (
        None,
        options(weight_block_size=[32, 32]),
        f"{Q} (fp8): weight_scale_inv has shape (6, 6) for a weight of (96, 96), which needs (3, 3)",
    ),
    "no block size": (
        None,
        options(weight_block_size=[0, 16]),
        "weight_block_size=[0, 16] is not two positive numbers",
    ),
    "an unknown method": (None, options(quant_method="new"), "quant_method='new', which is not known; these are: "),
    "a module that is quantized and should not be": (
        None,
        options(modules_to_not_convert=["lm_head", "q_proj"]),
        f"{Q}: not quantized by quantization_config, but the checkpoint has {Q}.weight_scale_inv",
    ),
    "no quantization_config": (
        None,
        lambda data: data.pop("quantization_config"),
        "F8_E4M3 in the checkpoint, torch.float32 in the model",
    ),
    "another hidden size": (
        change(f"{GATE}.weight", lambda t: t.view(torch.uint8)[:160].view(torch.float8_e4m3fn)),
        None,
        f"{GATE} (fp8): weight_scale_inv has shape (11, 6) for a weight of (160, 96), which needs (10, 6)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(name: str, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    tensors, config, message = BAD[name]
    folder = damaged(tmp_path, tensors=tensors, config=config)
    for found in ranks(2).run(error, folder):
        assert "CheckpointError" in found and message in found, found
