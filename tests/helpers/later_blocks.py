"""What somebody may change on a later block of a llama of six layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def set_scaling(model: Any) -> None:
    model.model.layers[4].self_attn.scaling = 0.1


def set_eps(model: Any) -> None:
    model.model.layers[4].input_layernorm.variance_epsilon = 0.1


def set_activation(model: Any) -> None:
    model.model.layers[4].mlp.act_fn = nn.GELU()


def double(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def register_hook(model: Any) -> None:
    model.model.layers[4].mlp.register_forward_hook(double)


def replace_forward(model: Any) -> None:
    mlp = model.model.layers[4].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 2


def replace_class(model: Any) -> None:
    mlp = model.model.layers[4].mlp

    class Doubled(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2  # type: ignore[no-any-return]

    mlp.__class__ = Doubled


def scale_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight.mul_(2)


def swap_blocks(model: Any) -> None:
    layers = model.model.layers
    layers[4], layers[5] = layers[5], layers[4]


def swap_projections(model: Any) -> None:
    mlp = model.model.layers[4].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def remove_block(model: Any) -> None:
    del model.model.layers[5]


def replace_parameter(model: Any) -> None:
    model.model.layers[4].mlp.up_proj.weight = nn.Parameter(torch.full((128, 64), 0.05))


def replace_parameter_unseen(model: Any) -> None:
    weight = nn.Parameter(torch.full((128, 64), 0.05), requires_grad=False)
    model.model.layers[4].mlp.up_proj._parameters["weight"] = weight


def replace_block(model: Any) -> None:
    model.model.layers[4] = type(model.model.layers[4])(model.config, 4)


def replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 256, bias=False)


CHANGES = (
    "set_scaling",
    "set_eps",
    "set_activation",
    "replace_forward",
    "swap_blocks",
    "swap_projections",
    "remove_block",
    "replace_parameter",
    "replace_parameter_unseen",
    "replace_block",
)
"""Those that are seen on the modules: hooks and classes are looked at elsewhere."""
