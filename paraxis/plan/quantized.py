"""What the configuration of a quantized checkpoint says about its size.

Paraxis reads no quantized weights: a plan, and its memory, are those of the model in the dtype it is built with. That
has to be said, with the size as stored where the format is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from math import prod
from typing import Any

from ..placement import local_shape
from ..utils.sizes import size_text
from .plan import Plan

BITS = {"fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "mxfp4": 4, "eetq": 8}
"""Bits per quantized weight of methods that have one format only."""


def quantization_of(config: Any) -> tuple[str, int | None] | None:
    """The method of a configuration and its bits per weight (None if it does not say); None if not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    data: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    method = str(getattr(data.get("quant_method"), "value", data.get("quant_method") or "unknown method"))
    bits = data.get("bits") or BITS.get(method)
    if data.get("load_in_4bit") or data.get("load_in_8bit"):
        bits = 4 if data.get("load_in_4bit") else 8
    for group in (data.get("config_groups") or {}).values():  # compressed-tensors
        bits = bits or (group.get("weights") or {}).get("num_bits")
    return method, bits if isinstance(bits, int) else None


def quantization_note(config: Any, plan: Plan, dtypes: Mapping[str, Any]) -> str:
    """A sentence about the stored size of a quantized checkpoint; empty if it is not quantized.

    Args:
        config: The model's configuration.
        plan: The plan, for the shards of a rank.
        dtypes: The dtype of every parameter in the model, by name.
    """
    found = quantization_of(config)
    if found is None:
        return ""
    method, bits = found
    largest = max(set(dtypes.values()), key=lambda dtype: sum(d == dtype for d in dtypes.values()), default=None)
    figures = f"these figures are for weights in {str(largest).removeprefix('torch.')}, since Paraxis reads no others"
    if bits is None:
        return f"the checkpoint is quantized ({method}): {figures}"
    skipped = _not_converted(config)
    quantized = {
        f"{layer.name}.weight"
        for layer in plan.layers
        if layer.kind == "linear" and not any(_matches(layer.name, name) for name in skipped)
    }

    def stored(rank: int) -> float:
        return sum(
            prod(local_shape(p.placement, p.global_shape, rank))
            * (bits / 8 if name in quantized else dtypes[name].itemsize)
            for name, p in plan.parameters.items()
        )

    size = size_text(max(stored(rank) for rank in range(plan.world_size)))
    return (
        f"the checkpoint is quantized ({method}, {bits} bits per weight of linear layers: parameters of about {size} "
        f"per rank as stored, without scales): {figures}"
    )


def _not_converted(config: Any) -> list[str]:
    """The modules that the configuration leaves unquantized; without a list, by convention the output layer."""
    found = config.quantization_config
    data: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    names = data.get("modules_to_not_convert") or data.get("ignore") or data.get("ignored_layers")
    return [str(name) for name in names] if names else ["lm_head"]


def _matches(module: str, name: str) -> bool:
    """Whether a module is, or is in, a module of the list; names may leave out the front, or have wildcards."""
    name = name.removeprefix("re:").replace(".*", "*") if name.startswith("re:") else name
    inner = f".{module}."
    return fnmatch(module, name) or f".{name}." in inner
