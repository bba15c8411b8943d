"""Which of the compiler's guards are worth their time on every call.

Compiled code is guarded on everything it was compiled for, several times per parameter and in Python where a parameter
is a tensor of our own: for a model of some hundred parameters that takes longer than to run it. Where no gradients are
computed, all that matters of a parameter is that it is the one that was planned, and of a sharded cache that it is
sharded as it was. The compiled program sees that for itself, since it is called with them, and looks only at those that
it has not seen in the call before: it raises :class:`ParametersReplaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..core import ParameterMeta
from ..sharded import ShardedTensor

_registrations = 0
_counting = False


def _count(*_: Any) -> None:
    global _registrations
    if not torch.compiler.is_compiling():  # a forward that makes modules would be guarded on the number of all others
        _registrations += 1


class Structure:
    """The modules that a model is made of, to notice when they are others (an adapter around a layer): the guards that
    are left out would not. Looked at only after some module was given to another one somewhere."""

    def __init__(self, module: nn.Module) -> None:
        global _counting
        if not _counting:
            register_module_module_registration_hook(_count)
            _counting = True
        self.module, self._seen = module, _registrations
        self._known = self._modules()

    def _modules(self) -> tuple[int, ...]:
        return tuple(map(id, self.module.modules()))

    def changed(self) -> bool:
        """Whether the modules are others than when this was asked, or made, before."""
        if self._seen == _registrations:
            return False
        before, self._seen, self._known = self._known, _registrations, self._modules()
        return before != self._known


class ParametersReplaced(RuntimeError):
    """A compiled program was called with other parameters, or other shards, than those it was compiled for."""


def other_than_parameters(entries: Sequence[Any]) -> list[bool]:
    """For ``torch.compile``'s ``guard_filter_fn``: all guards but those on sharded parameters.

    For programs that see for themselves that they are called with the parameters they were made for:
    :func:`with_same_parameters`.
    """
    if torch.is_grad_enabled():
        return [True] * len(entries)
    parameters = {e.name for e in entries if e.has_value and _is_parameter(e.value)}
    return [_owner(e.name) not in parameters for e in entries]


def with_same_parameters(program: Callable[..., Any], expected: dict[int, nn.Parameter]) -> Callable[..., Any]:
    """A program that raises :class:`ParametersReplaced` if it is called with others than these, by position, or if
    their shards have got another form."""
    positions, parameters = list(expected), list(expected.values())
    held: list[torch.Tensor] = []
    forms: list[Any] = []

    def run(*args: Any) -> Any:
        nonlocal held, forms
        if not all(map(is_, [args[i] for i in positions], parameters)):
            raise ParametersReplaced("a program was called with other parameters than it was made for")
        shards: list[torch.Tensor] = [p._local for p in parameters]  # type: ignore[attr-defined]
        if not (held and all(map(is_, shards, held))):
            found = [form_of(shard) for shard in shards]
            if forms and found != forms:
                raise ParametersReplaced("a parameter has a shard of another form than its program was made for")
            held, forms = shards, found
        return program(*args)

    return run


def form_of(local: torch.Tensor) -> Any:
    """Size, strides, dtype and device of a shard; None where they may change."""
    sizes = (*local.shape, *local.stride())
    return (sizes, local.dtype, local.device) if all(isinstance(n, int) for n in sizes) else None


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
    if _owner(name) in parameters or name.endswith(".__tensor_flatten__()[0]"):
        return False
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH":
        return False
    if name.endswith(".training"):
        return True
    if "type(L['model']" in name and ".__mro__[" in name:
        return False
    source = entry.orig_guard.source
    return not source.is_unspecialized_builtin_nn_module()


def _owner(name: str) -> str:
    """Of what is inside of a sharded tensor, the tensor."""
    return name.removesuffix("._inner").removesuffix(".__tensor_flatten__()[0]")


def _is_parameter(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and isinstance(value._spec, ParameterMeta)
