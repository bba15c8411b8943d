"""The operators that a model runs, recorded block by block, without a compiler and without data.

To compile a program for one block and run it for eighty, one has to know that all eighty compute the same. Their
modules look the same, but a forward may do anything with its number. So the model runs once, in Python, on tensors
without data, and every operator is noted with where its arguments come from: in a second for eighty blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat.torch import TorchDispatchMode, pytree
from .trace import recording_operators

BEFORE = -1
"""The number of the segment before the first block; that after the last has the number of blocks."""

MAX_CONSTANT = 4096
"""Elements of a tensor that is compared by value, at most."""


@dataclass(frozen=True)
class Made:
    """A tensor that an operator has made: the segment, the operator's place in it, and which of its results."""

    segment: int
    place: int
    result: int = 0


@dataclass(frozen=True)
class State:
    """A parameter or buffer of a block, or a tensor in a layer of a KV cache; block -1 for all others."""

    block: int
    name: str


@dataclass
class Recording:
    """What a model has run.

    Attributes:
        segments: The operators, as (operator, arguments with tensors replaced by where they come from), by segment.
        layers: What the call has changed in each layer of the KV cache, by attribute.
        results: What it has returned, without the KV cache.
    """

    segments: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    results: Any = None


def record(model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Run the forward of a model on arguments without data, and record it.

    Args:
        model: The model.
        path: The name of its list of blocks.
        args: The arguments, which may hold a KV cache with one layer per block. They are not changed.
        kwargs: Likewise.

    Raises:
        Exception: whatever the forward raises on tensors without data.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(recording_operators())
        states = stack.enter_context(_without_data(model, path))
        args, kwargs = without_data((args, kwargs))
        caches = [cache for cache in (*args, *kwargs.values()) if is_cache(cache)]
        recorder = _Recorder(list(model.get_submodule(path).children()), stack)
        for tensor, state in states:
            recorder.know(tensor, state)
        before = [[dict(vars(layer)) for layer in cache.layers] for cache in caches]
        for cache in caches:
            for i, layer in enumerate(cache.layers):
                for name, tensor in tensors_of(layer).items():
                    recorder.know(tensor, State(i, f"cache.{name}"))
        for name, tensor in tensors_of((args, kwargs)).items():
            recorder.know(tensor, State(-1, name))
        with recorder, _Constants(recorder):
            result = type(model).forward(model, *args, **kwargs)
        made = [cache for cache in _caches_in(result) if not any(cache is c for c in caches)]
        for cache in made:
            before.append([{} for _ in cache.layers])
        found = recorder.recording
        found.layers = [{} for _ in recorder.blocks]
        for cache, was in zip((*caches, *made), before, strict=True):
            for i, layer in enumerate(cache.layers[: len(found.layers)]):
                found.layers[i].update(recorder.changes(layer, was[i]))
        found.results = recorder.described(result)
    return found


class _Recorder(TorchDispatchMode):
    """Notes every operator, with the block that runs it."""

    def __init__(self, blocks: Sequence[nn.Module], stack: ExitStack) -> None:
        super().__init__()
        self.blocks = blocks
        self.recording = Recording()
        self._from: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._segment = BEFORE
        for i, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(self._enter(i)).remove)
            stack.callback(block.register_forward_hook(self._leave(i)).remove)

    def _enter(self, block: int) -> Any:
        def hook(*_: Any) -> None:
            if block == 0:  # what comes between two blocks is part of the second
                self._segment = 0
            if self._segment != block:
                raise RuntimeError("the blocks do not run one after the other")

        return hook

    def _leave(self, block: int) -> Any:
        def hook(*_: Any) -> None:
            self._segment = block + 1

        return hook

    def know(self, tensor: torch.Tensor, where: Any) -> None:
        """Note where a tensor comes from, unless that is known."""
        if id(tensor) not in self._from:
            self._from[id(tensor)] = where
            self._alive.append(tensor)  # or its id would be that of another one

    def _where(self, tensor: torch.Tensor) -> Any:
        found = self._from.get(id(tensor))
        return found if found is not None else _constant(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operators = self.recording.segments.setdefault(self._segment, [])
        place = len(operators)
        operators.append((func, self._plain((args, kwargs))))
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and self._segment == BEFORE:
            self.know(result, self._where(args[0]))  # torch.tensor(0) for each block: known by its value, not its place
        for i, item in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(item, torch.Tensor):
                self.know(item, Made(self._segment, place, i))
        return result

    def _plain(self, tree: Any) -> Any:
        """The arguments of an operator: what they are, and how they are nested."""
        leaves: list[Any] = []

        def visit(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return (type(item), *map(visit, item))
            if isinstance(item, dict):
                return (dict, *((key, visit(value)) for key, value in item.items()))
            leaves.append(self._where(item) if isinstance(item, torch.Tensor) else _plain(item))
            return None

        nesting = visit(tree)
        return tuple(leaves), nesting

    def changes(self, layer: Any, before: dict[str, Any]) -> dict[str, Any]:
        """What the attributes of a layer are that were not so before; tensors by where they come from."""
        return {
            name: self._where(value) if isinstance(value, torch.Tensor) else _plain(value)
            for name, value in vars(layer).items()
            if name not in before or before[name] is not value
        }

    def described(self, result: Any) -> Any:
        """A result without KV caches, with tensors by where they come from."""
        if is_cache(result):
            return "cache"
        if isinstance(result, torch.Tensor):
            return self._where(result)
        if isinstance(result, dict):
            return tuple((k, self.described(v)) for k, v in result.items())
        if isinstance(result, (list, tuple)):
            return (type(result).__name__, *map(self.described, result))
        return _plain(result)


def _constant(tensor: torch.Tensor) -> Any:
    """A tensor that a forward makes of numbers, or refers to without registering it: by value."""
    unknown = type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.numel() > MAX_CONSTANT
    if unknown and tensor.numel() > 0:
        raise RuntimeError(f"a tensor of size {tuple(tensor.shape)} is no parameter, buffer, argument or constant")
    return "constant", tuple(tensor.shape), tensor.dtype, repr(tensor.tolist()) if tensor.numel() else ""


class _Constants(TorchFunctionMode):
    """Knows the tensors that a forward makes of numbers on the device of a tensor without data: no operator does."""

    made_by = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.made_by and result.is_meta:
            numbers = pytree.tree_leaves((args[1:] if func is torch.Tensor.new_tensor else args, kwargs))
            if all(_plain(x) is x for x in numbers):
                self.recorder.know(result, ("constant", tuple(result.shape), result.dtype, repr(numbers)))
        return result


def _plain(value: Any) -> Any:
    """A value that can be compared."""
    simple = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
    return value if isinstance(value, (*simple, torch.memory_format)) else type(value).__qualname__


def is_cache(value: Any) -> bool:
    """Whether a value is a KV cache: an object with a list of layers."""
    return not isinstance(value, nn.Module) and isinstance(getattr(value, "layers", None), list)


def _caches_in(result: Any) -> list[Any]:
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else [result]
    return [value for value in values if is_cache(value)]


def tensors_of(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors in an object, its containers and the objects that it refers to, by path."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found.setdefault(path, value)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                visit(item, f"{path}.{i}")
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}")
        elif _has_state(value) and id(value) not in seen:
            seen.add(id(value))
            for name, item in vars(value).items():
                visit(item, f"{path}.{name}" if path else name)

    visit(value, prefix)
    return found


def _has_state(value: Any) -> bool:
    """Whether an object may refer to tensors: KV caches, their layers; not modules, configurations and functions."""
    known = isinstance(value, (type, nn.Module)) or callable(value) or hasattr(value, "to_dict")
    return hasattr(value, "__dict__") and not known


def without_data(value: Any) -> Any:
    """A copy of arguments, with the objects and containers in them, and tensors without data in place of tensors."""
    memo: dict[int, Any] = {}
    for tensor in tensors_of(value).values():
        memo[id(tensor)] = _empty(tensor)
    for item in _objects_in(value):
        if hasattr(item, "to_dict") or isinstance(item, nn.Module):
            memo[id(item)] = item  # configurations are not copied
    result = copy.deepcopy(value, memo)
    for item in _objects_in(result):
        for name, held in list(vars(item).items()) if _has_state(item) else ():
            if isinstance(held, torch.device):
                setattr(item, name, torch.device("meta"))
    return result


def _objects_in(value: Any) -> Iterator[Any]:
    """The objects in arguments, containers aside, and those that KV caches refer to."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif hasattr(item, "__dict__") and not isinstance(item, torch.Tensor) and id(item) not in seen:
            seen.add(id(item))
            yield item
            if _has_state(item):
                waiting += vars(item).values()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), _strides(tensor), dtype=tensor.dtype, device="meta")


@contextmanager
def _without_data(model: nn.Module, path: str) -> Iterator[list[tuple[torch.Tensor, State]]]:
    """Inside, all parameters and buffers of a model are tensors without data, of the global shapes."""
    twins: dict[int, torch.Tensor] = {}
    blocks: dict[int, list[State]] = {}
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
    attributes = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
    try:
        for name, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                if held and not any(held is done for done, _ in replaced):
                    replaced.append((held, dict(held)))
                for leaf, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in twins:
                        twins[id(tensor)] = twin = _empty(tensor)
                        twins[id(twin)] = twin
                    held[leaf] = twins[id(tensor)]
                    blocks.setdefault(id(held[leaf]), []).append(_state(f"{name}.{leaf}" if name else leaf, path))
        tensors = {id(twin): twin for twin in twins.values()}
        yield [(tensors[key], _owned(states)) for key, states in blocks.items()]
        for name, module, own in attributes:
            if name.startswith(f"{path}.") and not _same(vars(module), own):
                raise RuntimeError(f"the forward of {name} sets attributes of the module")
    finally:
        for held, before in reversed(replaced):
            held.clear()
            held.update(before)
        for _, module, own in attributes:
            if not _same(vars(module), own):
                vars(module).clear()
                vars(module).update(own)


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(before.get(name) is value for name, value in now.items())


def _state(name: str, path: str) -> State:
    rest = name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else ""
    number, _, leaf = rest.partition(".")
    return State(int(number), leaf) if number.isdigit() else State(-1, name)


def _owned(states: Sequence[State]) -> State:
    """A tensor that several blocks share belongs to none of them."""
    first = states[0]
    alone = len({state.block for state in states}) == 1
    return first if alone else State(-1, f"shared {first.block} {first.name}")


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    strides, product = [], 1
    for size in reversed(tensor.shape):
        strides.append(product)
        product *= max(int(size), 1)
    return tuple(reversed(strides))
