"""Which of Dynamo's guards are worth their time in every call.

Dynamo guards compiled code on everything that it was compiled for, several times per parameter and in Python where a
parameter is a tensor subclass: for a model of some hundred parameters the guards take longer than the program. Without
gradients, all that matters of a parameter is that it is the planned one, and of a sharded KV cache that it is sharded
as before. The compiled program checks that itself, since it is called with them, and only for those that are new since
the call before: it raises :class:`ParametersReplaced`.

A guard is dropped by what it looks at: the types of its sources (:mod:`paraxis.compat.dynamo`) and the value found
there, never its name. A guard that these functions do not recognize stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from ..capture.trace import guards_mha_fastpath
from ..compat.dynamo import (
    attribute_of,
    class_attribute_of_module,
    guards_global_constant,
    guards_subclass_metadata,
    guards_torch_module,
    is_class_attribute_of_local,
    is_training_flag,
    source_of,
    subclass_owner,
)
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor, shards_version

# -- filters for ``guard_filter_fn`` -------------------------------------------------------------------------------


def all_guards(entries: Sequence[Any]) -> list[bool]:
    """For ``torch.compile``'s ``guard_filter_fn``: every guard but the one on a switch that only tracing turns off."""
    return [not guards_mha_fastpath(e) for e in entries]


def other_than_parameters(entries: Sequence[Any]) -> list[bool]:
    """Every guard of :func:`all_guards` but those on sharded parameters, where no gradients are computed.

    For programs that check themselves that they are called with their parameters: :func:`with_same_parameters`.
    """
    if torch.is_grad_enabled():
        return all_guards(entries)
    parameters = {source for source, value in _sharded(entries) if _is_parameter(value)}
    return [_owner(e) not in parameters and not guards_mha_fastpath(e) for e in entries]


def needed_guards(entries: Sequence[Any], watched: Callable[[str, Any], bool]) -> list[bool]:
    """The guards that a compiled program needs beside its own checks; all, where gradients are computed.

    Dropped are those on sharded parameters; on the inside of sharded tensors but the first (the caches of all layers
    have one layout, and change together); on torch's own modules except for whether they are in training; on
    attributes of the classes of caches and, where ``watched(name, value)``, of modules; and on global names of modules,
    classes and built-in functions.
    """
    if torch.is_grad_enabled():
        return all_guards(entries)
    sharded = dict(_sharded(entries))
    first = next((source for source, value in sharded.items() if not _is_parameter(value)), None)
    sharded.pop(first, None)
    return [_is_needed(e, sharded, watched) for e in entries]


def attributes_read(entries: Sequence[Any]) -> set[str]:
    """The attributes of torch's own modules with a plain value that guards look at, for :class:`.ModelWatch`."""
    return {
        name
        for e in entries
        if e.has_value
        and isinstance(e.value, (int, float, str, tuple, type(None)))
        and guards_torch_module(e)
        and (name := attribute_of(source_of(e))) is not None
        and name != "training"
    }


def _is_needed(entry: Any, sharded: dict[Any, ShardedTensor], watched: Callable[[str, Any], bool]) -> bool:
    source = source_of(entry)
    if source is None:
        return True
    owner = _owner(entry)
    if owner in sharded and (owner != source or _is_parameter(sharded[owner])):
        return False
    if guards_subclass_metadata(entry):  # compared by the program: see ``runtime/stride_guard.py``
        return False
    if is_training_flag(source):
        return True
    if is_class_attribute_of_local(source) and not guards_torch_module(entry):
        attribute = class_attribute_of_module(source)
        if attribute is None:
            return False
        name, inside = attribute  # of a list or dictionary, say
        return inside or not (entry.has_value and watched(name, entry.value))
    return not (guards_global_constant(entry) or guards_torch_module(entry) or guards_mha_fastpath(entry))


def _sharded(entries: Sequence[Any]) -> Iterable[tuple[Any, ShardedTensor]]:
    """The sources of sharded tensors, with these."""
    for e in entries:
        if e.has_value and isinstance(e.value, ShardedTensor) and (source := source_of(e)) is not None:
            yield source, e.value


def _owner(entry: Any) -> Any:
    """The source of the sharded tensor that a guard looks inside of; of any other guard, its own."""
    source = source_of(entry)
    return subclass_owner(source, "_inner") or source


def _is_parameter(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and isinstance(value._spec, ParameterMeta)


# -- what a program checks itself ----------------------------------------------------------------------------------


class ParametersReplaced(RuntimeError):
    """A compiled program was called with other parameters, or other shards, than those it was compiled for."""


def with_same_parameters(program: Callable[..., Any], expected: dict[int, nn.Parameter]) -> Callable[..., Any]:
    """A program that raises :class:`ParametersReplaced` if it is called with others than these, by position, or if
    their shards have another size, dtype or device."""
    select, parameters = picker(expected), tuple(expected.values())
    held = HeldShards(parameters)

    def run(*args: Any) -> Any:
        if not all(map(is_, select(args), parameters)):
            raise ParametersReplaced("a program was called with other parameters than it was compiled for")
        held.shards()
        return program(*args)

    return run


class HeldShards:
    """The shards of some parameters, read again only after some parameter in the process got another shard."""

    def __init__(self, parameters: Sequence[nn.Parameter], forms: list[Any] | None = None) -> None:
        self._parameters, self._forms, self._seen = parameters, forms, -1
        self._held: list[torch.Tensor] = []
        # torch refuses to swap the contents of tensors that have weak references
        self._pins = [weakref.ref(p) for p in parameters]

    def shards(self) -> list[torch.Tensor]:
        """All of them; :class:`ParametersReplaced` if one has another size, strides, dtype or device than before."""
        if self._seen != shards_version():
            now: list[torch.Tensor] = [p._local for p in self._parameters]  # type: ignore[attr-defined]
            found = [form_of(shard) for shard in now]
            if self._forms is not None and found != self._forms:
                raise ParametersReplaced("a parameter has a shard of another form than its program was compiled for")
            self._held, self._forms, self._seen = now, found, shards_version()
        return self._held


def picker(positions: Iterable[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the items at these positions out of a tuple."""
    several = tuple(positions)
    if len(several) < 2:
        return lambda items: tuple(items[i] for i in several)
    return itemgetter(*several)


def form_of(local: torch.Tensor) -> Any:
    """Size, strides, dtype and device of a shard; None where sizes are dynamic."""
    sizes = (*local.shape, *local.stride())
    return (sizes, local.dtype, local.device) if all(isinstance(n, int) for n in sizes) else None
