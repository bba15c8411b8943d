"""Which of the compiler's guards are worth their time on every call.

Compiled code is guarded on everything it was compiled for, several times per parameter and in Python where a parameter
is a tensor of our own: for a model of some hundred parameters that takes longer than to run it. Where no gradients are
computed, all that matters of a parameter is that it is the one that was planned, and of a sharded cache that it is
sharded as it was. The compiled program sees that for itself, since it is called with them, and looks only at those that
it has not seen in the call before: it raises :class:`ParametersReplaced`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor, shards_version

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
    given, parameters = picker(expected), tuple(expected.values())
    held = HeldShards(parameters)

    def run(*args: Any) -> Any:
        if not all(map(is_, given(args), parameters)):
            raise ParametersReplaced("a program was called with other parameters than it was made for")
        held.shards()
        return program(*args)

    return run


class HeldShards:
    """The shards of some parameters. They are looked at again when a parameter, any one, was given another shard."""

    def __init__(self, parameters: Sequence[nn.Parameter], forms: list[Any] | None = None) -> None:
        self._parameters, self._forms, self._seen = parameters, forms, -1
        self._held: list[torch.Tensor] = []
        # torch refuses to swap what is inside of tensors to which there are weak references
        self._pins = [weakref.ref(p) for p in parameters]

    def shards(self) -> list[torch.Tensor]:
        """All of them; ``ParametersReplaced`` if their form is another than before."""
        if self._seen != shards_version():
            now: list[torch.Tensor] = [p._local for p in self._parameters]  # type: ignore[attr-defined]
            found = [form_of(shard) for shard in now]
            if self._forms is not None and found != self._forms:
                raise ParametersReplaced("a parameter has a shard of another form than its program was made for")
            self._held, self._forms, self._seen = now, found, shards_version()
        return self._held


def picker(positions: Iterable[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the items at these positions out of a tuple."""
    several = tuple(positions)
    if len(several) < 2:
        return lambda items: tuple(items[i] for i in several)
    return itemgetter(*several)


def form_of(local: torch.Tensor) -> Any:
    """Size, strides, dtype and device of a shard; None where they may change."""
    sizes = (*local.shape, *local.stride())
    return (sizes, local.dtype, local.device) if all(isinstance(n, int) for n in sizes) else None


def needed_guards(entries: Sequence[Any]) -> list[bool]:
    """For ``torch.compile``'s ``guard_filter_fn``: which guards to keep.

    Left out are those on sharded parameters, on what is inside of other sharded tensors but the first (caches of all
    layers lie in memory alike, and change alike), on torch's own modules except for whether they are in training, on
    the attributes of the classes of modules and caches, and on global names of modules, classes and built-in functions.
    """
    if torch.is_grad_enabled():
        return [True] * len(entries)
    sharded = {e.name: e.value for e in entries if e.has_value and isinstance(e.value, ShardedTensor)}
    sharded.pop(next((name for name, value in sharded.items() if not _is_parameter(value)), ""), None)
    return [_is_needed(e, sharded) for e in entries]


_OF_CLASSES = re.compile(r"\btype\((L\[')?(model|args|kwargs)\b")
"""In names of guards: attributes of the class of a module of the model, or of what the model is called with."""
_CONSTANT = ("MODULE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH")


def _is_needed(entry: Any, sharded: dict[str, ShardedTensor]) -> bool:
    name = entry.name
    owner = _owner(name)
    if owner in sharded and (owner != name or _is_parameter(sharded[owner])):
        return False
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH":
        return False
    if name.endswith(".training"):
        return True
    if _OF_CLASSES.search(name) or (name.startswith("G[") and entry.guard_type in _CONSTANT):
        return False
    source = entry.orig_guard.source
    return not source.is_unspecialized_builtin_nn_module()


def _owner(name: str) -> str:
    """Of what is inside of a sharded tensor, the tensor."""
    return name.removesuffix("._inner").removesuffix(".__tensor_flatten__()[0]")


def _is_parameter(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and isinstance(value._spec, ParameterMeta)
