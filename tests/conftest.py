"""What all tests share: one thread per process, no network, the mark ``long``, and the session's pools of ranks."""

from __future__ import annotations

import os

# Before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models.tiny import save

from ranks import RankPool

torch.set_num_threads(1)

MAX_LIVE_RANKS = 16
"""Processes that may be alive at the same time. Each holds torch and transformers in memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--long`` runs the tests marked ``long`` too. ``PARAXIS_LONG=1`` is the same."""
    parser.addoption(
        "--long",
        action="store_true",
        default=bool(os.environ.get("PARAXIS_LONG")),
        help="also run the tests marked long (the same as PARAXIS_LONG=1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "long: takes long; `make test-long` runs it, `make test` does not")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked ``long``, unless they are asked for by ``--long``, ``PARAXIS_LONG=1`` or ``-m long``."""
    if config.getoption("--long") or "long" in config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="takes long: run with --long or PARAXIS_LONG=1")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)


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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`checkpoints("llama", **overrides)` is the folder of this tiny model, saved once per session: do not write there.

    See `models/tiny.py` for the names and the fields of the configuration that can be overridden.
    """
    folders: dict[str, str] = {}

    def folder_of(name: str, **overrides: Any) -> str:
        key = f"{name} {sorted(overrides.items())}"
        if key not in folders:
            folders[key] = save(name, tmp_path_factory.mktemp(name), **overrides)
        return folders[key]

    return folder_of
