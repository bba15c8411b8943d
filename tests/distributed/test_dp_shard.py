"""FSDP parts of tensor-parallel shards: unsharding, resharding and reduce-scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel.parameters import make_parameters

from paraxis import CollectiveError
from paraxis.distributed.dp_shard import MIN_VECTOR_SIZE, make_dp_shard
from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.tensor.sharded_tensor import ShardedTensor, unwrap


def different_parameters() -> str:
    """Data-parallel ranks that use different parameters of one size."""
    ctx, parameters, _ = make_parameters("shard")
    unwrap(parameters["column"])
    with pytest.raises(CollectiveError) as error:
        unwrap(parameters["column" if ctx.dp_rank else "row"])
    return str(error.value)


def test_ranks_that_use_different_parameters_fail(ranks: Any) -> None:
    for message in ranks(4).run(different_parameters):
        assert "of another parameter" in message


def test_a_tensor_can_still_be_split() -> None:
    assert ShardedTensor.split is torch.Tensor.split


def round_trip() -> None:
    ctx, parameters, _ = make_parameters("shard")
    for name, parameter in parameters.items():
        dp_shard = parameter.dp_shard
        if dp_shard is None:
            continue
        shard = dp_shard.unshard(parameter.local)
        assert tuple(shard.shape) == dp_shard.shape, name
        assert torch.equal(dp_shard.reshard(shard), parameter.local), name
        mean = dp_shard.reduce_scatter(shard * (1.0 + ctx.dp_rank))
        assert torch.allclose(mean, parameter.local * 1.5), name
        assert mean.untyped_storage().nbytes() == mean.nbytes, "a view would keep the full gradient alive"


def test_parts_and_shards(ranks: Any) -> None:
    ranks(4).run(round_trip)


def dimensions() -> dict[str, Any]:
    ctx, _, _ = make_parameters("shard")

    def dim(shape: tuple[int, ...], placement: Any = REPLICATE) -> int | None:
        found = make_dp_shard("w", placement, shape, ctx.groups, ctx.mesh)
        return None if found is None else found.dim

    return {
        "first that divides": dim((3, 4)),
        "longest": dim((3, 5)),
        "shards, not the full tensor": dim((6, 4), Shard.of(0, Layout.even(6, 2))),
        "too small": dim((1, 1)),
        "vector": dim((MIN_VECTOR_SIZE - 2,)),
        "long vector": dim((MIN_VECTOR_SIZE,)),
    }


def test_the_dimension_that_is_divided(ranks: Any) -> None:
    expected = {
        "first that divides": 1,
        "longest": 1,
        "shards, not the full tensor": 1,
        "too small": None,
        "vector": None,
        "long vector": 0,
    }
    assert ranks(4).run(dimensions) == [expected] * 4
