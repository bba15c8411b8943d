"""Running a strategy on simulated ranks: shard the inputs, run each rank in turn, unshard the results, compare.

Nothing here knows how a rule works. The call of a rank is the one that the partitioner would emit.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch

from ...compat.torch import pytree
from ...placement import Layout, Partial, Placement, Replicate, Shard, local_shape
from ..base import Call, Localize, Strategy, Tensor, draws

aten = torch.ops.aten


def indices(layout: Layout, size: int, rank: int) -> list[int]:
    """The indices of a dimension that a rank holds, in order."""
    return [i for i in range(size) if any(a <= i % layout.period < b for a, b in layout.ranges[rank])]


@lru_cache(maxsize=4096)
def _held(layout: Layout, size: int, rank: int) -> torch.Tensor:
    return torch.tensor(indices(layout, size, rank), dtype=torch.long)


def indices_of(shape: Sequence[int], placement: Placement, rank: int) -> tuple[torch.Tensor, ...]:
    """The elements of a tensor that a rank holds, as an index for tensors on any device."""
    box = placement.dims if isinstance(placement, Shard) else {}
    held = [_held(box[d], n, rank) if d in box else torch.arange(n) for d, n in enumerate(shape)]
    return torch.meshgrid(*held, indexing="ij") if held else ()


def shard_of(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor that is replicated or sharded."""
    if isinstance(placement, Shard):
        for dim, layout in placement.layouts:
            tensor = tensor.index_select(dim, _held(layout, tensor.shape[dim], rank).to(tensor.device))
    return tensor


def terms(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Random terms that sum to the tensor."""
    if tensor.dtype == torch.bool:
        return [tensor, *[torch.zeros_like(tensor)] * (world - 1)]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        rest = [torch.randn(tensor.shape, dtype=tensor.dtype).to(tensor.device) for _ in range(world - 1)]
    else:
        rest = [torch.randint(0, 5, tensor.shape).to(tensor) for _ in range(world - 1)]
    return [tensor - reduce(operator.add, rest), *rest]


def unshard(parts: list[torch.Tensor], placement: Placement, full: torch.Tensor) -> torch.Tensor | str:
    """The full tensor (of the shape of ``full``) from what the ranks hold, or what is wrong with that."""
    world = len(parts)
    for rank, part in enumerate(parts):
        expected = local_shape(placement, full.shape, rank)
        if tuple(part.shape) != expected:
            return f"rank {rank} holds {tuple(part.shape)}, but its placement says {expected}"
    if isinstance(placement, Partial):
        return reduce(operator.add, parts)
    result = torch.zeros_like(parts[0].new_empty(full.shape))
    written = torch.zeros(full.shape, dtype=torch.bool, device=parts[0].device)
    for rank in range(world):
        if not parts[rank].numel():
            continue
        index = indices_of(full.shape, placement, rank)
        old, seen = result[index], written[index]
        if bool(seen.any()) and not same(torch.where(seen, old, parts[rank]), parts[rank]):
            return f"rank {rank} disagrees with another rank that holds the same elements"
        result[index], written[index] = parts[rank], True
    return result if bool(written.all()) else "some elements are on no rank"


def same(a: torch.Tensor, b: torch.Tensor, loose: bool = False) -> bool:
    """Whether two tensors are equal, up to the rounding of the dtype, or of float32 (``loose``)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    error = 1e-4 if loose or a.dtype not in (torch.float64, torch.complex128) else 1e-9
    if a.dtype in (torch.float16, torch.bfloat16):
        error = 3e-2
    return bool(torch.allclose(a, b, rtol=error, atol=error, equal_nan=True))


def is_tensor(x: Any) -> bool:
    """Whether an argument is a tensor."""
    return isinstance(x, torch.Tensor)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments or results, in order."""
    return [t for t in pytree.tree_leaves(tree) if is_tensor(t)]


def call_of(target: Any, args: Any, kwargs: dict[str, Any], world: int) -> tuple[Call, list[torch.Tensor]]:
    """The call as the solver sees it, and its tensors in order."""
    trial = Trial.of(target, args, kwargs, world)
    return trial.call, trial.tensors


@dataclass(eq=False)
class Trial:
    """A call with real tensors and its unsharded results, with which those of strategies are compared."""

    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]

    @classmethod
    def of(cls, target: Any, args: Any, kwargs: dict[str, Any], world: int) -> Trial:
        """Run the call once, for its results."""
        count = itertools.count()

        def abstract(x: Any) -> Any:
            return Tensor(next(count), tuple(x.shape), x.dtype) if is_tensor(x) else x

        a, k = pytree.tree_map(abstract, (tuple(args), kwargs))
        tensors, results = tensors_in((args, kwargs)), tensors_in(target(*args, **kwargs))
        inputs = tuple(Tensor(i, tuple(t.shape), t.dtype) for i, t in enumerate(tensors))
        outputs = tuple(Tensor(i, tuple(t.shape), t.dtype) for i, t in enumerate(results))
        return cls(Call(target, a, k, inputs, outputs, world=world), tuple(args), kwargs, tensors, results)

    def fits(self, strategy: Strategy) -> bool:
        """Whether the layouts of a strategy divide the sizes. The solver uses no others."""
        return _fit(self.call.inputs, strategy.inputs) and _fit(self.call.outputs, strategy.outputs)

    @property
    def loose(self) -> bool:
        """Whether values have no more than the precision of float32."""
        return any(t.dtype == torch.float32 for t in (*self.tensors, *self.results))

    def placed(self, inputs: Sequence[Placement]) -> list[list[torch.Tensor]]:
        """What every rank holds of the inputs, placed like this."""
        world = self.call.world
        summed = {i: terms(t, world) for i, t in enumerate(self.tensors) if isinstance(inputs[i], Partial)}
        return [
            [summed[i][rank] if i in summed else shard_of(t, inputs[i], rank) for i, t in enumerate(self.tensors)]
            for rank in range(world)
        ]

    def run(
        self, tensors: Sequence[torch.Tensor], localize: Localize | None = None, rank: int = 0
    ) -> list[torch.Tensor]:
        """The results of the call with other tensors, as a rank makes it."""
        target, mine = self.call.target, iter(tensors)
        if target is aten.view.default:  # like the partitioner: a shard may not be contiguous where the full tensor was
            target = aten.reshape.default
        a, k = pytree.tree_map(lambda x: next(mine) if is_tensor(x) else x, (self.args, self.kwargs))
        a = list(a)
        if localize is not None:
            target, a, k = localize(target, a, k, rank)
        return tensors_in(target(*a, **k))

    def run_all(self, inputs: Sequence[Placement], localize: Localize | None = None) -> list[list[torch.Tensor]]:
        """The results of every rank, with the inputs placed like this."""
        return [self.run(tensors, localize, rank) for rank, tensors in enumerate(self.placed(inputs))]

    def problem(self, strategy: Strategy, values: bool = True) -> str | None:
        """What is wrong with a strategy; None if nothing is. ``values=False``: compare shapes only."""
        call = self.call
        malformed = _malformed(call.inputs, strategy.inputs) or _malformed(call.outputs, strategy.outputs)
        if malformed is not None:
            return malformed
        if not self.fits(strategy):
            return None
        mixed = _replicated_beside_sharded(call, strategy)
        if mixed is not None:
            return mixed
        if draws(call) and not all(isinstance(p, Shard) and not p.has_copies for p in strategy.outputs):
            return "the operator draws random numbers, and ranks that hold the same elements would draw different ones"
        try:
            results = self.run_all(strategy.inputs, strategy.localize)
        except Exception as error:
            return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        for rank, result in enumerate(results):
            if len(result) != len(call.outputs):
                return f"rank {rank} has {len(result)} results, the unsharded call has {len(call.outputs)}"
        for i, placement in enumerate(strategy.outputs):
            parts = [r[i] for r in results]
            found = self.difference(i, parts if values else [torch.zeros_like(p) for p in parts], placement, values)
            if found is not None:
                return f"output {i}: {found}"
        return None

    def difference(
        self, output: int, parts: list[torch.Tensor], placement: Placement, values: bool = True
    ) -> str | None:
        """Why an output, placed like this, is not the unsharded result; None if it is."""
        found = unshard(parts, placement, self.results[output])
        if isinstance(found, str):
            return found
        if values and not same(found, self.results[output], self.loose):
            return "the unsharded shards are not the result"
        return None


def _malformed(tensors: Sequence[Tensor], placements: Sequence[Placement]) -> str | None:
    """Whether there are too few or too many placements, or one of them shards a dimension that does not exist."""
    if len(placements) != len(tensors):
        return f"{len(placements)} placements for {len(tensors)} tensors"
    for t, p in zip(tensors, placements):
        if isinstance(p, Shard) and any(not 0 <= d < t.ndim for d in p.dims):
            return f"the placement {p} shards a dimension that a tensor of shape {t.shape} does not have"
    return None


def _replicated_beside_sharded(call: Call, strategy: Strategy) -> str | None:
    """Whether a replicated result beside a sharded one would make the gradient of a replicated input wrong.

    Where a result is sharded, each rank uses a replicated input for its own part, and its gradient is partial. A
    replicated result beside it has its full gradient on every rank, which would be summed once per rank.
    """
    if not strategy.is_sharded or not any(isinstance(p, Replicate) for p in strategy.inputs):
        return None
    for i, (tensor, placement) in enumerate(zip(call.outputs, strategy.outputs)):
        if isinstance(placement, Replicate) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return f"output {i} is replicated beside a sharded one: its gradient would be summed once per rank"
    return None


def _fit(tensors: Iterable[Tensor], placed: Iterable[Placement]) -> bool:
    """Whether all layouts divide the sizes of the tensors."""
    return all(
        x.fits(t.shape[d]) for t, p in zip(tensors, placed, strict=True) if isinstance(p, Shard) for d, x in p.layouts
    )
