"""Redistribution between all pairs of placements: values, and gradients by the convention of `placement`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.host_calls import count_calls
from helpers.shards import local_shard, pad_to_full, sum_shards

from paraxis.distributed import redistribute
from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Placement, Shard
from ranks import RankPool

SHAPE = (8, 12, 7, 3)


def placements(world: int) -> dict[str, Placement]:
    """One of every kind. The last dimension has fewer indices than four ranks."""
    even = Layout.even
    found: dict[str, Placement] = {
        "replicate": REPLICATE,
        "partial": PARTIAL,
        "shared": SHARED,
        "even": Shard.of(1, even(12, world)),
        "even, first": Shard.of(0, even(8, world)),
        "uneven": Shard.of(2, even(7, world)),
        "packed": Shard.of(1, Layout.concat([(8, even(8, world)), (4, even(4, world))])),
        "packed, part shared": Shard.of(1, Layout.concat([(8, even(8, world)), (4, Layout.full(world))])),
        "repeating": Shard.of(1, even(4, world)),
    }
    if world == 4:
        found["two heads"] = Shard.of(1, even(12, 4, unit=6))
        found["empty"] = Shard.of(3, even(3, 4))
        rows = Layout.of(8, [[(r // 2 * 4, r // 2 * 4 + 4)] for r in range(4)])
        columns = Layout.of(12, [[(r % 2 * 6, r % 2 * 6 + 6)] for r in range(4)])
        found["two dims"] = Shard.of({0: rows, 1: columns})
    return found


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(placement: Placement, world: int) -> list[torch.Tensor]:
    """What every rank holds of the tensor `noise(0)`."""
    full = noise(0)
    if placement == PARTIAL:
        terms = [noise(1 + rank) for rank in range(world - 1)]
        return [*terms, full - sum(terms)]
    return [local_shard(full, placement, rank) for rank in range(world)]


def gradients(placement: Placement, world: int) -> list[torch.Tensor]:
    """What every rank holds of the gradient `noise(100)`: in arbitrary parts where elements have copies."""
    full = noise(100)
    if not isinstance(placement, Shard):
        return [full] * world
    parts, rest = [], full.clone()
    later = torch.zeros(SHAPE)
    holders = [pad_to_full(torch.ones_like(local_shard(full, placement, r)), placement, SHAPE, r) for r in range(world)]
    for rank in range(world):
        later = sum(holders[rank + 1 :], torch.zeros(SHAPE))
        part = torch.where(later > 0, noise(101 + rank), rest) * holders[rank]
        rest = rest - part
        parts.append(local_shard(part, placement, rank))
    return parts


def move(source: Placement, target: Placement, world: int, compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    run = torch.compile(redistribute, backend="aot_eager", fullgraph=True) if compiled else redistribute
    x = values(source, world)[rank].clone().requires_grad_()
    y = run(x, source, target, SHAPE, dist.group.WORLD)
    y.backward(gradients(target, world)[rank])
    assert x.grad is not None
    return y.detach(), x.grad


def move_all(world: int) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    pairs = itertools.islice(itertools.product(placements(world).items(), repeat=2), 0, None, world - 1)
    return {(a, b): move(source, target, world) for (a, source), (b, target) in pairs}


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_between_all_pairs(ranks: Callable[[int], RankPool], world: int) -> None:
    results = ranks(world).run(move_all, world)
    known, full, gradient = placements(world), noise(0), noise(100)
    assert len(results[0]) >= len(known) ** 2 // (world - 1)  # with many ranks a subset of the pairs
    for a, b in results[0]:
        source, target = known[a], known[b]
        moved = [result[a, b][0] for result in results]
        grads = [result[a, b][1] for result in results]
        if target == PARTIAL:
            torch.testing.assert_close(torch.stack(moved).sum(0), full, msg=f"{a} to {b}")
        else:
            for rank, y in enumerate(moved):
                expected = local_shard(full, target, rank)
                torch.testing.assert_close(y, expected, msg=lambda m, p=(a, b): f"{p}: {m}")
        if isinstance(source, Shard):
            grads = [sum_shards(grads, source, SHAPE)]
        for grad in grads:
            torch.testing.assert_close(grad, gradient, msg=lambda m, p=(a, b): f"gradient, {p}: {m}")


def move_compiled() -> None:
    known = placements(2)
    for pair in [
        ("replicate", "even"),
        ("replicate", "even, first"),
        ("replicate", "uneven"),
        ("replicate", "packed"),
        ("replicate", "shared"),
        ("replicate", "partial"),
        ("even", "replicate"),
        ("even, first", "replicate"),
        ("packed", "replicate"),
        ("partial", "replicate"),
        ("partial", "even"),
        ("partial", "even, first"),
        ("partial", "packed"),
    ]:
        source, target = (known[name] for name in pair)
        torch._dynamo.reset()
        eager, compiled = move(source, target, 2), move(source, target, 2, compiled=True)
        torch.testing.assert_close(compiled, eager, msg=lambda m, p=pair: f"{p}: {m}")


@pytest.mark.long
def test_compiled_redistribution_is_that_of_eager(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(move_compiled)


def test_the_reference_gives_every_element_its_gradient() -> None:
    for placement in placements(4).values():
        if isinstance(placement, Shard):
            torch.testing.assert_close(sum_shards(gradients(placement, 4), placement, SHAPE), noise(100))


def calls_of_redistributing(size: int) -> list[int]:
    """How many functions Python calls to move a tensor with a dimension of this size: from each placement to each."""
    world = dist.get_world_size()
    pattern = Layout.of(4, [[(0, 3)], [(3, 4)]] if world == 2 else [[(0, 4)]])
    found = []
    for layout in (Layout.even(size, world), pattern):
        shard = Shard.of(1, layout)
        for source, target in itertools.permutations((REPLICATE, PARTIAL, shard), 2):
            local = layout.local_size(size, dist.get_rank()) if source == shard else size
            x = torch.zeros(2, local, requires_grad=True)
            with count_calls() as count:
                redistribute(x, source, target, (2, size), dist.group.WORLD).sum().backward()
            found.append(count[0])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_host_work_does_not_grow_with_the_dimension(world: int, ranks: Callable[[int], RankPool]) -> None:
    ranks(world).run(calls_of_redistributing, 400)  # what the first call of each kind sets up
    small, large = (ranks(world).run(calls_of_redistributing, size) for size in (4_000, 400_000))
    assert small == large
