"""Programs of a model's first blocks, run for all blocks.

A deep model is captured, rewritten and compiled with its head and two periods of blocks (:class:`FirstBlocks`); the
program of a period is called for each of them with their parameters and their layers of the KV cache. That holds if all
blocks do the same, which is checked for every new kind of call (:mod:`paraxis.capture.same_blocks`). Where they do not,
the model is captured with all its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..capture.first_blocks import FirstBlocks, FirstLayers
from ..capture.operators_run import is_cache
from ..capture.periods import Periods, find_periods
from ..capture.same_blocks import why_not_same
from ..graph.local_program import info_of
from ..graph.outline import Outline, Role, outline
from ..passes.lift import Lifted, lifted_of, like_shard
from ..tensor.sharded_tensor import ShardedTensor, shards_version
from .guards import ParametersReplaced, form_of, picker
from .model_watch import registrations
from .outlined_program import Arguments, CompilePiece, OutlinedProgram

NUMBERS = (int, float, str, type(None), torch.dtype)
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Tensor)


class NotRepeated(Exception):
    """The blocks of a model do not repeat in this kind of call."""


class BlockPrograms:
    """Calls of a model that run the programs of its first blocks.

    Args:
        model: The model.
        periods: Its blocks.
    """

    def __init__(self, model: nn.Module, periods: Periods) -> None:
        self.model, self.periods = model, periods
        self.small = FirstBlocks(model, periods, lambda forward: hasattr(forward, "leads_in"))
        self._container = model.get_submodule(periods.path)
        self.blocks: list[nn.Module] = list(self._container.children())
        others = list(_parts_of(model, periods))
        self._modules, self._types = others, list(map(type, others))
        self._attributes = [module.__dict__ for module in others]
        contents = list(_containers(self._attributes))
        self._dicts = [x for x in contents if isinstance(x, dict)]
        self._lists = [x for x in contents if not isinstance(x, dict)]
        self._parts: list[dict[str, Any]] = [held for m in others for held in (m._parameters, m._buffers, m._modules)]  # type: ignore[misc]
        self._seen, self._known = self._attributes_now(), self._parts_now()
        self._checked: Any = None
        self.refused: set[Any] = set()
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.cache: Any = None
        """The KV cache of the call that is running."""
        self._results: tuple[OutlinedProgram, list[Any]] | None = None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call may run these programs: without gradients, its arguments tensors and at most one KV cache
        with a layer for each block, of which those of the other blocks are like those of the first ones."""
        if torch.is_grad_enabled():
            return False
        caches = 0
        for value in (*args, *kwargs.values()):
            if is_cache(value):
                caches += 1
                if len(value.layers) != len(self.blocks) or not self._repeat(value.layers) or not _is_flat(value):
                    return False
            elif not _is_plain(value):
                return False
        return caches <= 1 and _kind(args, kwargs) not in self.refused

    def _repeat(self, layers: Sequence[Any]) -> bool:
        """Whether the layers of a KV cache have the classes and numbers of those that the programs are made with. Their
        tensors are looked at when a program is called."""
        periods = self.periods
        for like in range(periods.captured - periods.period, periods.captured):
            own, others = layers[like], layers[like + periods.period :: periods.period]
            names = [name for name, value in vars(own).items() if isinstance(value, NUMBERS)]
            numbers = attrgetter("__class__", *names)
            try:
                if set(map(numbers, others)) - {numbers(own)}:
                    return False
            except AttributeError:
                return False
        return True

    def changed(self, generating: Any = None) -> bool:
        """Whether somebody has changed the other blocks, which no guard looks at, so that these programs do not hold
        for them: not all repeat any more, or one has other parameters or modules than the programs were made with.

        It takes a tenth of a millisecond for ten thousand attributes. Within one call of ``generate``, which
        ``generating`` stands for, only hooks, modules and parameters that are registered and shards that are replaced
        are looked for after the first step.
        """
        if generating is not None:
            before, self._checked = self._checked, (generating, registrations(), shards_version())
            if before == self._checked:
                return False
        parts = self._parts_now()
        if len(parts) != len(self._known) or not all(map(is_, parts, self._known)):
            return True
        if not all(map(is_, map(type, self._modules), self._types)):
            return True
        seen, now = self._seen, self._attributes_now()
        if len(seen) != len(now):
            return True
        if all(map(is_, now, seen)):
            return False
        pairs = [pair for pair in zip(seen, now, strict=True) if pair[0] is not pair[1]]
        if not all(isinstance(x, NUMBERS) for pair in pairs for x in pair):
            return True
        self._seen = now
        if all(type(x) is type(y) and x == y for x, y in pairs):
            return False
        return find_periods(self.model) != self.periods

    def _attributes_now(self) -> list[Any]:
        """What the modules that are not captured have, and what is in their dictionaries and lists: adapters keep their
        scales in these."""
        values = map(dict.values, chain(self._attributes, self._dicts))
        return [*chain.from_iterable(values), *chain.from_iterable(self._dicts), *chain.from_iterable(self._lists)]

    def _parts_now(self) -> list[Any]:
        """The blocks, and the parameters, buffers and modules in those that are not captured."""
        return [*self._container._modules.values(), *chain.from_iterable(map(dict.values, self._parts))]

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls of this kind run the full model from now on."""
        self.refused.add(_kind(args, kwargs))

    def run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled entry point with the first blocks, and complete the results with those of the others."""
        self.small.update()
        cuts: list[FirstLayers] = []

        def cut(value: Any) -> Any:
            if not is_cache(value):
                return value
            cuts.append(FirstLayers(value, self.periods.captured))
            return cuts[-1].first

        few_args, few_kwargs = tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}
        self._call = args, kwargs
        self.cache = cuts[0].cache if cuts else None
        before = [dict(vars(layer)) for c in cuts for layer in c.cache.layers[: self.periods.captured]]
        try:
            result = compiled(self.small.model, *few_args, **few_kwargs)
            for c in cuts:
                c.give_back()
                result = _replaced(result, c.first, c.cache)
                self._complete(c.cache, before)
            for cache in [] if cuts else _caches_of(result):
                if not _is_flat(cache):
                    raise NotRepeated("the layers of its KV cache have more than tensors and numbers")
                self._complete(cache, None)
            return result
        finally:
            self._call, self.cache, self._results = ((), {}), None, None

    def _complete(self, cache: Any, before: list[dict[str, Any]] | None) -> None:
        """Give the layers of the other blocks what those of the first ones have got from the call."""
        if self._results is None:
            raise RuntimeError("the program of the first blocks has not run")
        program, results = self._results
        periods, own = self.periods, program.own
        positions = {id(x): i for i, x in enumerate(results[:own]) if isinstance(x, torch.Tensor)}
        per_period = program.extra[: len(program.extra) // (periods.count - 2)]
        for layer in range(periods.captured, len(self.blocks)):
            number, place = divmod(layer - periods.head, periods.period)
            like = periods.head + periods.period + place
            was = before[like] if before is not None else None
            target = cache.layers[layer]
            for name, value in vars(cache.layers[like]).items():
                if was is not None and name in was and was[name] is value:
                    continue
                position = positions.get(id(value)) if isinstance(value, torch.Tensor) else None
                if position is not None and position in per_period:
                    place_of = own + (number - 2) * len(per_period) + per_period.index(position)
                    setattr(target, name, results[place_of])
                elif not isinstance(value, torch.Tensor) or self._is_shared(name, was, target):
                    setattr(target, name, value)
                elif not self._take_over(target, name, was, value):
                    raise RuntimeError(f"layer {like} of the KV cache got a tensor {name!r} that no block computes")

    @staticmethod
    def _is_shared(name: str, was: dict[str, Any] | None, target: Any) -> bool:
        """Whether layers had the same tensor before."""
        return was is not None and was.get(name) is not None and vars(target).get(name) is was[name]

    @staticmethod
    def _take_over(target: Any, name: str, was: dict[str, Any] | None, value: torch.Tensor) -> bool:
        """Give a layer of another block a tensor like one that no block computes: a constant, or what the layer had
        itself. All layers are treated alike, which was checked (:mod:`paraxis.capture.same_blocks`)."""
        before, own = was.get(name) if was is not None else None, vars(target).get(name)
        if own is None and before is None:
            setattr(target, name, value.clone())  # each may be written to
            return True
        if not isinstance(own, torch.Tensor) or own.shape != value.shape:
            return False
        if before is None or before.device != value.device:  # of a new cache, or moved
            setattr(target, name, own.to(value.device))
            return True
        return before.data_ptr() == value.data_ptr() or bool(torch.equal(before, value))

    # -- making a program ------------------------------------------------------------------------------------------

    def outline(self, program: GraphModule, inputs: Sequence[Any]) -> OutlineOfCall:
        """Divide a lifted program of the first blocks; ``inputs`` are those that it was captured with.

        Raises:
            NotRepeated: It cannot stand for all blocks.
        """
        periods, lifted = self.periods, lifted_of(program)
        roles = self._roles(program, lifted, inputs)
        parts = outline(program, roles, periods.head, periods.period)
        if isinstance(parts, str):
            raise NotRepeated(parts)
        args, kwargs = self._call
        if why := why_not_same(self.model, self.small, args, kwargs):
            raise NotRepeated(why)
        return OutlineOfCall(self, program, parts, roles)

    def _roles(self, program: GraphModule, lifted: Lifted, inputs: Sequence[Any]) -> dict[Node, Role]:
        found: dict[int, list[Role]] = {}
        for i, block in enumerate(self.blocks[: self.periods.captured]):
            for name, tensor in (*block.named_parameters(), *block.named_buffers()):
                found.setdefault(id(tensor), []).append((f"block.{name}", i))
        if self.cache is not None:
            for i, layer in enumerate(self.cache.layers[: self.periods.captured]):
                for name, value in vars(layer).items():
                    if isinstance(value, torch.Tensor):
                        found.setdefault(id(value), []).append((f"cache.{name}", i))
        tensors = [*lifted.parameters, *(inputs[i] for i in lifted.inputs)]
        placeholders = program.graph.find_nodes(op="placeholder")
        roles = {
            node: own[0]
            for node, tensor in zip(placeholders, tensors, strict=True)
            if len(own := found.get(id(tensor), [])) == 1
        }
        captured = info_of(lifted.source).inputs
        examples = dict(zip(placeholders, [*lifted.parameters, *(captured[i] for i in lifted.inputs)], strict=True))
        return {**roles, **_roles_of_sizes(examples, roles)}

    def tensor(self, role: Role) -> Any:
        """The tensor, or the size of a tensor, that has this role in its block, in the current call."""
        if role[0].startswith("size."):
            _, dim, name = role[0].split(".", 2)
            return _sizes_of(self.tensor((name, role[1])))[int(dim)]
        kind, _, name = role[0].partition(".")
        if kind == "cache":
            return getattr(self.cache.layers[role[1]], name)
        path, _, leaf = name.rpartition(".")
        return getattr(self.blocks[role[1]].get_submodule(path), leaf)

    def note(self, program: OutlinedProgram, results: list[Any]) -> None:
        """Keep what a program has returned for :meth:`run`."""
        self._results = program, results


class OutlineOfCall:
    """The outline of one lifted program: the parameters and inputs of the blocks that it does not have.

    Attributes:
        parameters: Their parameters: arguments after those of the program.
        like: For each of their inputs, the position of the input of the program that it is like.
    """

    def __init__(self, owner: BlockPrograms, program: GraphModule, parts: Outline, roles: dict[Node, Role]) -> None:
        self._owner, self._program, self._parts, self._roles = owner, program, parts, roles
        periods, lifted = owner.periods, lifted_of(program)
        placeholders = program.graph.find_nodes(op="placeholder")
        count = len(lifted.parameters)
        later = periods.head + periods.period
        template = {node: i for i, node in enumerate(placeholders) if node in roles and roles[node][1] >= later}
        others = [
            (roles[node][0], block)
            for node in template
            for block in range(roles[node][1] + periods.period, len(owner.blocks), periods.period)
        ]
        by_role = {roles[node]: i for node, i in template.items()}

        def like(role: Role) -> int:
            return by_role[role[0], later + (role[1] - later) % periods.period]

        of_parameters = [role for role in others if like(role) < count]
        self._inputs = [role for role in others if like(role) >= count]
        named = [role[0].partition(".") for role in self._inputs]
        self._of_cache = [name if kind == "cache" else "" for kind, _, name in named]
        self.like = [like(role) - count for role in self._inputs]
        self.parameters: list[nn.Parameter] = [owner.tensor(role) for role in of_parameters]
        for role, parameter in zip(of_parameters, self.parameters, strict=True):
            known = lifted.parameters[like(role)]
            same = isinstance(parameter, ShardedTensor) == isinstance(known, ShardedTensor)
            if not same or form_of(like_shard(parameter)) != form_of(like_shard(known)):
                raise NotRepeated(f"{role[0]} of block {role[1]} has a shard of another form")
        slots: dict[Any, int] = {}
        for node in (*placeholders[:count], *of_parameters, *placeholders[count:], *self._inputs):
            slots[node] = len(slots)
        self._arguments = Arguments(placeholders, roles, others, slots)
        self._seen: list[Any] = []
        self._select = picker(self.like)

    def compiled(self, compile_piece: CompilePiece | None) -> OutlinedProgram:
        """The program of all blocks, its parts compiled by a function or, without one, run by Python."""
        periods, lifted = self._owner.periods, lifted_of(self._program)
        return OutlinedProgram(
            self._program,
            self._parts,
            self._arguments,
            periods.head,
            periods.period,
            periods.count,
            lifted.examples,
            lifted.fake_mode,
            compile_piece,
        )

    def inputs(self, own: Sequence[Any]) -> list[Any]:
        """The inputs of the other blocks; ``own`` are those of the program. Each must be like one of these.

        Raises:
            ParametersReplaced: It is not.
        """
        owner, cache = self._owner, self._owner.cache
        found = [
            getattr(cache.layers[role[1]], name) if name else owner.tensor(role)
            for role, name in zip(self._inputs, self._of_cache, strict=True)
        ]
        for tensor, like in zip(found, self._select(own), strict=True):
            if not _alike(tensor, like):
                raise ParametersReplaced("the layers of the KV cache differ in their form")
        return found

    def note(self, program: OutlinedProgram, results: list[Any]) -> None:
        """Keep what the program has returned for the call that is running."""
        self._owner.note(program, results)


def find_block_programs(model: nn.Module) -> BlockPrograms | None:
    """The programs of a model's first blocks, if its blocks repeat, and nobody has patched one of them: what a function
    captures may change, and differ between functions of the same code."""
    periods = find_periods(model)
    if periods is None or any("forward" in vars(module) for module in _parts_of(model, periods)):
        return None
    return BlockPrograms(model, periods)


def _parts_of(model: nn.Module, periods: Periods) -> Iterator[nn.Module]:
    """All modules of the blocks that are not captured."""
    blocks: list[nn.Module] = list(model.get_submodule(periods.path).children())
    return (module for block in blocks[periods.captured :] for module in block.modules())


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that hold parameters, modules and hooks, at which somebody else looks."""


def _containers(attributes: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """The dictionaries, lists and sets in some modules' attributes, and those inside of them."""
    found = [x for own in attributes for name, x in own.items() if name not in _OF_EVERY_MODULE]
    seen: set[int] = set()
    while found:
        value = found.pop()
        if isinstance(value, (dict, list, set)) and id(value) not in seen:
            seen.add(id(value))
            yield value
            found += value.values() if isinstance(value, dict) else value


def _sizes_of(tensor: Any) -> tuple[Any, ...]:
    """The sizes of a tensor, and of its shard."""
    return (*tensor.shape, *(tensor.local.shape if isinstance(tensor, ShardedTensor) else ()))


def _roles_of_sizes(examples: dict[Node, Any], roles: Mapping[Node, Role]) -> dict[Node, Role]:
    """Sizes among the inputs that are sizes of the tensors of one block: how long its layer of a KV cache is."""
    found: dict[str, dict[int, Role]] = {}
    for node, (name, block) in roles.items():
        for dim, size in enumerate(_sizes_of(examples[node])):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(str(size), {}).setdefault(block, (f"size.{dim}.{name}", block))
    sizes = {
        node: list(found.get(str(value), {}).values())
        for node, value in examples.items()
        if isinstance(value, torch.SymInt)
    }
    return {node: own[0] for node, own in sizes.items() if len(own) == 1}


def _alike(tensor: Any, like: Any) -> bool:
    if isinstance(like, int):
        return isinstance(tensor, int) and tensor == like
    if isinstance(like, ShardedTensor):
        if not isinstance(tensor, ShardedTensor) or tensor._spec != like._spec:
            return False
        tensor, like = tensor._local, like._local
    return bool(
        isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, ShardedTensor)
        and tensor.shape == like.shape
        and tensor.dtype == like.dtype
        and tensor.device == like.device
        and tensor.stride() == like.stride()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _is_flat(cache: Any) -> bool:
    """Whether the layers of a KV cache have tensors and numbers only, and it has no tensors beside them: what a call
    changes in containers, or in objects that a layer refers to, is not seen."""
    beside = [value for name, value in vars(cache).items() if name != "layers"]
    if not all(isinstance(value, (*NUMBERS, torch.device, type)) for value in beside):
        return False
    attributes: list[dict[str, Any]] = [layer.__dict__ for layer in cache.layers]
    types = set(map(type, chain.from_iterable(map(dict.values, attributes))))
    return all(issubclass(each, PLAIN) for each in types)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What distinguishes kinds of calls: which arguments there are, their dimensions, and the class of the cache."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, *(min(n, 2) for n in value.shape)
        return value if isinstance(value, (int, bool, str, type(None))) else type(value)

    return (*map(of, args), *((name, of(value)) for name, value in kwargs.items()))


def _caches_of(result: Any) -> list[Any]:
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    return [value for value in values if is_cache(value)]


def _replaced(result: Any, old: Any, new: Any) -> Any:
    """A result with ``new`` in place of ``old``."""
    if isinstance(result, dict):
        for name, value in list(result.items()):
            if value is old:
                result[name] = new
        return result
    if type(result) in (tuple, list):
        return type(result)(new if value is old else value for value in result)
    return new if result is old else result
