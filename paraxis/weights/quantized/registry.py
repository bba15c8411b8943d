"""The formats that are known, by ``quant_method``: what a model's configuration says about quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CheckpointError
from . import bitsandbytes, compressed_config, fbgemm, fp4, fp8, gptq_awq, torchao
from .format import Quantization

METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": gptq_awq.parse_awq,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_config.parse,
    "fbgemm_fp8": fbgemm.parse,
    "fp8": fp8.parse,
    "gptq": gptq_awq.parse_gptq,
    "mxfp4": fp4.parse,
    "torchao": torchao.parse,
}
"""What reads a configuration, by its ``quant_method``. A new format needs an entry here and a file in this folder."""


_LINEAR = {"targets": ["Linear"]}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
NAMED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {
        **_COMPRESSED,
        "config_groups": {"all": {**_LINEAR, "weights": {"num_bits": 8, "strategy": "channel"}}},
    },
    "int4": {
        **_COMPRESSED,
        "config_groups": {"all": {**_LINEAR, "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
    },
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""Configurations by name: FP8 in blocks of 128 by 128, int8 per row, int4 per 128 columns, NF4."""


def config_data(config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model's configuration as plain data; None if it has none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        text = getattr(config, "get_text_config", None)
        found = getattr(text(), "quantization_config", None) if text is not None else None
    if found is None:
        found = getattr(config, "compression_config", None)
    if found is None:
        return None
    return found if isinstance(found, Mapping) else found.to_dict()  # type: ignore[no-any-return]


def method_of(data: Mapping[str, Any]) -> str:
    """The method that a configuration names."""
    method = data.get("quant_method")
    if method is None and (data.get("load_in_4bit") or data.get("load_in_8bit")):
        method = "bitsandbytes"
    return str(getattr(method, "value", method or "unknown method"))


def quantization_of(config: Any, known_only: bool = False) -> Quantization | None:
    """What a model's configuration says about quantization; None if it is not quantized.

    Args:
        config: The configuration.
        known_only: None for methods that are not known.

    Raises:
        CheckpointError: the method, or a value of the configuration, is not known.
    """
    data = config_data(config)
    if data is None:
        return None
    method = method_of(data)
    if method not in METHODS and known_only:
        return None
    if method not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantized with quant_method={method!r}, which is not known; these are: "
            f"{', '.join(sorted(METHODS))}. Use a checkpoint in one of them, or one that is not quantized."
        )
    try:
        return METHODS[method](data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"quantization_config of quant_method={method!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def set_quantization(config: Any, wanted: Any) -> None:
    """Set what a plain checkpoint is to be quantized to, in a model's configuration.

    Args:
        config: The configuration.
        wanted: The value of ``quantization_config=``: plain data, an object of transformers, or one of :data:`NAMED`.

    Raises:
        CheckpointError: the checkpoint is quantized, or what is wanted is not known.
        TypeError: what is wanted is no configuration.
    """
    if isinstance(wanted, str):
        if wanted not in NAMED:
            raise CheckpointError(f"quantization_config={wanted!r} is not known: {', '.join(NAMED)} are")
        wanted = NAMED[wanted]
    data = dict(wanted) if isinstance(wanted, Mapping) else wanted.to_dict() if hasattr(wanted, "to_dict") else None
    if data is None:
        raise TypeError(f"quantization_config={wanted!r} is neither a dictionary nor a configuration of transformers")
    there = config_data(config)
    if there is not None:
        raise CheckpointError(
            f"quantization_config= is for plain checkpoints, and this one is quantized already ({method_of(there)}): "
            "leave it out"
        )
    data["quant_method"] = method_of(data)
    config.quantization_config = data
    quantization_of(config)
