"""GPU sizes, and the smallest plan that fits on one."""

from __future__ import annotations

import pytest

from paraxis.cli._errors import UsageError
from paraxis.cli._gpu_memory import gpu_bytes, smallest_fitting_plan, usable_bytes
from paraxis.plan import Memory, Plan


@pytest.mark.parametrize(
    ("gpu", "gigabytes"), [("H100", 80), ("h200", 141), ("A100-40GB", 40), ("24GB", 24), ("Mine 1.5gb", 1.5)]
)
def test_names_and_sizes_give_bytes(gpu: str, gigabytes: float) -> None:
    assert gpu_bytes(gpu) == gigabytes * 1e9 and usable_bytes(gpu) == int(gigabytes * 9e8)


@pytest.mark.parametrize("gpu", ["abacus", "0GB", "nanGB", "-5GB", ""])
def test_unknown_sizes(gpu: str) -> None:
    with pytest.raises(UsageError, match="--gpu"):
        gpu_bytes(gpu)


def test_numbers_of_ranks_that_cannot_fit_are_not_planned() -> None:
    planned: list[int] = []

    def plan(ranks: int) -> Plan:
        planned.append(ranks)
        return Plan(ranks, memory=Memory(parameters=10**11 // ranks + 10**9, buffers=0))  # 1 GB is replicated

    assert smallest_fitting_plan("10GB", plan).world_size == 16
    assert planned == [1, 16], "2, 4 and 8 ranks have over 9 GB each"
    with pytest.raises(ValueError, match="does not fit on 64 ranks or fewer: 90% of 1GB are 0.9 GB"):
        smallest_fitting_plan("1GB", plan)
