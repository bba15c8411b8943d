"""Preparing the configuration of a repeated ``generate``: transformers' own result, cached from the call before.

Of a call with plain arguments, ``GenerationMixin._prepare_generation_config`` takes longer than the prefill of a small
shard: it builds a default configuration, copies and checks it several times. What it returns depends on the model's
two configurations and on the arguments alone. So it is called once per kind of call, and copies of its result are
returned for as long as nobody has changed one of the configurations, anywhere inside of them.

Seen on transformers 5.17 and 5.22. Every import of transformers is inside of a function.
"""

from __future__ import annotations

import copy
import functools
import weakref
from enum import Enum
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

MAX_KINDS = 16
"""Kinds of calls whose results are cached for one model."""

_FIXED = (int, float, str, bytes, type(None), torch.dtype, torch.device, type, FunctionType, Enum)
"""Values that nobody can change: they are the same for as long as they are the same object."""

_prepared: weakref.WeakKeyDictionary[nn.Module, PreparedConfigs] = weakref.WeakKeyDictionary()


def install_prepared_configs(model: nn.Module) -> None:
    """Let ``generate`` of this object reuse the configurations that it has prepared, if it prepares them in
    transformers' own way."""
    from transformers.generation.utils import GenerationMixin

    name = "_prepare_generation_config"
    if name not in vars(GenerationMixin) or name in vars(model):
        return
    original: Any = vars(GenerationMixin)[name]
    is_own = getattr(type(model), name, None) is not original
    if is_own:
        return
    _prepared[model] = PreparedConfigs()
    if hasattr(original, "reuses"):
        return

    @functools.wraps(original)
    def _prepare_generation_config(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        known = _prepared.get(self)
        if known is None or generation_config is not None or args:
            return original(self, generation_config, *args, **kwargs)
        found = known.get(self, kwargs)
        if found is None:
            found = original(self, generation_config, **kwargs)
            known.keep(self, kwargs, found)
        return found

    _prepare_generation_config.reuses = True  # type: ignore[attr-defined]
    GenerationMixin._prepare_generation_config = _prepare_generation_config  # type: ignore[method-assign]


class PreparedConfigs:
    """The configurations that one model's ``generate`` has prepared."""

    def __init__(self) -> None:
        self._contents: Contents | None = None
        self._found: dict[Any, _Prepared] = {}

    def get(self, model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """What was prepared for arguments like these; None if nothing was, or the model's configurations are not what
        they were."""
        if self._contents is None:
            return None
        if not self._contents.unchanged((model.config, model.generation_config)):
            self._contents = None
            self._found.clear()
            return None
        found = self._found.get(_kind(kwargs))
        return None if found is None else found.again(kwargs)

    def keep(self, model: Any, kwargs: dict[str, Any], result: tuple[Any, dict[str, Any]]) -> None:
        """Keep a result for further calls with arguments like these, if it can be told when it holds no more."""
        from transformers import GenerationConfig

        if type(model.generation_config) is not GenerationConfig:
            return
        prepared = _Prepared.of(kwargs, *result)
        if self._contents is None:
            self._contents = Contents.of((model.config, model.generation_config))
        if prepared is None or self._contents is None:
            return
        while len(self._found) >= MAX_KINDS:
            self._found.pop(next(iter(self._found)))
        self._found[_kind(kwargs)] = prepared


class _Prepared:
    """A prepared configuration, and the arguments that are not part of it.

    Args:
        config: The configuration; nobody else has it.
        unused: The names of the arguments that are not part of it, in order.
        added: Plain values that it adds to those arguments.
    """

    def __init__(self, config: Any, unused: list[str], added: dict[str, Any]) -> None:
        self._class: Any = type(config)
        self._values = dict(vars(config))
        self._changeable = {k: v for k, v in self._values.items() if not isinstance(v, _FIXED)}
        self._unused, self._added = unused, added

    @classmethod
    def of(cls, kwargs: dict[str, Any], config: Any, others: dict[str, Any]) -> _Prepared | None:
        """The same as ``config`` and ``others``, which was prepared for these arguments."""
        unused = [name for name, value in others.items() if name in kwargs and value is kwargs[name]]
        added = {name: value for name, value in others.items() if name not in unused}
        if list(others) != [*unused, *added] or not all(isinstance(x, _FIXED) for x in added.values()):
            return None
        if any(_plain(kwargs[name]) is None for name in kwargs if name not in unused):
            return None  # an object of the user's became part of it
        return cls(copy.deepcopy(config), unused, added)

    def again(self, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A copy of the configuration, and the arguments of this call that are not part of it."""
        config = self._class.__new__(self._class)
        vars(config).update(self._values)
        if self._changeable:
            vars(config).update(copy.deepcopy(self._changeable))
        return config, {**{name: kwargs[name] for name in self._unused}, **self._added}


def _kind(kwargs: dict[str, Any]) -> Any:
    """Arguments that are prepared alike: the same names, of which all plain values are equal."""
    return tuple((name, _plain(value)) for name, value in kwargs.items())


def _plain(value: Any) -> Any:
    """A value that is equal for equal numbers, strings and lists and dictionaries of such, of the same types; None for
    others."""
    if isinstance(value, (list, tuple, dict)):
        items = [x for pair in value.items() for x in pair] if isinstance(value, dict) else value
        inside = tuple(map(_plain, items))
        return None if None in inside else (type(value), inside)
    return (type(value), value) if isinstance(value, _FIXED) and value == value else None


class Contents:
    """What some configurations consist of: their attributes, and what is in the lists, dictionaries and configurations
    among these.

    Args:
        roots: The configurations.
        containers: All that can change inside of them, and what each contained.
    """

    def __init__(self, roots: tuple[Any, ...], containers: list[tuple[Any, list[Any]]]) -> None:
        self._roots, self._containers = roots, containers

    @classmethod
    def of(cls, roots: tuple[Any, ...]) -> Contents | None:
        """The contents of configurations; None if there is something in them that may change unseen."""
        containers: list[tuple[Any, list[Any]]] = []
        seen: set[int] = set()
        left = list(roots)
        while left:
            value = left.pop()
            if isinstance(value, _FIXED) or id(value) in seen:
                continue
            container = value if type(value) in (list, tuple, set, frozenset, dict) else _attributes_of(value)
            if container is None:
                return None
            seen.add(id(value))
            inside = _inside(container)
            containers.append((container, inside))
            left += inside
        return cls(roots, containers)

    def unchanged(self, roots: tuple[Any, ...]) -> bool:
        """Whether these are the same configurations, and everything in them is still the same object."""
        if not all(map(is_, roots, self._roots)):
            return False
        for container, known in self._containers:
            inside = _inside(container)
            if len(inside) != len(known) or not all(map(is_, inside, known)):
                return False
        return True


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a configuration, all of which a change of it changes; None for other objects."""
    from transformers import GenerationConfig, PreTrainedConfig

    return vars(value) if isinstance(value, (PreTrainedConfig, GenerationConfig)) else None


def _inside(container: Any) -> list[Any]:
    return [*container, *container.values()] if type(container) is dict else list(container)
