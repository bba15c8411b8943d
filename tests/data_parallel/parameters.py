"""Sharded parameters on a mesh of 2 × 2 ranks, without a model, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from models.meshes import mesh_context

from paraxis import Config
from paraxis.data_parallel import setup_data_parallel
from paraxis.distributed.redistribute import slice_box
from paraxis.placement import REPLICATE, Layout, Placement, Shard
from paraxis.tensor import unshard
from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.tensor.sharded_tensor import materialize, unwrap
from paraxis.weights.load import storage_placement
from paraxis.weights.meta_init import _empty_parameter

PLACED: dict[str, tuple[tuple[int, ...], Placement]] = {
    "column": ((8, 6), Shard.of(0, Layout.even(8, 2))),
    "row": ((6, 8), Shard.of(1, Layout.even(8, 2))),
    "packed": ((12, 6), Shard.of(0, Layout.concat([(4, Layout.even(4, 2))] * 3))),
    "uneven": ((7, 5), Shard.of(0, Layout.even(7, 2))),
    "replicated": ((6, 6), REPLICATE),
    "copies": ((6, 5), Shard.of(0, Layout.of(6, [[(0, 4)], [(2, 6)]]))),
    "vector": ((6,), REPLICATE),
    "sharded vector": ((8,), Shard.of(0, Layout.even(8, 2))),
}


def make_parameters(data_parallel: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """(context, parameters, their full tensors)"""
    ctx: Any = mesh_context(2, 2)
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=generator) for name, (shape, _) in PLACED.items()}
    parameters = {}
    for name, (shape, placement) in PLACED.items():
        meta = ParameterMeta(name=name, shape=shape, placement=placement, group=ctx.tp_group)
        parameters[name] = _empty_parameter(torch.empty(0), meta, True)
    setup_data_parallel(parameters, ctx, Config(data_parallel=data_parallel))
    for name, parameter in parameters.items():
        materialize(parameter, slice_box(full[name], *storage_placement(parameter.spec, ctx.rank)).clone())
    return ctx, parameters, full


def loss_of(parameters: dict[str, Any], factor: float) -> torch.Tensor:
    """A sum of squares, which data-parallel ranks scale by different factors."""
    run = unshard.reshard_after_forward(lambda: sum((unwrap(p) ** 2).sum() * factor for p in parameters.values()))
    return run()  # type: ignore[no-any-return]


def gradient_of(name: str, full: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient of :func:`loss_of`. Rows with copies on two ranks get it from both."""
    found = 2 * full * factor
    if name == "copies":
        found[2:4] *= 2
    return found
