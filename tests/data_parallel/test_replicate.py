"""DDP: gradient accumulation, unused and late parameters."""

from __future__ import annotations

from typing import Any

import torch
from data_parallel.parameters import gradient_of, loss_of, make_parameters
from torch import nn

from paraxis.data_parallel import no_sync, reduce_late_parameters
from paraxis.distributed import count_collectives


def accumulated(data_parallel: str) -> int:
    """Two batches with one reduction, then a batch that uses a parameter on one rank only."""
    ctx, parameters, full = make_parameters(data_parallel)
    module = nn.Module()
    for name, p in parameters.items():
        module.register_parameter(name, p)
    factor = 1.0 + ctx.dp_rank
    with no_sync(module), count_collectives() as count:
        loss_of(parameters, factor).backward()
    loss_of(parameters, 3 * factor).backward()
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), gradient_of(name, full[name], 6.0), atol=1e-5), name
        p.grad = None
    # Only the second data-parallel rank uses this one.
    used = ["vector", "sharded vector"] if ctx.dp_rank else ["vector"]
    loss_of({name: parameters[name] for name in used}, factor).backward()
    assert torch.allclose(parameters["sharded vector"].grad.full_tensor(), 2 * full["sharded vector"])
    assert parameters["column"].grad is None
    return count.total


def test_gradient_accumulation_reduces_once(ranks: Any) -> None:
    assert ranks(4).run(accumulated, "replicate")[0] == 1  # the sum over copies, of tensor parallelism
    ranks(4).run(accumulated, "shard")


def late_parameters() -> float:
    ctx, _, _ = make_parameters("replicate")
    adapter = nn.Parameter(torch.ones(3))
    reduce_late_parameters([adapter, torch.ones(2)], ctx)
    (adapter * (1.0 + ctx.dp_rank)).sum().backward()
    assert adapter.grad is not None
    return float(adapter.grad[0])


def test_gradients_of_late_parameters_are_reduced(ranks: Any) -> None:
    assert ranks(4).run(late_parameters) == [1.5] * 4
