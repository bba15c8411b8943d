"""Layouts by brute force: the set of indices each rank holds, computed one by one."""

from __future__ import annotations

import random

from paraxis.placement import Layout


def held(layout: Layout, size: int, rank: int) -> list[int]:
    """Membership by definition: index i is on the rank if i modulo the period is in one of its ranges."""
    return [i for i in range(size) if any(a <= i % layout.period < b for a, b in layout.ranges[rank])]


def expanded(layout: Layout, size: int, rank: int) -> list[int]:
    return [i for a, b in layout.expand(size, rank) for i in range(a, b)]


def owners(layout: Layout, size: int) -> list[frozenset[int]]:
    """For each index the ranks that hold it: the meaning of a layout."""
    return [frozenset(r for r in range(layout.world) if i in set(held(layout, size, r))) for i in range(size)]


def random_layout(rng: random.Random, size: int, world: int) -> Layout:
    """Any assignment in which no index is lost, some on several ranks."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for i in range(size):
        for r in rng.sample(range(world), rng.choice([1, 1, 1, 2])):
            ranges[r].append((i, i + 1))
    return Layout.of(size, ranges)


RANDOM = [(seed, random.Random(seed)) for seed in range(60)]
"""Seeds, and a generator for each: one test takes (seed, generator) as a parameter."""
