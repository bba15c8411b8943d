"""The formats that are known, by ``quant_method``: what a model's configuration says about quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CheckpointError
from . import fp8
from .format import Quantization

METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": fp8.parse,
}
"""What reads a configuration, by its ``quant_method``. A new format needs an entry here and a file in this folder."""


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
