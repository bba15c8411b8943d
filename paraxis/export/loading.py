"""Parameters that transformers cannot load sharded, because checkpoints store them in another form.

When transformers loads a model with a tp_plan, it shards the tensors of the checkpoint and then converts the shards.
If a stored tensor holds several parameters one after another, a shard of it does not contain the shards of these
parameters: the loaded model computes something else, without an error.
"""

from __future__ import annotations

import re
from typing import Any

from ..weights.names import transforms
from .candidates import generic

SAFE_CONVERSIONS = {"MergeModulelist", "Concatenate"}
"""Conversions that give the same result whether tensors are sharded before or after."""


def sharded_before_conversion(model: Any) -> dict[str, str]:
    """Modules and parameters that transformers would load wrong if sharded, by generic names, and the reason."""
    _, converters = transforms(model)
    patterns = [
        (re.compile(_as_regex(target)), converter)
        for converter in converters
        if not {type(operation).__name__ for operation in converter.operations} <= SAFE_CONVERSIONS
        for target in converter.target_patterns
    ]
    found = {}
    for name, _ in model.named_parameters() if patterns else ():
        for pattern, converter in patterns:
            if pattern.search(name):
                stored = ", ".join(converter.source_patterns)
                reason = f"checkpoints store it as {stored}, which transformers shards before converting it"
                found[generic(name)] = found[generic(name.rpartition(".")[0])] = reason
                break
    return found


def _as_regex(target: str) -> str:
    """A regular expression for the names that a conversion writes; it may match more, which is safe."""
    literal = re.escape(target.strip("^$").lstrip("."))
    return r"(?:^|\.)" + re.sub(r"\\\\\d|\\\*", ".+", literal)
