"""Notices what somebody changes on a model after it was compiled, at a few microseconds per call.

Dynamo does not guard on hooks, and the guards of a compiled program leave out torch's own modules and the classes of
modules (:mod:`.guards`). What they would notice is noticed here instead, without a loop in Python over all modules:

- torch counts the hooks that are registered in the process, and calls us for each module and parameter that is
  registered. Only after one of these counts has changed are the modules of the model looked at.
- A hook that is removed leaves fewer hooks; an attribute that is set on one of torch's modules, more attributes. Their
  numbers are summed up. The class of one of torch's modules is compared: assigning ``__class__`` is no call.
- Classes are few: the methods and constants of those that define a forward are compared one by one, and so are the
  methods of other classes that a program is made of (KV caches).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import getitem, is_, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ..compat.torch import COMPILED_CALL, global_module_hooks, module_hook_dicts
from .hooks import graph_hooks, has_python_hooks

_registrations = 0
_counting = False


def _count(*_: Any) -> None:
    global _registrations
    if not torch.compiler.is_compiling():  # a forward that builds modules would be guarded on the number of all others
        _registrations += 1


def registrations() -> tuple[int, int]:
    """Two numbers of which one changes when a hook, a module or a parameter is registered anywhere in the process. Of
    modules and parameters only once there is a :class:`ModelWatch`."""
    return _registrations, RemovableHandle.next_id


class ModelWatch:
    """What a module consists of, as far as a program that was compiled for it depends on it.

    Hooks of the module itself run around its program and are not looked at.

    Args:
        module: The module.
        torch_modules: Whether to look at the attributes of torch's own modules: where no guard does.
    """

    def __init__(self, module: nn.Module, torch_modules: bool) -> None:
        global _counting
        if not _counting:
            register_module_module_registration_hook(_count)
            register_module_parameter_registration_hook(_count)
            _counting = True
        self.module, self._torch_modules = module, torch_modules
        self.pure_hooks_in_python = False
        """Whether hooks that a graph could contain run in Python as well: one of them did break the graph."""
        self.python_hooks: list[str] = []
        """The submodules whose hooks must run in Python."""
        self.graph_hooks: tuple[int, ...] = ()
        """The ids of hooks that are part of the program: another program for other hooks."""
        self._names: set[str] = set()
        self._methods: set[tuple[type, str]] = set()
        self._look()

    def read_attributes(self, names: Iterable[str]) -> None:
        """Look at these attributes of torch's own modules from now on: a program has read them."""
        if self._torch_modules and not self._names.issuperset(names):
            self._names.update(names)
            self._look()

    def read_methods(self, methods: Iterable[tuple[type, str]]) -> None:
        """Look at these methods of classes, too, from now on: a program is made of them."""
        if not self._methods.issuperset(methods):
            self._methods.update(methods)
            self._look()

    def changed(self) -> bool:
        """Whether something may have changed since the last look. It takes microseconds, however large the model."""
        return not (
            self._seen == registrations()
            and self._hook_count == self._count_hooks()
            and self._classes_are_same()
            and all(map(is_, map(getattr, self._patchable, self._patched, repeat(None)), self._functions))
            and self._attribute_count == sum(map(len, self._attributes))
            and all(map(is_, map(type, self._torch_parts), self._types))
            and all(list(map(get, attributes)) == known for get, attributes, known in self._constants)
        )

    def watches(self, name: str, value: Any) -> bool:
        """Whether this is an attribute of a class that is compared in every call."""
        return any(known is value and member == name for member, known in zip(self._members, self._values))

    def _classes_are_same(self) -> bool:
        if sum(map(len, self._owners)) != self._class_size:  # one got another attribute, which may hide that of a base
            return False
        try:
            return all(map(is_, map(getitem, self._owners, self._members), self._values))
        except KeyError:  # one was deleted
            return False

    def look(self) -> bool:
        """Look at the model again. Whether programs that were compiled before are stale, whatever the hooks are."""
        before = self._parts
        self._look()
        return not same(before, self._parts)

    def hooks(self) -> tuple[tuple[int, ...], list[str]]:
        """The hooks that were found by the last look: those of the graph, and the submodules with others."""
        return self.graph_hooks, self.python_hooks

    def leave_graph(self) -> bool:
        """Run all of the user's hooks in Python from now on. Whether that changes something: some were in the graph."""
        before, self.pure_hooks_in_python = self.python_hooks, True
        self._look()
        return self.python_hooks != before

    def _count_hooks(self) -> int:
        own = sum(sum(map(len, map(hooks, modules))) for hooks, modules in self._hooked)
        return own + sum(map(len, global_module_hooks))

    def _look(self) -> None:
        named = [(name, module) for name, module in self.module.named_modules() if name]
        modules = [module for _, module in named]
        self._seen = registrations()
        self._hooked = [(hooks, with_hooks) for hooks in module_hook_dicts if (with_hooks := [*filter(hooks, modules)])]
        self._hook_count = self._count_hooks()
        pure_too = self.pure_hooks_in_python
        self.python_hooks = [name for name, module in named if has_python_hooks(module, pure_too)]
        if any(global_module_hooks):
            self.python_hooks = [name for name, _ in named]
        self.graph_hooks = tuple(
            key for module in {id(m): m for _, ms in self._hooked for m in ms}.values() for key in graph_hooks(module)
        )
        self._owners, self._members, self._values = class_members(dict.fromkeys(map(type, (self.module, *modules))))
        self._class_size = sum(map(len, self._owners))
        self._patchable, self._patched, self._functions = methods_now(self._methods)
        torchs = [m for m in modules if is_torch_class(type(m))] if self._torch_modules else []
        self._torch_parts, self._types = torchs, [type(module) for module in torchs]
        self._attributes = [module.__dict__ for module in torchs]
        self._attribute_count = sum(map(len, self._attributes))
        self._constants = [
            (itemgetter(name), with_name, [attributes[name] for attributes in with_name])
            for name in sorted(self._names)
            if (with_name := [attributes for attributes in self._attributes if name in attributes])
        ]
        # References, not ids: those of objects that are gone may be used again.
        self._parts: tuple[Sequence[Any], ...] = (
            modules,
            [type(module) for module in modules],
            [p for module in (self.module, *modules) for p in module._parameters.values()],
            [x for d in self._attributes for name, x in d.items() if callable(x) and name != COMPILED_CALL],
            self._values,
            self._functions,
            [x for _, _, known in self._constants for x in known],
        )


def same(before: tuple[Sequence[Any], ...], now: tuple[Sequence[Any], ...]) -> bool:
    """Whether both consist of the same objects, or of equal plain values."""
    return all(
        len(a) == len(b)
        and all(x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y) for x, y in zip(a, b))
        for a, b in zip(before, now, strict=True)
    )


_PLAIN = (int, float, str, tuple)


def is_torch_class(cls: type) -> bool:
    """Whether torch provides this class of modules: guards leave them out."""
    return cls.__module__.startswith(("torch.nn.", "torch.ao."))


def class_members(classes: Iterable[type]) -> tuple[list[Mapping[str, Any]], list[str], list[Any]]:
    """(dictionaries, names, values) of what classes of modules have, as far as forwards may use it: all that those with
    a forward define, and what these functions name of their base classes; of torch's, the forward alone.

    Lists, dictionaries and other objects are left to guards, which see what is inside of them.
    """
    found: dict[tuple[type, str], Any] = {}

    def add(base: type, names: Iterable[str]) -> set[str]:
        """Watch these members; the names that they use."""
        used: set[str] = set()
        for name in names:
            value = vars(base).get(name)
            if isinstance(value, (FunctionType, property, staticmethod, classmethod, *_PLAIN)):
                found[base, name] = value
                used |= names_used(value)
        return used

    for cls in classes:
        bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
        used: set[str] = set()
        for base in bases:
            if "forward" in vars(base):
                torchs = is_torch_class(base)
                used |= add(base, ["forward"] if torchs else [n for n in vars(base) if not n.startswith("__")])
        others = [base for base in bases if "forward" not in vars(base) and not is_torch_class(base)]
        seen: set[str] = set()
        while new := used - seen:
            seen |= new
            used = used.union(*(add(base, new & vars(base).keys()) for base in others))
    return [vars(cls) for cls, _ in found], [name for _, name in found], [*found.values()]


def methods_now(methods: Iterable[tuple[type, str]]) -> tuple[list[type], list[str], list[Any]]:
    """(classes, names, values) of these methods of classes, but for what is made anew by each look."""
    found = {(cls, name): getattr(cls, name, None) for cls, name in methods}
    found = {key: value for key, value in found.items() if value is None or isinstance(value, (FunctionType, property))}
    return [cls for cls, _ in found], [name for _, name in found], [*found.values()]


@lru_cache(maxsize=4096)
def names_used(member: Any) -> frozenset[str]:
    """The names of attributes that a function, method or property uses, with those of the functions inside of it."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    codes = [inspect.unwrap(function).__code__] if isinstance(function, FunctionType) else []
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return frozenset(names)
