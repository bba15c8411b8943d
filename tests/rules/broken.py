"""Rules that are wrong, each in its own way: validation has to find out."""

from __future__ import annotations

from typing import Any

import torch

from paraxis.placement import PARTIAL, REPLICATE, Shard
from paraxis.rules import Strategy
from paraxis.rules.validation.draw import f

aten = torch.ops.aten


def _same_dimension(call: Any, placements: Any) -> Any:
    """A transpose that does not move the layout."""
    if isinstance(placements[0], Shard):
        yield Strategy((placements[0],), (placements[0],))


def _partial_through_relu(call: Any, placements: Any) -> Any:
    """A nonlinear function of a sum is not the sum of the function."""
    if placements[0] == PARTIAL:
        yield Strategy((PARTIAL,), (PARTIAL,))


def _sum_of_copies(call: Any, placements: Any) -> Any:
    """Elements that are on two ranks are summed twice."""
    if isinstance(placements[0], Shard) and list(placements[0].dims) == [1]:
        layout = placements[0].dims[1]
        yield Strategy((Shard.of(1, layout), Shard.of(0, layout)), (PARTIAL,))


def _global_sizes(call: Any, placements: Any) -> Any:
    """A view with global sizes on a shard."""
    if isinstance(placements[0], Shard) and 1 in placements[0].dims:
        yield Strategy((placements[0],), (placements[0],))


def _softmax_anywhere(call: Any, placements: Any) -> Any:
    """A softmax along the sharded dimension."""
    if isinstance(placements[0], Shard):
        yield Strategy((placements[0],), (placements[0],))


def _claims_replicated(call: Any, placements: Any) -> Any:
    """The ranks do not hold the same values."""
    if isinstance(placements[0], Shard) and list(placements[0].dims) == [1]:
        yield Strategy((placements[0],), (REPLICATE,))


BROKEN = [
    (_same_dimension, aten.transpose.int, (f(8, 8), 0, 1)),
    (_partial_through_relu, aten.relu.default, (f(4, 8),)),
    (_sum_of_copies, aten.matmul.default, (f(4, 8), f(8, 6))),
    (_global_sizes, aten.reshape.default, (f(2, 8, 3), [2, 8, 3])),
    (_softmax_anywhere, aten.softmax.int, (f(4, 8), 1)),
    (_claims_replicated, aten.sum.dim_IntList, (f(4, 8), [1])),
]
"""(rule, operator, arguments)."""
