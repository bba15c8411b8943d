"""A deep model with its first blocks alone, for a compiler: it shares everything else with the model.

The modules on the way from the model to its list of blocks are copied, without what they contain; all others are the
model's own objects. So guards on the small model are guards on the model: an attribute of a block, a parameter, a hook
is the same object in both. What somebody changes on the copied modules themselves is taken over before every call.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from torch import nn

from ..compat.torch import COMPILED_CALL
from .periods import Periods

_OWN = ("forward", "generate", "get_compiled_call", COMPILED_CALL)
"""Attributes of a parallel model, and of its modules, that lead into its programs."""


class FirstBlocks:
    """The small model of a model.

    Args:
        model: The model.
        periods: Its blocks.
        leads_in: Whether the attribute ``forward`` of a module leads into a program.
    """

    def __init__(self, model: nn.Module, periods: Periods, leads_in: Callable[[Any], bool]) -> None:
        self.periods = periods
        container = model.get_submodule(periods.path)
        first = _empty(container)
        names = periods.path.split(".")
        chain = [model]
        for name in names[:-1]:
            chain.append(chain[-1].get_submodule(name))
        copies = [_empty(module) for module in chain]
        self._container = container
        self._pairs = list(zip((*chain, container), (*copies, first), strict=True))
        self._children = dict(zip(map(id, copies), zip(names, (*copies[1:], first), strict=True), strict=True))
        self._leads_in = leads_in
        self._seen: list[list[Any]] = []
        self.model: nn.Module = copies[0]
        self.update()

    def update(self) -> None:
        """Take over what was changed on the copied modules since the last time."""
        pairs, seen = self._pairs, self._seen
        now = [_held_by(module) for module, _ in pairs]
        if seen and all(len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(now, seen, strict=True)):
            return
        for module, copy in pairs:
            own = {name: value for name, value in module.__dict__.items() if name not in _OWN}
            forward = module.__dict__.get("forward")
            if forward is not None and not self._leads_in(forward):
                own["forward"] = forward
            children = dict(module._modules)
            if module is self._container:
                children = dict(list(children.items())[: self.periods.captured])
            else:
                name, child = self._children[id(copy)]
                children[name] = child
            copy.__dict__.clear()
            copy.__dict__.update(own, _modules=children)
        self._seen = now


def _held_by(module: nn.Module) -> list[Any]:
    """The attributes and children of a module; the copies share all its other dictionaries."""
    return [*module.__dict__.values(), *module._modules.values()]


def _empty(module: nn.Module) -> nn.Module:
    """A module of the same class, without anything in it."""
    made: nn.Module = object.__new__(type(module))
    return made


class FirstLayers:
    """A KV cache with its first layers alone; the layers are those of the cache.

    Args:
        cache: An object with a list ``layers``.
        count: How many of them.
    """

    def __init__(self, cache: Any, count: int) -> None:
        self.cache, self.count = cache, count
        self.first: Any = object.__new__(type(cache))
        self.update()

    def update(self) -> None:
        """Before a call: take over the attributes of the cache."""
        self.first.__dict__.clear()
        self.first.__dict__.update(self.cache.__dict__, layers=self.cache.layers[: self.count])

    def give_back(self) -> None:
        """After a call: give the cache the attributes that the call has set."""
        for name, value in self.first.__dict__.items():
            if name != "layers" and self.cache.__dict__.get(name) is not value:
                setattr(self.cache, name, value)
