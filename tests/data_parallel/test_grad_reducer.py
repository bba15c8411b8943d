"""Gradient reduction over data-parallel ranks, of replicated and of sharded parameters."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from data_parallel.parameters import gradient_of, loss_of, make_parameters
from data_parallel.test_replicate import accumulated
from torch import nn

from paraxis.data_parallel import grad_reducer
from paraxis.tensor import unshard


def reduced(data_parallel: str) -> None:
    ctx, parameters, full = make_parameters(data_parallel)
    factor = 1.0 + ctx.dp_rank
    loss = loss_of(parameters, factor)
    assert not unshard._parameter_of, "autograd keeps unsharded parameters alive"
    loss.backward()
    expected = {name: gradient_of(name, full[name], 1.5) for name in full}
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), expected[name], atol=1e-5), name
        assert p.grad.placement == p.placement and p.grad.dp_shard == p.dp_shard
        for order in (2, 1, 3, 0, float("inf"), -float("inf")):
            found, right = (torch.linalg.vector_norm(x, order) for x in (p.grad, expected[name]))
            assert torch.allclose(found, right), (name, order)
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in expected.values()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is gathered
        assert torch.allclose(nn.utils.clip_grad_norm_(list(parameters.values()), 1.0), total)
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), expected[name] / total, atol=1e-5), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = torch.full((3,), 2.0)  # a plain tensor, as of an adapter that was added later
        found = torch._foreach_norm([adapter, *(p.grad for p in parameters.values())])
    assert torch.allclose(torch.stack(found).norm(), torch.tensor(13.0).sqrt())


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_gradients_are_reduced_to_their_mean_and_clipped(ranks: Any, data_parallel: str) -> None:
    ranks(4).run(reduced, data_parallel)


def in_small_buckets() -> None:
    with mock.patch.object(grad_reducer, "BUCKET_BYTES", 64):
        reduced("replicate")
        accumulated("replicate")


def test_more_buckets_than_may_be_in_flight(ranks: Any) -> None:
    ranks(4).run(in_small_buckets)
