"""What the libraries of quantized formats read from the tensors that are stored; empty where they are not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from models.quantized_formats import CASES

SHAPE = (48, 128)
"""Rows that blocks of 64 divide: the kernel of bitsandbytes for CPUs reads no others."""


def compare_with_library(case: str) -> str:
    """``library version: same`` or the largest difference; empty if there is no library that is installed."""
    method = CASES[case].config["quant_method"]
    library = {"compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes", "mxfp4": "transformers"}.get(
        method
    )
    if library is None or find_spec(library) is None or "ordered" in case:
        return ""
    torch.manual_seed(0)
    shape = (2, 8, 64) if method == "mxfp4" else SHAPE
    tensors = CASES[case].format.quantize(torch.randn(shape))
    read: Callable[[str, dict[str, torch.Tensor]], torch.Tensor] = READERS[method]
    found = read(case, tensors).float()
    expected = CASES[case].dequantize(tensors, tuple(found.shape)).float()
    error = float((found - expected).abs().max())
    version = __import__(library).__version__
    return f"{library} {version}: {'same' if error < 1e-6 else f'differs by {error:.0e}'}"


def _compressed_tensors(case: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = CASES[case].config
    (group,) = config["config_groups"].values()
    fields = {key: value for key, value in group.items() if key != "format"}
    scheme = QuantizationScheme(**fields)
    state: Any = {suffix.removeprefix("."): tensor for suffix, tensor in tensors.items()}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(state, scheme)["weight"]  # type: ignore[no-any-return]


def _bitsandbytes(case: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    from bitsandbytes import functional

    if ".SCB" in tensors:
        return functional.int8_vectorwise_dequant(tensors[".weight"], tensors[".SCB"])  # type: ignore[no-any-return]
    state = {suffix.removeprefix(".weight."): t for suffix, t in tensors.items() if suffix != ".weight"}
    parsed = functional.QuantState.from_dict(state, torch.device("cpu"))
    return functional.dequantize_4bit(tensors[".weight"], parsed)  # type: ignore[no-any-return]


def _mxfp4(case: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"], dtype=torch.float32)
    return found  # type: ignore[no-any-return]


READERS = {"compressed-tensors": _compressed_tensors, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4}
