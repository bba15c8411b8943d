"""What a plan says about quantized parameters: how many there are, and what a weight takes with its scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

from ..placement import REPLICATE
from ..tensor.parameter_meta import ParameterMeta
from ..weights.quantized.registry import config_data, method_of


def quantization_note(config: Any, parameters: Iterable[Any]) -> str:
    """A sentence about the quantization of a model; empty if it is not quantized.

    Args:
        config: The model's configuration.
        parameters: Its parameters.
    """
    data = config_data(config)
    if data is None:
        return ""
    method, everything = method_of(data), list(parameters)
    metas = [p.spec for p in everything if isinstance(getattr(p, "spec", None), ParameterMeta)]
    quantized = [meta for meta in metas if meta.quantized is not None]
    if not quantized:
        dtypes = Counter(p.dtype for p in everything)
        largest = str(dtypes.most_common(1)[0][0]).removeprefix("torch.") if dtypes else "another dtype"
        return (
            f"the checkpoint is quantized ({method}), which Paraxis cannot read: these figures are for weights in "
            f"{largest}"
        )
    size = sum(meta.quantized.nbytes(REPLICATE, 0) for meta in quantized if meta.quantized is not None)
    bits = 8 * size / max(sum(prod(meta.shape) for meta in quantized), 1)
    return (
        f"{len(quantized)} of {len(everything)} parameters are quantized ({method}, {bits:.3g} bits per weight with "
        "their scales)"
    )
