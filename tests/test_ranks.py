"""The pool of ranks: it runs collectives, reports which rank failed and why, and never hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from ranks import RankError, RankPool, RankTimeout, spawn_ranks


@dataclass
class Sum:
    """A class of this module: arguments and results of jobs may be instances of it."""

    value: torch.Tensor
    pid: int


def summed(offset: torch.Tensor, scale: float = 1.0) -> Sum:
    value = offset * scale + dist.get_rank()
    dist.all_reduce(value)
    return Sum(value, os.getpid())


def fails_on_one(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError("seven is not a prime of this ring")
    dist.barrier()


def hangs_on_one(culprit: int) -> None:
    if dist.get_rank() != culprit:
        dist.barrier()


def dies_on_one(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os._exit(7)
    dist.barrier()


def loses_its_peer() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    raise dist.DistBackendError("the consequence")


def changes_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(3)


def state() -> tuple[torch.dtype, bool, torch.Tensor, int]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(3), torch.get_num_threads()


def returns_a_lambda() -> object:
    return lambda: None


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)


def test_ranks_compute_an_all_reduce(pool: RankPool) -> None:
    results = pool.run(summed, torch.tensor([1.0, 2.0]), scale=10.0)
    assert [result.value.tolist() for result in results] == [[21.0, 41.0]] * 2
    assert results[0].pid != results[1].pid


def test_jobs_reuse_the_processes(pool: RankPool) -> None:
    first, second = (pool.run(summed, torch.zeros(1)) for _ in range(2))
    assert [result.pid for result in first] == [result.pid for result in second]


def test_every_job_starts_with_the_default_state(pool: RankPool) -> None:
    before = pool.run(state)
    pool.run(changes_defaults)
    after = pool.run(state)
    assert [result[:2] + result[3:] for result in after] == [(torch.float32, True, 1)] * 2
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before, after))


def test_error_of_one_rank_is_raised_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="seven is not a prime") as caught:
        pool.run(fails_on_one, 1)
    assert (caught.value.rank, caught.value.type_name) == (1, "ValueError")
    assert "in fails_on_one" in caught.value.remote_traceback
    assert "rank 0 had not finished" in str(caught.value)
    assert pool.run(summed, torch.zeros(1))[0].value.item() == 1.0


def test_the_cause_is_raised_and_not_its_consequence(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 raised ValueError: the cause"):
        pool.run(loses_its_peer)


def test_timeout_shows_the_stack_of_the_rank_that_hangs(pool: RankPool) -> None:
    with pytest.raises(RankTimeout, match="in hangs_on_one") as caught:
        pool.run(hangs_on_one, 1, timeout=1.0)
    assert caught.value.ranks == [0]
    assert pool.run(summed, torch.zeros(1))[1].value.item() == 1.0


def test_rank_that_exits_is_reported_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died: .* exit code 7"):
        pool.run(dies_on_one, 1)


def test_result_that_cannot_be_pickled_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="pickle"):
        pool.run(returns_a_lambda)


def test_lambda_cannot_run_on_ranks(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="not at the top of its module"):
        pool.run(lambda: None)


def test_spawn_ranks_returns_exit_codes_and_values() -> None:
    outcomes = spawn_ranks(2, summed, torch.ones(1))
    assert [(outcome.exit_code, outcome.error) for outcome in outcomes] == [(0, None)] * 2
    assert outcomes[1].value.value.item() == 3.0


def test_spawn_ranks_reports_the_rank_that_raises() -> None:
    survivor, culprit = spawn_ranks(2, fails_on_one, 1, timeout=30.0)
    assert (culprit.exit_code, culprit.error) == (1, "ValueError")
    assert "seven is not a prime" in culprit.message
    assert survivor.exit_code == 1 and survivor.error == "RuntimeError"  # gloo: connection closed by peer
    assert survivor.seconds < 10.0


def test_spawn_ranks_reports_the_rank_that_exits() -> None:
    culprit = spawn_ranks(2, dies_on_one, 1, timeout=30.0)[1]
    assert (culprit.exit_code, culprit.error) == (7, "died")


def test_spawn_ranks_kills_ranks_that_hang() -> None:
    start = time.monotonic()
    outcomes = spawn_ranks(2, sleeps, 600.0, timeout=1.0)
    assert all(outcome.hung and "in sleeps" in outcome.message for outcome in outcomes)
    assert time.monotonic() - start < 60.0
