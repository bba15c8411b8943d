"""Parameters on a mesh of 2 × 2, without a model: what each rank keeps, gradients, norms and checkpoints."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models.meshes import mesh_context
from torch import nn

from paraxis import CollectiveError, Config
from paraxis.data_parallel import grad_reducer as averaging
from paraxis.data_parallel import no_sync, setup_data_parallel
from paraxis.distributed.redistribute import slice_box
from paraxis.placement import REPLICATE, Layout, Placement, Shard
from paraxis.tensor import unshard
from paraxis.tensor.checkpoint_chunks import write_items
from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.tensor.sharded_tensor import ShardedTensor, materialize, unwrap
from paraxis.weights.load import held
from paraxis.weights.meta_init import _empty_parameter

PLACED: dict[str, tuple[tuple[int, ...], Placement]] = {
    "column": ((8, 6), Shard.of(0, Layout.even(8, 2))),
    "row": ((6, 8), Shard.of(1, Layout.even(8, 2))),
    "packed": ((12, 6), Shard.of(0, Layout.concat([(4, Layout.even(4, 2))] * 3))),
    "uneven": ((7, 5), Shard.of(0, Layout.even(7, 2))),
    "whole": ((6, 6), REPLICATE),
    "copies": ((6, 5), Shard.of(0, Layout.of(6, [[(0, 4)], [(2, 6)]]))),
    "vector": ((6,), REPLICATE),
    "cut vector": ((8,), Shard.of(0, Layout.even(8, 2))),
}
SHAPES = {"column": (2, 6), "row": (3, 4), "packed": (3, 6), "uneven": (2, 5), "whole": (3, 6), "copies": (2, 5)}
"""Of the part of the first rank, where data-parallel ranks split it."""


def made(data_parallel: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """(context, parameters, what they are as a whole)"""
    ctx: Any = mesh_context(2, 2)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, (shape, _) in PLACED.items()}
    parameters = {}
    for name, (shape, placement) in PLACED.items():
        meta = ParameterMeta(name=name, shape=shape, placement=placement, group=ctx.tp_group)
        parameters[name] = _empty_parameter(torch.empty(0), meta, True)
    setup_data_parallel(parameters, ctx, Config(data_parallel=data_parallel))
    for name, parameter in parameters.items():
        materialize(parameter, slice_box(whole[name], *held(parameter._spec, ctx.rank)).clone())
    return ctx, parameters, whole


def loss_of(parameters: dict[str, Any], factor: float) -> torch.Tensor:
    """A sum in which data-parallel ranks have factors of their own."""
    run = unshard.reshard_after_forward(lambda: sum((unwrap(p) ** 2).sum() * factor for p in parameters.values()))
    return run()  # type: ignore[no-any-return]


def gradient(name: str, whole: torch.Tensor, factor: float) -> torch.Tensor:
    """What rows have that live on two ranks comes from both."""
    found = 2 * whole * factor
    if name == "copies":
        found[2:4] *= 2
    return found


def kept(data_parallel: str) -> dict[str, Any]:
    _, parameters, whole = made(data_parallel)
    for name, p in parameters.items():
        assert torch.equal(p.full_tensor(), whole[name]), name
        assert torch.equal(p.to_dtensor().full_tensor(), whole[name]), name
        items = [(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in write_items(name, p)]
        everybody: list[Any] = [None] * 4
        dist.all_gather_object(everybody, items)
        written = torch.zeros(whole[name].shape)
        for offsets, sizes in {item for items in everybody for item in items}:
            written[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
        assert bool((written == 1).all()), name
        with torch.no_grad():
            p[(0,) * p.ndim] = 7.0
            assert float(p.full_tensor()[(0,) * p.ndim]) == 7.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                p.normal_()  # from one seed, whatever the ranks have been seeded with
            drawn: list[Any] = [None] * 4
            dist.all_gather_object(drawn, p.full_tensor())
            assert all(torch.equal(x, drawn[0]) for x in drawn), name
    return {name: tuple(p.to_local().shape) for name, p in parameters.items()}


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_ranks_keep_their_parts(ranks: Any, data_parallel: str) -> None:
    found = ranks(4).run(kept, data_parallel)[0]
    if data_parallel == "shard":
        assert found == {**SHAPES, "vector": (6,), "cut vector": (4,)}
    else:
        assert found["column"] == (4, 6) and found["whole"] == (6, 6)


def averaged(data_parallel: str) -> None:
    ctx, parameters, whole = made(data_parallel)
    factor = 1.0 + ctx.dp_rank
    loss = loss_of(parameters, factor)
    assert not unshard._parameter_of, "gathered parameters are kept for the backward pass"
    loss.backward()
    right = {name: gradient(name, whole[name], 1.5) for name in whole}
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), right[name], atol=1e-5), name
        assert p.grad.placement == p.placement and p.grad.dp_shard == p.dp_shard
        for order in (2, 1, 3, 0, float("inf"), -float("inf")):
            found, expected = (torch.linalg.vector_norm(x, order) for x in (p.grad, right[name]))
            assert torch.allclose(found, expected), (name, order)
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in right.values()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is gathered
        assert torch.allclose(nn.utils.clip_grad_norm_(list(parameters.values()), 1.0), total)
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), right[name] / total, atol=1e-5), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        beside = torch.full((3,), 2.0)  # whole on every rank, as an adapter that was added later
        found = torch._foreach_norm([beside, *(p.grad for p in parameters.values())])
    assert torch.allclose(torch.stack(found).norm(), torch.tensor(13.0).sqrt())


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_gradients_are_averaged_and_clipped(ranks: Any, data_parallel: str) -> None:
    ranks(4).run(averaged, data_parallel)


def in_small_buckets() -> None:
    with mock.patch.object(averaging, "BUCKET_BYTES", 64):
        averaged("replicate")
        accumulated("replicate")


def test_several_buckets(ranks: Any) -> None:
    """More than may be under way."""
    ranks(4).run(in_small_buckets)


def accumulated(data_parallel: str) -> int:
    from paraxis.distributed import count_collectives

    ctx, parameters, whole = made(data_parallel)
    module = nn.Module()
    for name, p in parameters.items():
        module.register_parameter(name, p)
    factor = 1.0 + ctx.dp_rank
    with no_sync(module), count_collectives() as count:
        loss_of(parameters, factor).backward()
    loss_of(parameters, 3 * factor).backward()
    for name, p in parameters.items():
        assert torch.allclose(p.grad.full_tensor(), gradient(name, whole[name], 6.0), atol=1e-5), name
        p.grad = None
    # Only the second data-parallel rank uses this one.
    used = ["vector", "cut vector"] if ctx.dp_rank else ["vector"]
    loss_of({name: parameters[name] for name in used}, factor).backward()
    assert torch.allclose(parameters["cut vector"].grad.full_tensor(), 2 * whole["cut vector"])
    assert parameters["column"].grad is None
    return count.total


def test_gradients_that_are_added_up(ranks: Any) -> None:
    assert ranks(4).run(accumulated, "replicate")[0] == 1  # the sum of what lives on two ranks
    ranks(4).run(accumulated, "shard")


def frozen_and_changed() -> None:
    _, parameters, whole = made("shard")
    vector = parameters["vector"]
    vector.requires_grad_(False)
    loss_of(parameters, 1.0).backward()
    assert vector.grad is None
    vector.requires_grad_(True)
    rank = dist.get_rank()
    loss_of({"vector": vector}, float(rank // 2)).backward()
    assert torch.allclose(vector.grad.to_local(), whole["vector"])
    loss = loss_of(parameters, 1.0)
    torch.optim.SGD(list(parameters.values()), lr=0.1).step()
    with pytest.raises(RuntimeError, match="'copies' was changed between the forward and the backward"):
        loss.backward()


def test_what_is_frozen_for_a_time_and_what_changes_too_early(ranks: Any) -> None:
    ranks(4).run(frozen_and_changed)


def elsewhere() -> str:
    """Data-parallel ranks that use different parameters of one size."""
    ctx, parameters, _ = made("shard")
    unwrap(parameters["column"])
    with pytest.raises(CollectiveError) as error:
        unwrap(parameters["column" if ctx.dp_rank else "row"])
    return str(error.value)


def test_ranks_that_use_different_parameters_fail(ranks: Any) -> None:
    for message in ranks(4).run(elsewhere):
        assert "of another parameter" in message


def wrong_meshes() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    from paraxis import ParallelExecutionCtx, parallelize_model

    found = {}
    for key, shape, names in (
        ("no tp", (2, 2), ("dp", "mp")),
        ("another", (1, 2, 2), ("pp", "dp", "tp")),
        ("too small", (1, 2), ("dp", "tp")),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError) as error:
            ParallelExecutionCtx(mesh=mesh, current_device=torch.device("cpu"))
        found[key] = str(error.value)
    part = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    ctx = ParallelExecutionCtx(mesh=part, current_device=torch.device("cpu"))
    assert (ctx.dp_size, ctx.world_size, dist.get_world_size(ctx.world_group)) == (2, 2, 4)
    alone = ParallelExecutionCtx(dist.group.WORLD, torch.device("cpu"))
    for key, context, option in (("no mesh", alone, "shard"), ("unknown", ctx, "fsdp")):
        with pytest.raises(ValueError) as error:
            parallelize_model(nn.Linear(4, 4), context, example_inputs=torch.ones(1, 4), data_parallel=option)
        found[key] = str(error.value)
    return found


def test_meshes_that_do_not_fit(ranks: Any) -> None:
    for found in ranks(4).run(wrong_meshes):
        assert "no dimension 'tp'" in found["no tp"] and "{'dp': 2, 'mp': 2}" in found["no tp"]
        assert "mesh['dp', 'tp']" in found["another"]
        assert "2 ranks, but there are 4" in found["too small"]
        assert "data_parallel='shard'" in found["no mesh"] and "init_device_mesh" in found["no mesh"]
        assert "'replicate' or 'shard'" in found["unknown"]


def test_a_tensor_can_still_be_split() -> None:
    assert ShardedTensor.split is torch.Tensor.split
