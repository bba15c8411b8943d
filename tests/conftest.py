"""What every test shares: one thread per process, no network, and the session's pools of ranks."""

from __future__ import annotations

import os

# Before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator

import pytest
import torch

from ranks import RankPool

torch.set_num_threads(1)

# Processes that may be alive at the same time. Each holds torch and transformers in memory.
MAX_LIVE_RANKS = 16


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n ranks: `ranks(2).run(fn, *args)` returns both ranks' results."""
    pools: dict[int, RankPool] = {}  # the least recently used first

    def pool_of(n: int) -> RankPool:
        pools[n] = pools.pop(n, None) or RankPool(n)
        live = sum(pool.world_size for pool in pools.values() if pool.alive or pool is pools[n])
        for pool in list(pools.values())[:-1]:
            if live > MAX_LIVE_RANKS and pool.alive:
                pool.close()
                live -= pool.world_size
        return pools[n]

    yield pool_of
    for pool in pools.values():
        pool.close()
