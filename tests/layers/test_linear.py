"""Parallel linear layers against the unsharded ones: values, and the gradients of inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.shards import local_shard, run_all, sharded_parameter, sum_shards
from models.compare import context
from torch import nn

from paraxis.context import ParallelExecutionCtx
from paraxis.distributed import (
    count_collectives,
    differentiable_all_reduce_sum,
    differentiable_identity,
    differentiable_scatter,
)
from paraxis.layers import ColumnParallelLinear, RowParallelLinear
from paraxis.placement import REPLICATE, SHARED, Layout, Placement, Shard
from paraxis.tensor.sharded_tensor import ShardedTensor
from ranks import RankPool

Ranks = Callable[[int], RankPool]
Run = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # output, gradients of x, weight and bias

BATCH, SEQUENCE, IN, OUT = 2, 4, 8, 12


class Conv1D(nn.Module):
    """Has its weight [in, out], as the class of this name in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def full_layer(conv: bool = False) -> nn.Module:
    layer = Conv1D(OUT, IN) if conv else nn.Linear(IN, OUT)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer.double()


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def the_input() -> torch.Tensor:
    return noise(2, BATCH, SEQUENCE, IN)


def the_gradient() -> torch.Tensor:
    return noise(3, BATCH, SEQUENCE, OUT)


def expected(conv: bool = False) -> Run:
    layer, x = full_layer(conv), the_input().requires_grad_()
    y = layer(x)
    y.backward(the_gradient())
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad  # type: ignore[return-value, union-attr]


def local_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    return grad.local if isinstance(grad, ShardedTensor) else grad


def run(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Run:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, local_grad(layer.weight), local_grad(layer.bias)  # type: ignore[return-value]


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


# -- plain parameters ---------------------------------------------------------------------------------------


def column(conv: bool, gather_output: bool, sequence_parallel: bool) -> Run:
    layer = ColumnParallelLinear(context(), full_layer(conv), gather_output, sequence_parallel)
    x = part(the_input(), -2) if sequence_parallel else the_input()
    return run(layer, x, the_gradient() if gather_output else part(the_gradient(), -1))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
def test_column_parallel(ranks: Ranks, world: int, conv: bool) -> None:
    y, dx, dw, db = expected(conv)
    cases = [(conv, True, False), (conv, False, False), (conv, False, True)]
    jobs = ranks(world).run(run_all, column, cases)
    for (_, gather_output, sequence_parallel), *results in zip(cases, *jobs):
        for rank, (y_, dx_, dw_, db_) in enumerate(results):
            torch.testing.assert_close(y_, y if gather_output else y.chunk(world, -1)[rank])
            torch.testing.assert_close(dx_, dx.chunk(world, -2)[rank] if sequence_parallel else dx)
            torch.testing.assert_close(dw_, dw.chunk(world, 1 if conv else 0)[rank])
            torch.testing.assert_close(db_, db.chunk(world)[rank])


def row(conv: bool, input_is_parallel: bool, sequence_parallel: bool) -> Run:
    layer = RowParallelLinear(context(), full_layer(conv), input_is_parallel, sequence_parallel)
    x = part(the_input(), -1) if input_is_parallel else the_input()
    return run(layer, x, part(the_gradient(), -2) if sequence_parallel else the_gradient())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
def test_row_parallel(ranks: Ranks, world: int, conv: bool) -> None:
    y, dx, dw, db = expected(conv)
    cases = [(conv, False, False), (conv, True, False), (conv, True, True)]
    jobs = ranks(world).run(run_all, row, cases)
    for (_, input_is_parallel, sequence_parallel), *results in zip(cases, *jobs):
        for rank, (y_, dx_, dw_, db_) in enumerate(results):
            torch.testing.assert_close(y_, y.chunk(world, -2)[rank] if sequence_parallel else y)
            torch.testing.assert_close(dx_, dx.chunk(world, -1)[rank] if input_is_parallel else dx)
            torch.testing.assert_close(dw_, dw.chunk(world, 0 if conv else 1)[rank])
            torch.testing.assert_close(db_, db)


def without_their_collectives() -> tuple[Run, Run, int]:
    """Both layers without their collectives, which are called here."""
    group = dist.group.WORLD
    with count_collectives() as counter:
        layer = ColumnParallelLinear(context(), full_layer(), gather_output=False, copy_input=False)
        x = the_input().requires_grad_()
        inner = differentiable_identity(x, group).detach().requires_grad_()
        y = layer(inner)
        y.backward(part(the_gradient(), -1))
        row_layer = RowParallelLinear(context(), full_layer(), reduce_output=False, input_is_parallel=True)
        z = the_input().requires_grad_()
        term = row_layer(part(z, -1))
    inside = counter.total
    total = differentiable_all_reduce_sum(term, group)
    total.backward(the_gradient())
    first = (y.detach(), inner.grad, layer.weight.grad, layer.bias.grad)
    second = (total.detach(), z.grad, row_layer.weight.grad, row_layer.bias.grad)
    return first, second, inside  # type: ignore[return-value]


def test_collectives_left_to_the_caller(ranks: Ranks) -> None:
    y, dx, dw, db = expected()
    results = ranks(2).run(without_their_collectives)
    assert [inside for _, _, inside in results] == [0, 0]
    torch.testing.assert_close(results[0][0][1] + results[1][0][1], dx)
    for rank, (first, second, _) in enumerate(results):
        torch.testing.assert_close(first[0], y.chunk(2, -1)[rank])
        torch.testing.assert_close(first[2], dw.chunk(2, 0)[rank])
        torch.testing.assert_close(second[0], y)
        torch.testing.assert_close(second[2], dw.chunk(2, 1)[rank])
        torch.testing.assert_close(second[3], db)  # the same on every rank, though only one rank adds the bias


def pair() -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    ctx, first, second = context(), nn.Linear(IN, OUT), nn.Linear(OUT, IN)
    column_layer = ColumnParallelLinear(ctx, first, gather_output=False)
    row_layer = RowParallelLinear(ctx, second, input_is_parallel=True)
    x = torch.randn(3, IN, requires_grad=True)
    with count_collectives() as counter:
        y = row_layer(column_layer(x).relu())
    torch.testing.assert_close(y, second(first(x).relu()))
    return y.detach(), first.weight, dict(counter.counts)


def test_a_pair_needs_one_all_reduce(ranks: Ranks) -> None:
    assert all(counts == {"all_reduce": 1} for _, _, counts in ranks(2).run(pair))


# -- sharded parameters -------------------------------------------------------------------------------------


def column_layouts(world: int) -> dict[str, Layout]:
    return {
        "even": Layout.even(OUT, world),
        "uneven": Layout.even(OUT, world, unit=2),
        "packed": Layout.concat([(8, Layout.even(8, world)), (4, Layout.even(4, world))]),
        "two heads": Layout.even(OUT, world, unit=6),
        "one head": Layout.full(world),
        "part shared": Layout.concat([(8, Layout.even(8, world)), (4, Layout.full(world))]),
    }


def sharded_column(name: str, gather_output: bool, replicated_bias: bool) -> Run:
    full, layout = full_layer(), column_layouts(dist.get_world_size())[name]
    weight = sharded_parameter(full.weight, Shard.of(0, layout))
    bias = sharded_parameter(full.bias, REPLICATE if replicated_bias else Shard.of(0, layout))
    layer = ColumnParallelLinear.from_parameters(context(), weight, bias, gather_output=gather_output)
    assert layer.weight is weight and layer.bias is bias
    if gather_output:
        return run(layer, the_input(), the_gradient())
    # Elements with copies get their gradient in parts: here all of it on the first rank that holds them.
    held: list[int] = []
    placement = Shard.of(2, layout)
    grad = the_gradient()
    for rank in range(dist.get_rank()):
        for start, stop in layout.expand(OUT, rank):
            held += range(start, stop)
    grad[..., held] = 0
    return run(layer, the_input(), local_shard(grad, placement, dist.get_rank()))


@pytest.mark.parametrize("world", [2, 4])
def test_column_parallel_with_sharded_parameters(ranks: Ranks, world: int) -> None:
    y, dx, dw, db = expected()
    layouts = column_layouts(world)
    cases = [(n, *flags) for n in layouts for flags in [(True, False), (False, False), (True, True)]]
    jobs = ranks(world).run(run_all, sharded_column, cases)
    for (name, gather_output, replicated_bias), *results in zip(cases, *jobs):
        layout = layouts[name]
        for rank, (y_, dx_, dw_, db_) in enumerate(results):
            torch.testing.assert_close(y_, y if gather_output else local_shard(y, Shard.of(2, layout), rank))
            torch.testing.assert_close(dx_, dx)
            # Every copy of a parameter has the same, full gradient.
            torch.testing.assert_close(dw_, local_shard(dw, Shard.of(0, layout), rank))
            torch.testing.assert_close(db_, db if replicated_bias else local_shard(db, Shard.of(0, layout), rank))


def sharded_row(packed: bool, transposed: bool, bias_placement: Placement) -> Run:
    world = dist.get_world_size()
    full = full_layer(conv=transposed)
    halves = [(4, Layout.even(4, world)), (4, Layout.even(4, world))]
    layout = Layout.concat(halves) if packed else Layout.even(IN, world)
    weight = sharded_parameter(full.weight, Shard.of(0 if transposed else 1, layout))
    bias = sharded_parameter(full.bias, bias_placement)
    layer = RowParallelLinear.from_parameters(context(), weight, bias, transposed=transposed)
    assert layer.weight is weight and layer.bias is bias
    y, dx, dw, db = run(layer, the_input(), the_gradient())
    return y, dx, local_shard(expected(transposed)[2], weight.placement, dist.get_rank()) - dw, db


@pytest.mark.parametrize("world", [2, 4])
def test_row_parallel_with_sharded_parameters(ranks: Ranks, world: int) -> None:
    cases = [(False, False, REPLICATE), (True, False, SHARED), (True, True, REPLICATE)]
    jobs = ranks(world).run(run_all, sharded_row, cases)
    for (_, transposed, _), *results in zip(cases, *jobs):
        y, dx, _, db = expected(transposed)
        for y_, dx_, dw_off, db_ in results:
            torch.testing.assert_close(y_, y)
            torch.testing.assert_close(dx_, dx)
            torch.testing.assert_close(dw_off, torch.zeros_like(dw_off))
            torch.testing.assert_close(db_, db)


# -- errors and text --------------------------------------------------------------------------------------


def errors() -> dict[str, str]:
    ctx, world = context(), dist.get_world_size()
    full = full_layer()

    def error(build: Callable[[], Any]) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            build()
        return str(caught.value)

    copies = sharded_parameter(full.weight, Shard.of(1, Layout.even(IN, world, unit=IN // 2)))
    wrong = sharded_parameter(full.weight, Shard.of(1, Layout.even(IN, world)))
    return {
        "divisible": error(lambda: ColumnParallelLinear(ctx, nn.Linear(8, 10))),
        "row": error(lambda: RowParallelLinear(ctx, nn.Linear(10, 8))),
        "copies": error(lambda: RowParallelLinear.from_parameters(ctx, copies)),
        "wrong": error(lambda: ColumnParallelLinear.from_parameters(ctx, wrong)),
        "module": error(lambda: ColumnParallelLinear(ctx, nn.ReLU())),
        "text": repr(ColumnParallelLinear(ctx, full, gather_output=False)),
    }


def test_errors_name_the_layer_and_the_dimension(ranks: Ranks) -> None:
    for messages in ranks(4).run(errors):
        assert "10 is not divisible by 4" in messages["divisible"]
        assert "`ColumnParallelLinear`" in messages["divisible"] and "output" in messages["divisible"]
        assert "`RowParallelLinear`" in messages["row"] and "input" in messages["row"]
        assert "counted twice" in messages["copies"]
        assert "sharded on dimension 0" in messages["wrong"]
        assert "ReLU is not a linear layer" in messages["module"]
        assert "8 -> 12, bias=True, gather_output=False" in messages["text"]


def compiled() -> None:
    ctx = context()
    layers = nn.Sequential(
        ColumnParallelLinear(ctx, full_layer(), gather_output=False),
        nn.GELU(),
        RowParallelLinear(ctx, nn.Linear(OUT, IN).double(), input_is_parallel=True),
    )
    eager_x, x = the_input().requires_grad_(), the_input().requires_grad_()
    y = layers(eager_x)
    y.backward(the_input())
    z = torch.compile(layers, backend="aot_eager", fullgraph=True)(x)
    z.backward(the_input())
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(x.grad, eager_x.grad)


def test_compiled_layers_compute_the_same(ranks: Ranks) -> None:
    ranks(2).run(compiled)


def frozen_and_shared() -> None:
    ctx: ParallelExecutionCtx = context()
    full = full_layer()
    full.weight.requires_grad_(False)  # type: ignore[union-attr]
    layer = ColumnParallelLinear(ctx, full)
    assert not layer.weight.requires_grad and layer.bias is not None and layer.bias.requires_grad
    # The shard is a copy: the full weight can be freed.
    assert layer.weight.untyped_storage().nbytes() == full.weight.numel() * 8 // ctx.world_size  # type: ignore
    x = differentiable_scatter(the_input(), ctx.tp_group)
    assert x.shape[-1] == IN // ctx.world_size


def test_plain_parameters_are_copied_slices(ranks: Ranks) -> None:
    ranks(2).run(frozen_and_shared)


def test_the_reference_sums_shards() -> None:
    placement = Shard.of(0, Layout.even(4, 2))
    torch.testing.assert_close(sum_shards([torch.ones(2), torch.ones(2)], placement, (4,)), torch.ones(4))
