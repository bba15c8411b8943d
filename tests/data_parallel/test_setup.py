"""Setting up data parallelism: which part a rank stores, checks of options and plans."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel.parameters import make_parameters
from models.meshes import mesh_context
from torch import nn

from paraxis import Config, ParallelExecutionCtx, parallelize_model
from paraxis.data_parallel import check_option, setup_data_parallel
from paraxis.placement import Layout, Shard
from paraxis.tensor.checkpoint_chunks import write_items
from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.weights.meta_init import _empty_parameter

SHAPES = {"column": (2, 6), "row": (3, 4), "packed": (3, 6), "uneven": (2, 5), "replicated": (3, 6), "copies": (2, 5)}
"""The shapes on rank 0 with ``data_parallel="shard"``."""


def local_shapes(data_parallel: str) -> dict[str, Any]:
    """Checks full tensors, DTensors, checkpoint chunks, assignment and random operators on the way."""
    _, parameters, full = make_parameters(data_parallel)
    for name, p in parameters.items():
        assert torch.equal(p.full_tensor(), full[name]), name
        assert torch.equal(p.to_dtensor().full_tensor(), full[name]), name
        items = [(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in write_items(name, p)]
        everybody: list[Any] = [None] * 4
        dist.all_gather_object(everybody, items)
        written = torch.zeros(full[name].shape)
        for offsets, sizes in {item for items in everybody for item in items}:
            written[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
        assert bool((written == 1).all()), name
        with torch.no_grad():
            p[(0,) * p.ndim] = 7.0
            assert float(p.full_tensor()[(0,) * p.ndim]) == 7.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                p.normal_()  # from one seed, whatever the ranks' own seeds are
            drawn: list[Any] = [None] * 4
            dist.all_gather_object(drawn, p.full_tensor())
            assert all(torch.equal(x, drawn[0]) for x in drawn), name
    return {name: tuple(p.to_local().shape) for name, p in parameters.items()}


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_ranks_store_their_parts(ranks: Any, data_parallel: str) -> None:
    found = ranks(4).run(local_shapes, data_parallel)[0]
    if data_parallel == "shard":
        assert found == {**SHAPES, "vector": (6,), "sharded vector": (4,)}
    else:
        assert found["column"] == (4, 6) and found["replicated"] == (6, 6)


def options() -> dict[str, str]:
    found = {}
    single = ParallelExecutionCtx(dist.group.WORLD, torch.device("cpu"))
    for key, context, option in (("no mesh", single, "shard"), ("unknown", mesh_context(2, 2), "fsdp")):
        with pytest.raises(ValueError) as error:
            parallelize_model(nn.Linear(4, 4), context, example_inputs=torch.ones(1, 4), data_parallel=option)
        found[key] = str(error.value)
    check_option(single, Config())
    return found


def test_options_that_do_not_fit_the_mesh(ranks: Any) -> None:
    for found in ranks(4).run(options):
        assert "data_parallel='shard'" in found["no mesh"] and "init_device_mesh" in found["no mesh"]
        assert "'replicate' or 'shard'" in found["unknown"]


def different_plans() -> str:
    ctx: Any = mesh_context(2, 2)
    placement = Shard.of(ctx.dp_rank, Layout.even(4, 2))
    meta = ParameterMeta(name="w", shape=(4, 4), placement=placement, group=ctx.tp_group)
    with pytest.raises(RuntimeError) as error:
        setup_data_parallel({"w": _empty_parameter(torch.empty(0), meta, True)}, ctx, Config())
    return str(error.value)


def test_ranks_with_different_plans_fail(ranks: Any) -> None:
    for message in ranks(4).run(different_plans):
        assert "different plans: that of rank 2 is not that of rank 0" in message
