"""Ranks that run a split model as the other library would, as threads of this process.

What is copied is the meaning of a style: a rank's module holds its part of the weight while its forward runs, and the
code around it sees the sizes of that part. Code that counts on whole sizes fails or gives something else, here as it
would there. Outside of its module's forward a split weight cannot be used at all, for there it is a DTensor that plain
tensors do not mix with.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .styles import COLUMN, EXPERTS, GATHERED, PACKED, ROW, ROW_SPLIT, VOCAB, Assignment, cut, parse_cut

TIMEOUT = 120.0


class SplitWeightUsed(RuntimeError):
    """A split weight was used outside of its module's forward."""


class _Elsewhere(Tensor):
    """Stands for a split weight outside of its module's forward: it tells its size and dtype, and no more."""

    _CALLED = ("size", "dim", "numel", "stride", "is_floating_point")
    _ASKED = ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "grad", "data")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        getter = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and getter in cls._ASKED) or name in cls._CALLED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise SplitWeightUsed(f"its split weight is used outside of its own forward ({name or func})")


class _Meeting:
    """Where the ranks exchange tensors. A rank that fails lets the others go."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._slots: list[Any] = [None] * world
        self._barrier = threading.Barrier(world)

    def all(self, rank: int, value: Tensor) -> list[Tensor]:
        """The values of all ranks, in their order."""
        self._slots[rank] = value
        self._barrier.wait(TIMEOUT)
        values = list(self._slots)
        self._barrier.wait(TIMEOUT)
        if len({v.shape for v in values}) != 1:
            raise ValueError(f"the ranks have tensors of different sizes: {[tuple(v.shape) for v in values]}")
        return values

    def leave(self) -> None:
        self._barrier.abort()


class _Rank:
    """One rank: a copy of the model in which modules are split."""

    def __init__(self, model: nn.Module, rank: int, meeting: _Meeting) -> None:
        shared = {id(p): p for p in model.parameters()}  # whole weights are read by all ranks, written by none
        self.model = copy.deepcopy(model, shared)
        self.rank, self.meeting = rank, meeting

    def split(self, assignment: Assignment, names: Callable[[str], str]) -> None:
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            style = assignment.get(names(name))
            if style is not None:
                own = dict(module.named_parameters(recurse=False))
                ways = {p: assignment.get(names(f"{name}.{p}")) for p in own}
                self._install(module, style, {p: parse_cut(way) for p, way in ways.items() if way is not None})

    def _install(self, module: nn.Module, style: str, cuts: dict[str, tuple[int, int] | None]) -> None:
        forward, rank, world, meeting = module.forward, self.rank, self.meeting.world, self.meeting
        local: dict[str, Tensor | None] = {}
        whole = {name: p for name, p in module._parameters.items() if p is not None}
        if style in (COLUMN, GATHERED):
            local = {name: cut(p, 0, 1, rank, world) for name, p in whole.items()}
        elif style == PACKED:
            local = {name: cut(p, 0, 2 if p.ndim > 1 else 1, rank, world) for name, p in whole.items()}
        elif style in (ROW, ROW_SPLIT):
            local = {"weight": cut(whole["weight"], 1, 1, rank, world)}
            if "bias" in whole:
                local["bias"] = None  # added once, after the sum
        elif style == EXPERTS:
            local = {name: cut(whole[name], *way, rank, world) for name, way in cuts.items() if way is not None}
        elif style == VOCAB:
            local = dict(whole)  # looking up in parts and summing gives the look-up in the whole table
        else:
            raise ValueError(f"unknown way to split: {style}")
        away = {name: _elsewhere(whole[name]) for name in local}
        bias = whole.get("bias")

        def split_forward(*args: Any, **kwargs: Any) -> Any:
            if style == ROW_SPLIT:
                args = (cut(args[0], -1, 1, rank, world), *args[1:])
            elif style != EXPERTS:
                args = (args[0], *args[1:])  # the styles take the first argument by position
            module._parameters.update(local)  # type: ignore[arg-type]
            try:
                output = forward(*args, **kwargs)
            finally:
                module._parameters.update(away)  # type: ignore[arg-type]
            if style == GATHERED:
                return torch.cat(meeting.all(rank, output), -1)
            if style in (ROW, ROW_SPLIT, EXPERTS):
                if not isinstance(output, Tensor):
                    raise TypeError(f"it returns a {type(output).__name__}, which cannot be summed")
                total = _sum(meeting.all(rank, output))
                return total if bias is None or style == EXPERTS else total + bias
            return output

        module.forward = split_forward  # type: ignore[method-assign]
        module._parameters.update(away)  # type: ignore[arg-type]


def _elsewhere(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="meta").as_subclass(_Elsewhere)


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def run_split(
    model: nn.Module,
    assignment: Assignment,
    world: int,
    names: Callable[[str], str],
    call: Callable[[nn.Module], Any],
) -> list[Any]:
    """What ``call`` returns for the split model on every rank; the first error of a rank is raised.

    Args:
        model: The whole model.
        assignment: What is split, by names with block numbers left open.
        world: The number of ranks.
        names: Leaves the block numbers of a name open.
        call: Calls the model.
    """
    meeting = _Meeting(world)
    ranks = [_Rank(model, rank, meeting) for rank in range(world)]
    for each in ranks:
        each.split(assignment, names)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = call(ranks[rank].model)
        except BaseException as error:
            errors[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if own or any(errors):
        raise own[0] if own else RuntimeError("the ranks do not take the same steps")
    return results
