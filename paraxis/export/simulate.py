"""Simulated ranks that run a sharded model as the other library would, as threads of this process.

They reproduce the semantics of a style: while a module's forward runs, it holds the rank's shard of the weight, and the
code around it sees local sizes. Code that assumes global sizes fails or computes something else, here as there. Outside
of its module's forward a sharded weight cannot be used: there it would be a DTensor, which does not mix with tensors.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import DisableTorchFunctionSubclass
from .styles import (
    COLUMN,
    EXPERTS,
    GATHERED,
    PACKED,
    ROW,
    ROW_SPLIT,
    VOCAB,
    Assignment,
    parse_parameter_style,
    shard_of,
)

TIMEOUT = 120.0


class ShardedWeightUsed(RuntimeError):
    """A sharded weight was used outside of its module's forward."""


class _WeightPlaceholder(Tensor):
    """A sharded weight outside of its module's forward: it has a size and a dtype, and supports nothing else."""

    _METHODS = ("size", "dim", "numel", "stride", "is_floating_point")
    _ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "grad", "data")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        getter = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and getter in cls._ATTRIBUTES) or name in cls._METHODS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ShardedWeightUsed(f"its sharded weight is used outside of its own forward ({name or func})")


class _Group:
    """The process group of the simulated ranks. A rank that fails releases the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._slots: list[Any] = [None] * world
        self._barrier = threading.Barrier(world)

    def all_gather(self, rank: int, value: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in order."""
        self._slots[rank] = value
        self._barrier.wait(TIMEOUT)
        values = list(self._slots)
        self._barrier.wait(TIMEOUT)
        if len({v.shape for v in values}) != 1:
            raise ValueError(f"the ranks have tensors of different sizes: {[tuple(v.shape) for v in values]}")
        return values

    def abort(self) -> None:
        """Release ranks that wait for one that failed."""
        self._barrier.abort()


class _Rank:
    """One rank: a copy of the model with sharded modules."""

    def __init__(self, model: nn.Module, rank: int, group: _Group) -> None:
        replicated = {id(p): p for p in model.parameters()}  # shared by all ranks, which only read them
        self.model = copy.deepcopy(model, replicated)
        self.rank, self.group = rank, group

    def shard(self, assignment: Assignment, names: Callable[[str], str]) -> None:
        """Shard the modules and parameters that have a style."""
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            style = assignment.get(names(name))
            if style is not None:
                own = dict(module.named_parameters(recurse=False))
                styles = {p: assignment.get(names(f"{name}.{p}")) for p in own}
                self._install(
                    module, style, {p: parse_parameter_style(way) for p, way in styles.items() if way is not None}
                )

    def _shards(
        self, full: dict[str, nn.Parameter], style: str, dims: dict[str, tuple[int, int] | None]
    ) -> dict[str, Tensor | None]:
        """This rank's shards of a module's parameters."""
        rank, world = self.rank, self.group.world
        if style in (COLUMN, GATHERED):
            return {name: shard_of(p, 0, 1, rank, world) for name, p in full.items()}
        if style == PACKED:
            return {name: shard_of(p, 0, 2 if p.ndim > 1 else 1, rank, world) for name, p in full.items()}
        if style in (ROW, ROW_SPLIT):
            shards: dict[str, Tensor | None] = {"weight": shard_of(full["weight"], 1, 1, rank, world)}
            # The bias is added once, after the all-reduce.
            return {**shards, "bias": None} if "bias" in full else shards
        if style == EXPERTS:
            return {name: shard_of(full[name], *way, rank, world) for name, way in dims.items() if way is not None}
        if style == VOCAB:
            return dict(full)  # a sharded lookup with an all-reduce equals the lookup in the full table
        raise ValueError(f"unknown style: {style}")

    def _install(self, module: nn.Module, style: str, dims: dict[str, tuple[int, int] | None]) -> None:
        """Replace the forward of a module by one on shards, with the collectives of its style."""
        forward, rank, group = module.forward, self.rank, self.group
        full = {name: p for name, p in module._parameters.items() if p is not None}
        shards = self._shards(full, style, dims)
        placeholders = {name: _placeholder(full[name]) for name in shards}
        bias = full.get("bias")

        def sharded_forward(*args: Any, **kwargs: Any) -> Any:
            if style == ROW_SPLIT:
                args = (shard_of(args[0], -1, 1, rank, group.world), *args[1:])
            elif style != EXPERTS:
                args = (args[0], *args[1:])  # the styles require the first argument to be positional
            module._parameters.update(shards)  # type: ignore[arg-type]
            try:
                output = forward(*args, **kwargs)
            finally:
                module._parameters.update(placeholders)  # type: ignore[arg-type]
            if style == GATHERED:
                return torch.cat(group.all_gather(rank, output), -1)
            if style in (ROW, ROW_SPLIT, EXPERTS):
                if not isinstance(output, Tensor):
                    raise TypeError(f"it returns a {type(output).__name__}, which cannot be all-reduced")
                total = _sum(group.all_gather(rank, output))
                return total if bias is None or style == EXPERTS else total + bias
            return output

        module.forward = sharded_forward  # type: ignore[method-assign]
        module._parameters.update(placeholders)  # type: ignore[arg-type]


def _placeholder(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="meta").as_subclass(_WeightPlaceholder)


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def run_sharded(
    model: nn.Module,
    assignment: Assignment,
    world: int,
    names: Callable[[str], str],
    call: Callable[[nn.Module], Any],
) -> list[Any]:
    """What ``call`` returns for the sharded model on every rank; raises the first error of a rank.

    Args:
        model: The full model.
        assignment: The styles, by names with ``*`` for block numbers.
        world: The number of ranks.
        names: Replaces the block numbers of a name by ``*``.
        call: Calls the model.
    """
    group = _Group(world)
    ranks = [_Rank(model, rank, group) for rank in range(world)]
    for each in ranks:
        each.shard(assignment, names)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = call(ranks[rank].model)
        except BaseException as error:
            errors[rank] = error
            group.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if causes or any(errors):
        raise causes[0] if causes else RuntimeError("the ranks run different collectives")
    return results
