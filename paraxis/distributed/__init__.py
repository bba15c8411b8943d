"""Communication between the ranks: plain collectives, their differentiable forms, and redistribution."""

from ..errors import CollectiveError
from ..placement import ensure_divisibility
from .autograd import (
    differentiable_all_gather,
    differentiable_all_gather_reduce_scatter,
    differentiable_all_reduce_sum,
    differentiable_identity,
    differentiable_reduce_scatter_sum,
    differentiable_scatter,
)
from .collectives import (
    CollectiveCount,
    all_gather,
    all_reduce,
    broadcast,
    count_collectives,
    reduce_scatter,
    scatter,
    split,
)
from .redistribute import redistribute

__all__ = [
    "CollectiveCount",
    "CollectiveError",
    "all_gather",
    "all_reduce",
    "broadcast",
    "count_collectives",
    "differentiable_all_gather",
    "differentiable_all_gather_reduce_scatter",
    "differentiable_all_reduce_sum",
    "differentiable_identity",
    "differentiable_reduce_scatter_sum",
    "differentiable_scatter",
    "ensure_divisibility",
    "redistribute",
    "reduce_scatter",
    "scatter",
    "split",
]
