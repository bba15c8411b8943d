"""Parameters that transformers does not read as the checkpoint holds them.

When it loads a split model, transformers cuts the tensors of the checkpoint and converts the pieces. Where a tensor
holds several parameters one after the other, a rank's piece of it is not made of the pieces of these parameters: the
model that comes of it computes something else, without an error.
"""

from __future__ import annotations

import re
from typing import Any

from ..weights.names import transforms
from .candidates import generic

CUT_FIRST = {"MergeModulelist", "Concatenate"}
"""Conversions that give the same whether the tensors are cut before or after."""


def cut_before_converted(model: Any) -> dict[str, str]:
    """Modules and parameters that transformers cannot load split, by generic names, and why."""
    _, converters = transforms(model)
    patterns = [
        (re.compile(_as_regex(target)), converter)
        for converter in converters
        if not {type(operation).__name__ for operation in converter.operations} <= CUT_FIRST
        for target in converter.target_patterns
    ]
    found = {}
    for name, _ in model.named_parameters() if patterns else ():
        for pattern, converter in patterns:
            if pattern.search(name):
                stored = ", ".join(converter.source_patterns)
                reason = f"checkpoints hold it as {stored}, which transformers cuts before it converts it"
                found[generic(name)] = found[generic(name.rpartition(".")[0])] = reason
                break
    return found


def _as_regex(target: str) -> str:
    """A target of a conversion as an expression that finds the names it stands for, and at worst some more."""
    literal = re.escape(target.strip("^$").lstrip("."))
    return r"(?:^|\.)" + re.sub(r"\\\\\d|\\\*", ".+", literal)
