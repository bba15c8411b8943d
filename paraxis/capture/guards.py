"""Which of the compiler's guards are worth their time on every call.

Compiled code is guarded on everything it was compiled for, several times per parameter and in Python where a parameter
is a tensor of our own: for a model of some hundred parameters that takes longer than to run it. Where no gradients are
computed, all that matters of a parameter is that it is the one that was planned, and of a sharded cache that it is
sharded as it was. The compiled program sees that for itself, since it is called with them, and looks only at those that
it has not seen in the call before: it raises :class:`ParametersReplaced`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core import ParameterMeta
from ..sharded import ShardedTensor


class ParametersReplaced(RuntimeError):
    """A compiled program was called with other parameters, or other shards, than those it was compiled for."""


def needed_guards(entries: Sequence[Any]) -> list[bool]:
    """For ``torch.compile``'s ``guard_filter_fn``: which guards to keep.

    Left out are those on sharded parameters, on what is inside of other sharded tensors, on torch's own modules
    except for whether they are in training, and on the attributes of the classes of modules.
    """
    if torch.is_grad_enabled():
        return [True] * len(entries)
    parameters = {e.name for e in entries if e.has_value and _is_parameter(e.value)}
    return [_is_needed(e, parameters) for e in entries]


def _is_needed(entry: Any, parameters: set[str]) -> bool:
    name = entry.name
    if name.removesuffix("._inner") in parameters or name.endswith(".__tensor_flatten__()[0]"):
        return False
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH":
        return False
    if name.endswith(".training"):
        return True
    if "type(L['model']" in name and ".__mro__[" in name:
        return False
    source = entry.orig_guard.source
    return not source.is_unspecialized_builtin_nn_module()


def _is_parameter(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and isinstance(value._spec, ParameterMeta)
