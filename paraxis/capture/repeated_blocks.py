"""Repeated blocks: a deep model is planned by the first blocks of each kind.

Two blocks are of one kind if everything that their forward can see is equal: classes, parameter shapes, attributes,
children, and their entries in the configuration. The plan of a block then holds for all blocks of its kind, and
planning time does not grow with depth. If two blocks differ nevertheless, the model is still correct: any placement of
parameters is valid, and everything else is solved again when the full model is captured to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat.torch import COMPILED_CALL
from ..tensor.pickling import REFUSES_PICKLING

MIN_BLOCKS = 4
"""Of shorter lists every block is planned."""


@dataclass
class Repeated:
    """A list of modules of which only the first ones are planned.

    Attributes:
        path: The name of the list in the model.
        container: The list.
        planned: How many of its first blocks are planned.
        like: For every other block, by index, the planned block of the same kind.
    """

    path: str
    container: nn.ModuleList
    planned: int
    like: dict[int, int]

    def renamed(self, name: str, index: int) -> str:
        """A name in the planned block of the same kind, translated to block ``index``; empty if it is not in there."""
        prefix = f"{self.path}.{self.like[index]}."
        return f"{self.path}.{index}.{name.removeprefix(prefix)}" if name.startswith(prefix) else ""


def find_repeated(model: nn.Module) -> list[Repeated]:
    """The outermost lists of modules with repeated blocks."""
    found: list[Repeated] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{r.path}.") for r in found):
            continue
        repeated = _repeated(path, module, model)
        if repeated is not None:
            found.append(repeated)
    return found


@contextmanager
def without_repeats(model: nn.Module, repeated: list[Repeated]) -> Iterator[None]:
    """Inside, the model has the planned blocks only, and its configuration, which KV caches are made from, too."""
    all_modules = [r.container._modules for r in repeated]
    changed: list[tuple[Any, str, Any]] = []
    planned = {len(r.container): r.planned for r in repeated}
    for config in _configs(model):
        count = getattr(config, "num_hidden_layers", None)
        if isinstance(count, int) and count in planned:
            changed.append((config, "num_hidden_layers", count))
        # Not by getattr: a configuration may raise for attributes that differ from layer to layer.
        lists = [(name, value) for name, value in vars(config).items() if isinstance(value, list)]
        changed += [(config, name, value) for name, value in lists if len(value) in planned]
    try:
        for r in repeated:
            r.container._modules = dict(list(r.container._modules.items())[: r.planned])
        for config, name, value in changed:
            setattr(config, name, value[: planned[len(value)]] if isinstance(value, list) else planned[value])
        yield
    finally:
        for r, modules in zip(repeated, all_modules, strict=True):
            r.container._modules = modules
        for config, name, value in changed:
            setattr(config, name, value)


def _configs(model: nn.Module) -> list[Any]:
    """The model's configuration and its nested configurations."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    return [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]


def _repeated(path: str, blocks: nn.ModuleList, model: nn.Module) -> Repeated | None:
    if len(blocks) < MIN_BLOCKS:
        return None
    kinds = kinds_of(blocks, model)
    planned = _prefix(kinds)
    if planned >= len(blocks):
        return None
    last = {kind: i for i, kind in enumerate(kinds[:planned])}
    return Repeated(path, blocks, planned, {i: last[kinds[i]] for i in range(planned, len(kinds))})


def kinds_of(blocks: nn.ModuleList, model: nn.Module) -> list[Any]:
    """What distinguishes the blocks of a list, by block: hashable, and equal for blocks of one kind."""
    views = [dict(_view(block)) for block in blocks]
    keys = set(views[0])
    numbers = {
        k for k in keys for first in (0, 1) if all(view.get(k) == ("plain", i + first) for i, view in enumerate(views))
    }
    entries = list(zip(*_entries(model, len(blocks)), strict=True)) or [()] * len(blocks)
    return [
        (entry, frozenset((k, v) for k, v in view.items() if k not in numbers))
        for view, entry in zip(views, entries, strict=True)
    ]


def _prefix(kinds: list[Any]) -> int:
    """The smallest number of first blocks that include two of every kind, or its only one."""
    missing = {kind: min(count, 2) for kind, count in Counter(kinds).items()}
    for i, kind in enumerate(kinds):
        if missing.get(kind):
            missing[kind] -= 1
            if not any(missing.values()):
                return i + 1
    return len(kinds)


def _entries(model: nn.Module, count: int) -> list[list[Any]]:
    """Lists in the configuration with one entry per block."""
    values = [v for config in _configs(model) for v in vars(config).values()]
    lists = [v for v in values if isinstance(v, (list, tuple)) and len(v) == count]
    return [[str(entry) for entry in values] for values in lists]


_OWN_PROGRAM = ("training", COMPILED_CALL, "compile", "_apply", REFUSES_PICKLING)
"""Attributes that a forward does not read, of the modules of a parallel model; the flag has an entry of its own."""


def _view(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything about a module that its forward can see, by path."""
    yield f"{prefix}#", (type(module), module.training)
    for name, value in vars(module).items():
        if name == "_modules":
            for child, inner in module._modules.items():
                if inner is not None:
                    yield from _view(inner, f"{prefix}{child}.")
        elif name in ("_parameters", "_buffers"):
            for leaf, tensor in value.items():
                yield f"{prefix}{leaf}", _plain(tensor)
        elif name not in _OWN_PROGRAM and value != {}:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """A hashable value, equal for attributes that a forward cannot distinguish."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)):
        return ("plain", value)
    if isinstance(value, dict):
        return ("dict", tuple(_plain(v) for v in value.values()), tuple(map(str, value)) if _named(value) else ())
    if isinstance(value, (list, tuple)):
        return ("list", tuple(map(_plain, value)))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(_plain, value)))
    if isinstance(value, partial):
        return ("partial", _plain(value.func), _plain(value.args), _plain(value.keywords))
    if callable(value) and not isinstance(value, (type, nn.Module)):
        return ("function", id(getattr(value, "__code__", None) or getattr(value, "__func__", value)))
    return ("object", id(value))


def _named(value: dict[Any, Any]) -> bool:
    """Whether the keys are names: those of hooks are running numbers."""
    return all(isinstance(key, str) for key in value)
