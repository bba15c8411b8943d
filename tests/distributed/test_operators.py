"""Redistributions as operators of a program: their arguments, results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.shards import local_shard
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.distributed.operators import (
    COLLECTIVES,
    REDISTRIBUTIONS,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    decode,
    encode,
    mask_to_rank0,
    redistribution,
    reduce_scatter,
    share,
    take_shard,
    unshare,
)
from paraxis.placement import PARTIAL, REPLICATE, SHARED, Layout, Placement, Shard

EVEN = Shard.of(1, Layout.even(6, 2))
UNEVEN = Shard.of(0, Layout.even(5, 2))
PACKED = Shard.of(1, Layout(6, (((0, 1), (3, 4)), ((1, 3), (4, 6)))))


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, SHARED, EVEN, UNEVEN, PACKED])
def test_placements_are_text_in_a_program(placement: Placement) -> None:
    assert decode(encode(placement)) == placement


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (PARTIAL, REPLICATE, all_reduce),
        (PARTIAL, EVEN, reduce_scatter),
        (EVEN, REPLICATE, all_gather),
        (REPLICATE, EVEN, take_shard),
        (SHARED, EVEN, take_shard),
        (REPLICATE, SHARED, share),
        (SHARED, REPLICATE, unshare),
        (REPLICATE, PARTIAL, mask_to_rank0),
    ],
)
def test_one_operator_leads_from_one_placement_to_another(source: Placement, target: Placement, expected: Any) -> None:
    operator, args = redistribution(source, target, (4, 6), "group")
    assert operator is expected and args[-1] == "group"
    assert (operator in COLLECTIVES) == (operator in (all_reduce, reduce_scatter, all_gather))


def test_sharded_to_sharded_is_not_one_operator() -> None:
    with pytest.raises(ValueError, match="no single redistribution"):
        redistribution(EVEN, UNEVEN, (5, 6), "group")


def run_operators() -> dict[str, bool]:
    """Whether the results of the operators are right on this rank."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    full = torch.arange(30.0).view(5, 6)
    partial = full * (rank + 1)
    found = {
        "all_reduce": torch.equal(all_reduce(partial, "sum", group), full * 3),
        "max": torch.equal(all_reduce(partial, "max", group), full * 2),
        "mask_to_rank0": torch.equal(mask_to_rank0(full, group), full * (rank == 0)),
        "share": torch.equal(share(full, group), full),
    }
    merged = all_reduce_coalesced([partial, partial.sum()], "sum", group)
    found["all_reduce_coalesced"] = torch.equal(merged[0], full * 3) and float(merged[1]) == float(full.sum() * 3)
    for placement in (EVEN, UNEVEN, PACKED):
        local, text = local_shard(full, placement, rank), encode(placement)
        found[f"all_gather {text}"] = torch.equal(all_gather(local, text, [5, 6], group), full)
        found[f"dynamic {text}"] = torch.equal(
            all_gather(local, text, [5 if 0 in placement.dims else -1, 6 if 1 in placement.dims else -1], group), full
        )
        found[f"take_shard {text}"] = torch.equal(take_shard(full, text, False, group), local)
        found[f"reduce_scatter {text}"] = torch.equal(reduce_scatter(partial, text, group), local * 3)
    return found


def test_results_on_two_ranks(ranks: Any) -> None:
    for found in ranks(2).run(run_operators):
        assert all(found.values()), found


def differentiate() -> dict[str, bool]:
    """Whether the gradients of the operators are those of Megatron's pairs."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    text = encode(EVEN)

    def gradient(function: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        result = function(x)
        (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
        assert x.grad is not None
        return x.grad

    ones, weights = torch.ones(1, 6), torch.arange(1.0, 7).view(1, 6)
    return {
        "all_reduce": torch.equal(gradient(lambda x: all_reduce(x, "sum", group), ones), weights),
        "share": torch.equal(gradient(lambda x: share(x, group), ones), 2 * weights),
        "all_gather": torch.equal(
            gradient(lambda x: all_gather(x, text, [1, 6], group), ones[:, :3]), weights[:, 3 * rank : 3 * rank + 3]
        ),
        "take_shard": torch.equal(
            gradient(lambda x: take_shard(x, text, False, group), ones), weights[:, [0, 1, 2, 0, 1, 2]]
        ),
    }


def test_gradients_on_two_ranks(ranks: Any) -> None:
    for found in ranks(2).run(differentiate):
        assert all(found.values()), found


def trace_operator() -> tuple[bool, float]:
    """Whether a traced program has the operator, and its result."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    module = make_fx(lambda x: all_reduce(x, "sum", group), pre_dispatch=True)(torch.ones(2))
    return all_reduce in REDISTRIBUTIONS, float(module(torch.ones(2)).sum())


def test_operators_can_be_traced(ranks: Any) -> None:
    assert ranks(2).run(trace_operator) == [(True, 4.0)] * 2


def gradients_of_what_nobody_reads() -> list[bool]:
    """Which of three tensors have a gradient if one of two merged results is read, and what it is."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    read, unread, shared = (torch.ones(3, requires_grad=True) for _ in range(3))
    weight = torch.ones(3, requires_grad=True)
    first, second = all_reduce_coalesced([read, unread * share(shared, group) * weight], "sum", group)
    assert second.requires_grad
    (first * 2).sum().backward()
    return [torch.equal(read.grad, torch.full((3,), 2.0)), *(x.grad is None for x in (unread, shared, weight))]  # type: ignore[arg-type]


def test_what_nobody_differentiates_has_no_gradient(ranks: Any) -> None:
    """A merged all-reduce gives the gradients of its results one by one: zeros would let an optimizer decay weights."""
    for found in ranks(2).run(gradients_of_what_nobody_reads):
        assert all(found), found
