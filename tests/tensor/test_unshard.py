"""FSDP at run time: unsharding, resharding after forward, and the inference cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.parameters import loss_of, make_parameters

from paraxis.distributed import count_collectives
from paraxis.tensor import unshard
from paraxis.tensor.sharded_tensor import unwrap


def frozen_and_changed() -> None:
    _, parameters, full = make_parameters("shard")
    vector = parameters["vector"]
    vector.requires_grad_(False)
    loss_of(parameters, 1.0).backward()
    assert vector.grad is None
    vector.requires_grad_(True)
    rank = dist.get_rank()
    loss_of({"vector": vector}, float(rank // 2)).backward()
    assert torch.allclose(vector.grad.to_local(), full["vector"])
    loss = loss_of(parameters, 1.0)
    torch.optim.SGD(list(parameters.values()), lr=0.1).step()
    with pytest.raises(RuntimeError, match="'copies' was changed between the forward and the backward"):
        loss.backward()


def test_frozen_parameters_and_parameters_that_change_before_backward(ranks: Any) -> None:
    ranks(4).run(frozen_and_changed)


def resharded() -> None:
    _, parameters, _ = make_parameters("shard")
    loss = loss_of(parameters, 1.0)
    assert not unshard._parameter_of, "autograd keeps unsharded parameters alive"
    loss.backward()
    del loss
    assert not unshard._parameter_of and not unshard._backward_cache


def test_nothing_unsharded_stays_alive(ranks: Any) -> None:
    ranks(4).run(resharded)


def cached() -> tuple[int, int]:
    _, parameters, _ = make_parameters("shard")
    with torch.no_grad(), unshard.unsharded_for_inference(parameters.values()), count_collectives() as inside:
        shards = [unwrap(p) for p in parameters.values()]
        assert all(unwrap(p) is shard for p, shard in zip(parameters.values(), shards))
    assert not unshard._inference_cache
    with torch.no_grad(), count_collectives() as outside:
        unwrap(parameters["column"])
    return inside.total, outside.total


def test_inference_unshards_once(ranks: Any) -> None:
    assert ranks(4).run(cached) == [(0, 1)] * 4
