"""ShardedTensor: shards, full tensors, gradients and parameters that get their shard later."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.shards import local_shard, sharded_parameter
from tensor.sharded import PLACEMENTS, SHAPE, assert_same, random_tensor, sharded
from torch import nn
from torch.utils import swap_tensors

from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.tensor.sharded_tensor import (
    ShardedTensor,
    ShardSpec,
    materialize,
    override_shards,
    shards_version,
    unwrap,
    wrap,
)


def shards_and_full_tensors() -> None:
    x = random_tensor()
    for name, p in PLACEMENTS.items():
        t = sharded(x, p)
        assert tuple(t.shape) == SHAPE and t.dtype == x.dtype, name
        assert torch.equal(t.to_local(), local_shard(x, p, dist.get_rank())), name
        assert_same(name, t.full_tensor(), x)
        assert str(p) in repr(t)


def gradients() -> None:
    """A loss on the full tensor gives each rank its shard of the gradient; one on shards the sum over copies."""
    x, factor = random_tensor(), random_tensor(1)
    for name, p in PLACEMENTS.items():
        parameter = sharded_parameter(x, p)
        (parameter.full_tensor() * factor).sum().backward()
        assert_same(f"{name}: full_tensor", parameter.grad, factor, p)
        parameter.grad = None
        (parameter.to_local() * local_shard(factor, p, dist.get_rank())).sum().backward()
        copies = torch.ones(SHAPE)
        if name == "copies":
            copies[:, 2:6] = 2  # both ranks contribute
        assert_same(f"{name}: to_local", parameter.grad, factor * copies, p)
    plain = torch.ones(3, requires_grad=True)
    assert unwrap(plain) is plain
    local = local_shard(x, PLACEMENTS["columns"], dist.get_rank()).clone().requires_grad_()
    t = wrap(local, ShardSpec(PLACEMENTS["columns"], dist.group.WORLD), SHAPE)  # type: ignore[arg-type]
    (t.full_tensor() * factor).sum().backward()
    assert torch.equal(local.grad, local_shard(factor, PLACEMENTS["columns"], dist.get_rank()))  # type: ignore[arg-type]


def materialized() -> list[str]:
    """An unplanned parameter has no placement; a planned one takes a shard of its shape only."""
    errors = []
    meta = ParameterMeta(name="model.w", shape=SHAPE, group=dist.group.WORLD)
    parameter = nn.Parameter(ShardedTensor(torch.empty(0), meta, SHAPE))
    for attempt in (lambda: parameter.placement, lambda: materialize(parameter, torch.ones(6, 3))):
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
        meta.placement = PLACEMENTS["columns"]
    materialize(parameter, torch.ones(6, 4))
    assert_same("materialized", parameter.full_tensor(), torch.ones(SHAPE))
    assert parameter.detach().spec is meta, "an alias has the metadata of the parameter"
    assert isinstance(parameter.clone().spec, ShardSpec), "a copy is not a parameter"
    return errors


def accessors() -> None:
    x = random_tensor()
    t = sharded(x, PLACEMENTS["columns"])
    assert t.local is t._local and t.spec is t._spec and t.group is dist.group.WORLD and t.dp_shard is None


def assignments() -> None:
    """Writes to a part of the full tensor, and other values through ``data``."""
    for name, p in PLACEMENTS.items():
        t, x = sharded(random_tensor(), p), random_tensor()
        t[1:3] = 7.0
        x[1:3] = 7.0
        assert_same(f"{name} index", t, x, p)
        t.data = random_tensor(1)
        assert_same(f"{name} data", t, random_tensor(1), p)
        t.data = sharded(random_tensor(2), p)
        assert_same(f"{name} sharded data", t, random_tensor(2), p)
        other, held = sharded(random_tensor(4), PLACEMENTS["rows"]), t.data
        t.data = other.data
        other.data = held  # they have swapped their values
        assert_same(f"{name} swapped", t, random_tensor(4), p)
        assert_same(f"{name} swapped", other, random_tensor(2), PLACEMENTS["rows"])
        twin = sharded(x, p)
        twin.data = t.data
        twin.fill_(3.0)
        assert_same(f"{name} shared", t, torch.full(SHAPE, 3.0), p)
        with pytest.raises(RuntimeError, match="keeps its shape and device"):
            t.data = torch.ones(2, 2)
        t.data = random_tensor(3).bfloat16()  # the dtype becomes that of the values
        assert t.dtype == t.local.dtype == torch.bfloat16
        assert_same(f"{name} data of another dtype", t, random_tensor(3).bfloat16(), p)


def swaps() -> None:
    """``torch.utils.swap_tensors``: objects and placements stay, values change sides; weak references do not matter."""
    for name, p in PLACEMENTS.items():
        one, other = sharded_parameter(random_tensor(), p), sharded(random_tensor(1), PLACEMENTS["columns"])
        full, seen = random_tensor(2), weakref.ref(one)
        swap_tensors(one, other)
        assert_same(f"{name}: sharded, one", one.detach(), random_tensor(1), p)
        assert_same(f"{name}: sharded, other", other, random_tensor(), PLACEMENTS["columns"])
        swap_tensors(full, one)
        assert_same(f"{name}: plain, one", one.detach(), random_tensor(2), p)
        assert torch.equal(full, random_tensor(1)) and type(full) is torch.Tensor
        swap_tensors(one, one)
        assert_same(f"{name}: itself", one.detach(), random_tensor(2), p)
        assert seen() is one and one.placement == p and isinstance(one, nn.Parameter)
        with pytest.raises(RuntimeError, match="a sharded parameter keeps its shape"):
            swap_tensors(one, torch.ones(2, 2))
    plain = torch.zeros(2), torch.ones(3)
    swap_tensors(*plain)
    assert plain[0].shape == (3,)


def deep_copies() -> None:
    parameter: Any = sharded_parameter(random_tensor(), PLACEMENTS["packed"])
    (parameter.full_tensor() * 2).sum().backward()
    copied = copy.deepcopy(parameter)
    assert_same("values", copied.detach(), random_tensor(), parameter.placement)
    assert_same("gradient", copied.grad, torch.full(SHAPE, 2.0), parameter.placement)
    assert copied.local.data_ptr() != parameter.local.data_ptr()
    shallow = copy.copy(parameter)
    assert isinstance(shallow, nn.Parameter) == isinstance(parameter, nn.Parameter)
    assert shallow.spec is parameter.spec and shallow.requires_grad == parameter.requires_grad
    assert shallow.local.data_ptr() == parameter.local.data_ptr()


def overrides() -> None:
    t = sharded(random_tensor(), PLACEMENTS["rows"])
    other = torch.zeros(3, 8)
    with override_shards([t], [other]):
        assert unwrap(t) is other
    assert torch.equal(unwrap(t), t.local)


@pytest.mark.parametrize(
    "job",
    [shards_and_full_tensors, gradients, accessors, assignments, swaps, deep_copies, overrides],
    ids=lambda f: f.__name__,
)
def test_on_two_ranks(ranks: Any, job: Any) -> None:
    ranks(2).run(job)


def test_parameters_get_their_shard_later(ranks: Any) -> None:
    for errors in ranks(2).run(materialized):
        assert len(errors) == 2
        assert "model.w" in errors[0] and "not planned" in errors[0]
        assert "(6, 3)" in errors[1] and "(6, 4)" in errors[1]


def versions() -> bool:
    meta = ParameterMeta(name="w", shape=SHAPE, group=dist.group.WORLD, placement=PLACEMENTS["rows"])
    before = shards_version()
    materialize(nn.Parameter(ShardedTensor(torch.empty(0), meta, SHAPE)), torch.ones(3, 8))  # type: ignore[arg-type]
    return shards_version() != before


def test_the_version_changes_with_every_new_shard(ranks: Any) -> None:
    assert ranks(2).run(versions) == [True, True]
