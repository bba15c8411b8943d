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


def static_inputs(data: dict[str, Any]) -> None:
    """Inputs are quantized by a scale that the checkpoint does not have."""
    group = data["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


STATE = "weight.quant_state.bitsandbytes__nf4"
OTHERS: dict[str, tuple[str, Any, Any, str]] = {
    "a shape that lies": (
        "ct-int4",
        change(f"{Q}.weight_shape", lambda t: t + 8),
        None,
        f"{Q} (pack-quantized): weight_packed has shape (96, 12) for a weight of (104, 104), which needs (104, 13)",
    ),
    "zero points are missing": (
        "ct-int4-asymmetric",
        change(f"{Q}.weight_zero_point", None),
        None,
        f"{Q} (pack-quantized): {Q}.weight_zero_point is missing in the checkpoint",
    ),
    "another group size": (
        "awq",
        None,
        options(group_size=32),
        f"{Q} (awq): qzeros has shape (6, 12) for a weight of (96, 96), which needs (3, 12)",
    ),
    "an index of groups out of range": (
        "gptq-ordered",
        change(f"{Q}.g_idx", lambda t: t.index_fill(0, torch.tensor([7]), 6)),
        None,
        f"{Q} (gptq): g_idx has 6, and there are 6 groups of 16 inputs",
    ),
    "an index of groups that should not be": (
        "gptq-ordered",
        None,
        options(desc_act=False),
        f"{Q} (gptq): g_idx is not in order, but quantization_config has desc_act=False",
    ),
    "scales of blocks are too few": (
        "bnb-nf4",
        change(f"{Q}.weight.absmax", lambda t: t[:-1]),
        None,
        f"{Q} (bitsandbytes 4-bit): weight.absmax has shape (143,) for a weight of (96, 96), which needs (144,)",
    ),
    "a state that cannot be read": (
        "bnb-nf4",
        change(f"{Q}.{STATE}", lambda t: t[:-3]),
        None,
        f"{Q} (bitsandbytes 4-bit): {STATE} cannot be read: JSONDecodeError",
    ),
    "no scale of inputs": (
        "ct-float8-tensor",
        None,
        static_inputs,
        f"{Q}.weight: input_scale, by which its inputs are quantized, is missing in the checkpoint",
    ),
    "NaN": (
        "ct-int8",
        change(f"{GATE}.weight_scale", set_at((170, 2), float("nan"))),
        None,
        f"{GATE}.weight (pack-quantized, (176, 96)): scales have NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_bad_checkpoints_of_other_formats(name: str, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    case, tensors, config, message = OTHERS[name]
    folder = damaged(tmp_path, case, tensors=tensors, config=config)
    for found in ranks(2).run(error, folder):
        assert "CheckpointError" in found and message in found, found


def experts_differ(state: dict[str, torch.Tensor]) -> None:
    """One expert has its groups in another order."""
    key = next(key for key in state if ".experts.1." in key and key.endswith(".g_idx"))
    state[key] = state[key].flip(0).contiguous()


def test_experts_with_different_orders_are_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    folder = damaged(tmp_path, "gptq-ordered", tensors=experts_differ, kind="moe")
    for found in ranks(2).run(error, folder):
        assert "is not that of" in found and "experts.1." in found and "act-order" in found, found
