"""Whether all blocks of a model do the same, as seen in what they run.

A model's first blocks are captured and compiled; the program of a period of blocks then runs for all of them. That is
right if the operators of every later period are those of the second one, on its own parameters and cache and the
results of the period before, and if what comes before and after the blocks is the same in the small model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .first_blocks import FirstBlocks, FirstLayers
from .operators_run import Made, Recording, State, is_cache, record
from .periods import Periods


def why_not_same(model: nn.Module, small: FirstBlocks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the program of the small model's blocks cannot stand for all blocks of ``model``; empty if it can.

    Args:
        model: The model.
        small: Its first blocks.
        args: Arguments of a call of the model.
        kwargs: Likewise.
    """
    periods = small.periods
    try:
        deep = record(model, periods.path, args, kwargs)
        first = record(small.model, periods.path, _with_layers(args, periods), _with_layers(kwargs, periods))
    except Exception as error:  # whatever a forward raises without data: then it is captured with all its blocks
        reason = (str(error).splitlines() or [""])[0]
        return f"its operators cannot be recorded: {type(error).__name__}: {reason}"
    return compare(deep, first, periods)


def _with_layers(values: Any, periods: Periods) -> Any:
    """Arguments, with KV caches cut to the layers of the small model."""

    def cut(value: Any) -> Any:
        return FirstLayers(value, periods.captured).first if is_cache(value) else value

    if isinstance(values, dict):
        return {name: cut(value) for name, value in values.items()}
    return tuple(map(cut, values))


def compare(deep: Recording, first: Recording, periods: Periods) -> str:
    """What distinguishes the blocks beyond the captured ones; empty if nothing does."""
    for segment in range(-1, periods.captured):
        if deep.segments.get(segment) != first.segments.get(segment):
            return f"block {segment} runs other operators in a model with fewer blocks"
    expected = _relative(deep, periods, 1)
    for number in range(2, periods.count):
        if _relative(deep, periods, number) != expected:
            return f"block {periods.head + number * periods.period} runs other operators than the blocks before it"
    if _after(deep, periods, periods.count) != _after(first, periods, 2):
        return "what follows the blocks depends on their number"
    return ""


def _relative(recording: Recording, periods: Periods, number: int) -> Any:
    """What a period runs and leaves in its cache, relative to the period."""
    start = periods.head + number * periods.period
    blocks = range(start, start + periods.period)
    relabel = _relabelled(start, periods.period)
    operators = [_mapped(recording.segments.get(b, []), relabel) for b in blocks]
    layers = [_mapped(recording.layers[b], relabel) for b in blocks if b < len(recording.layers)]
    return operators, layers


def _after(recording: Recording, periods: Periods, count: int) -> Any:
    """What comes after the blocks, relative to the last period of ``count``."""
    total = periods.head + count * periods.period
    relabel = _relabelled(total, periods.period)
    return _mapped(recording.segments.get(total, []), relabel), _mapped(recording.results, relabel)


def _relabelled(start: int, period: int) -> Callable[[Any], Any]:
    """Blocks of the period that begins at ``start``, and of the one before, are numbered from there."""

    def relabel(where: Any) -> Any:
        if isinstance(where, Made) and where.segment >= start - period:
            return replace(where, segment=("period", where.segment - start))  # type: ignore[arg-type]
        if isinstance(where, State) and where.block >= start:
            return replace(where, block=("period", where.block - start))  # type: ignore[arg-type]
        return where

    return relabel


def _mapped(tree: Any, relabel: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, relabel) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(item, relabel) for item in tree]
    return relabel(tree)
