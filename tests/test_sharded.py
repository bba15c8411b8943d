"""The sharded tensor outside compiled code, on two ranks: it answers as the whole tensor would."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed import cut, placed
from torch import nn
from torch.distributed.tensor import DTensor

from paraxis.placement import REPLICATE, Layout, Placement, Shard, local_shape
from paraxis.tensor import dispatch as outside
from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec, materialize, unwrap, wrap

SHAPE = (6, 8)
PLACEMENTS: dict[str, Placement] = {
    "rows": Shard.of(0, Layout.even(6, 2)),
    "columns": Shard.of(1, Layout.even(8, 2)),
    "packed": Shard.of(1, Layout.concat([(4, Layout.even(4, 2))] * 2)),
    "uneven": Shard.of(0, Layout.of(6, [[(0, 4)], [(4, 6)]])),
    "copies": Shard.of(1, Layout.of(8, [[(0, 6)], [(2, 8)]])),
    "whole": REPLICATE,
}


def whole(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded_like(tensor: torch.Tensor, placement: Placement) -> ShardedTensor:
    return wrap(cut(tensor, placement, dist.get_rank()).clone(), ShardSpec(placement, dist.group.WORLD), tensor.shape)  # type: ignore[arg-type]


def agree(name: str, got: Any, expected: torch.Tensor, placement: Placement | None = None) -> None:
    """The same value; as a sharded tensor with this placement if one is given."""
    if placement is not None:
        assert isinstance(got, ShardedTensor), f"{name}: a {type(got).__name__}"
        assert got.placement == placement, name
        assert tuple(got._local.shape) == local_shape(placement, expected.shape, dist.get_rank()), name
        got = got.full_tensor()
    assert torch.allclose(got, expected, atol=1e-6), name


# -- jobs: functions that run on both ranks ------------------------------------------------------------------------


def shard_and_whole() -> None:
    x = whole()
    for name, p in PLACEMENTS.items():
        t = sharded_like(x, p)
        assert tuple(t.shape) == SHAPE and t.dtype == x.dtype, name
        assert torch.equal(t.to_local(), cut(x, p, dist.get_rank())), name
        agree(name, t.full_tensor(), x)
        assert str(p) in repr(t)


def gradients() -> None:
    """A loss on the whole gives each rank its part of the gradient; one on the shards the sum of their parts."""
    x, factor = whole(), whole(1)
    for name, p in PLACEMENTS.items():
        parameter = placed(x, p)
        (parameter.full_tensor() * factor).sum().backward()
        agree(f"{name}: full_tensor", parameter.grad, factor, p)
        parameter.grad = None
        (parameter.to_local() * cut(factor, p, dist.get_rank())).sum().backward()
        copies = torch.ones(SHAPE)
        if name == "copies":
            copies[:, 2:6] = 2  # each of two ranks gives its part
        agree(f"{name}: to_local", parameter.grad, factor * copies, p)
    plain = torch.ones(3, requires_grad=True)
    assert unwrap(plain) is plain
    local = cut(x, PLACEMENTS["columns"], dist.get_rank()).clone().requires_grad_()
    t = wrap(local, ShardSpec(PLACEMENTS["columns"], dist.group.WORLD), SHAPE)  # type: ignore[arg-type]
    (t.full_tensor() * factor).sum().backward()
    assert torch.equal(local.grad, cut(factor, PLACEMENTS["columns"], dist.get_rank()))  # type: ignore[arg-type]


def elementwise() -> None:
    """These run on the shards: no warning, same placement."""
    x, y = whole(), whole(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for name, p in PLACEMENTS.items():
            a, b = sharded_like(x, p), sharded_like(y, p)
            agree(f"{name} add", a + b, x + y, p)
            agree(f"{name} add a whole", a + y, x + y, p)
            agree(f"{name} whole first", y * a, x * y, p)
            agree(f"{name} scalar", a * 2 - 1, x * 2 - 1, p)
            agree(f"{name} zero-dimensional", a * torch.tensor(3.0), x * 3, p)
            agree(f"{name} zeros_like", torch.zeros_like(a), torch.zeros(SHAPE), p)
            agree(f"{name} full_like", torch.full_like(a, 3), torch.full(SHAPE, 3.0), p)
            agree(f"{name} clone", a.clone(), x, p)
            agree(f"{name} detach", a.detach(), x, p)
            agree(f"{name} to", a.to(torch.float64), x.double(), p)
            agree(f"{name} where", torch.where(a > 0, a, b), torch.where(x > 0, x, y), p)
            c = a.clone()
            assert c.add_(b, alpha=2) is c
            agree(f"{name} add_", c, x + 2 * y, p)
            c.copy_(y)
            agree(f"{name} copy_", c, y, p)
            c.zero_()
            agree(f"{name} zero_", c, torch.zeros(SHAPE), p)
            agree(f"{name} untouched", a, x, p)
            first, second = torch._foreach_add([a, b], [b, b])
            agree(f"{name} foreach", first, x + y, p)
            agree(f"{name} foreach 2", second, y + y, p)


def gathered() -> list[str]:
    """Anything else works on the whole, and says so once per operator."""
    x, y = whole(), whole(1)
    outside._warned.clear()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for name, p in PLACEMENTS.items():
            a = sharded_like(x, p)
            agree(f"{name} matmul", a @ y.T, x @ y.T)
            agree(f"{name} sum", a.sum(0), x.sum(0))
            agree(f"{name} cat", torch.cat([a, a]), torch.cat([x, x]))
            agree(f"{name} broadcast", a + y[:1], x + y[:1])
            agree(f"{name} view", a.view(48), x.view(48))
            agree(f"{name} norm", torch.linalg.vector_norm(a), torch.linalg.vector_norm(x))
            (foreach,) = torch._foreach_norm([a])
            agree(f"{name} foreach norm", foreach, torch.linalg.vector_norm(x))
        other = sharded_like(y, PLACEMENTS["rows"])
        agree("two placements", sharded_like(x, PLACEMENTS["columns"]) + other, x + y)
    return [str(w.message) for w in caught]


def writes_through_the_whole() -> None:
    """An in-place operator that is not elementwise changes the shard."""
    x = whole()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, p in PLACEMENTS.items():
            a, expected = sharded_like(x, p), x.clone()
            result = a.index_fill_(0, torch.tensor([0, 5]), 7.0)
            expected.index_fill_(0, torch.tensor([0, 5]), 7.0)
            agree(name, a, expected, p)
            assert result is a, name


def lists() -> None:
    """Operators on lists: every tensor has a placement and a shape of its own."""
    names = [n for n in PLACEMENTS if n != "whole"]
    xs = [whole(k) for k in range(len(names))] + [whole(9, (4, 2))]
    places = [PLACEMENTS[n] for n in names] + [Shard.of(0, Layout.even(4, 2))]
    split = [sharded_like(x, p) for x, p in zip(xs, places)]
    with torch.no_grad():
        for x, p, got in zip(xs, places, torch._foreach_mul(split, 2)):
            agree(f"scalar {p}", got, x * 2, p)
        for x, p, got in zip(xs, places, torch._foreach_add(split, split, alpha=3)):
            agree(f"list {p}", got, x * 4, p)
        for x, p, got in zip(xs, places, torch._foreach_add(split, xs)):
            agree(f"list of whole ones {p}", got, x * 2, p)
        torch._foreach_mul_(split, 5)
        for x, p, got in zip(xs, places, split):
            agree(f"in place {p}", got, x * 5, p)


def lists_of_mixed_placements() -> None:
    """Partners with other placements but local shapes that happen to fit."""
    x, y = whole(), whole(1)
    a, b = sharded_like(x, PLACEMENTS["columns"]), sharded_like(y, PLACEMENTS["packed"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (total,) = torch._foreach_add([a], [b])
        agree("mixed", total.full_tensor() if isinstance(total, ShardedTensor) else total, x + y)


def optimizers(each: bool) -> None:
    """Some steps of an optimizer on sharded parameters are the steps on the whole ones."""
    makers = {
        "sgd": lambda ps, each: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=each),
        "adamw": lambda ps, each: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.01, foreach=each),
    }
    for kind, make in makers.items():
        reference = [nn.Parameter(whole(k)) for k in range(len(PLACEMENTS))]
        split = [placed(whole(k), p) for k, p in enumerate(PLACEMENTS.values())]
        left, right = make(reference, each), make(split, each)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                for k, (a, b, p) in enumerate(zip(reference, split, PLACEMENTS.values())):
                    grad = whole(100 + 10 * step + k)
                    a.grad, b.grad = grad, sharded_like(grad, p)
                left.step()
                right.step()
        for name, a, b, p in zip(PLACEMENTS, reference, split, PLACEMENTS.values()):
            agree(f"{kind} {name}", b.detach(), a.detach(), p)
            for key, value in left.state[a].items():
                if torch.is_tensor(value) and value.ndim:
                    agree(f"{kind} {name} {key}", right.state[b][key], value, p)


def dtensors() -> None:
    x = whole()
    for name, p in PLACEMENTS.items():
        d = sharded_like(x, p).to_dtensor()
        assert isinstance(d, DTensor) and tuple(d.shape) == SHAPE, name
        assert d.placements[0].is_shard() == (name in ("rows", "columns")), name
        agree(name, d.full_tensor(), x)
        agree(f"{name} with a sharded tensor", sharded_like(x, p) + d.detach(), 2 * x)


def materialized() -> list[str]:
    """An unplanned parameter says so; a planned one takes a shard of its shape only."""
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
    agree("materialized", parameter.full_tensor(), torch.ones(SHAPE))
    kept = parameter.detach()
    assert kept._spec is meta, "the same tensor under another name"
    assert isinstance(parameter.clone()._spec, ShardSpec), "a copy is no parameter"
    return errors


# -- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        shard_and_whole,
        gradients,
        elementwise,
        writes_through_the_whole,
        lists,
        lists_of_mixed_placements,
        dtensors,
    ],
)
def test_on_two_ranks(ranks, job) -> None:  # type: ignore[no-untyped-def]
    ranks(2).run(job)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_steps(ranks, foreach: bool) -> None:  # type: ignore[no-untyped-def]
    ranks(2).run(optimizers, foreach)


def test_other_operators_gather_and_say_so(ranks) -> None:  # type: ignore[no-untyped-def]
    for messages in ranks(2).run(gathered):
        text = [m for m in messages if "gathered first" in m]
        assert any("mm" in m for m in text) and any("aten.cat" in m for m in text)
        assert len(text) == len(set(text)), "once per operator"
        assert all("to_local" in m for m in text)


def test_parameters_get_their_shard_later(ranks) -> None:  # type: ignore[no-untyped-def]
    for errors in ranks(2).run(materialized):
        assert len(errors) == 2
        assert "model.w" in errors[0] and "not planned" in errors[0]
        assert "(6, 3)" in errors[1] and "(6, 4)" in errors[1]


def test_specs_compare_by_value() -> None:
    """Compiled code is guarded on them."""
    p = Shard.of(0, Layout.even(4, 2))
    assert ShardSpec(p, None) == ShardSpec(Shard.of(0, Layout.even(4, 2)), None)
    assert hash(ShardSpec(p, None)) == hash(ShardSpec(Shard.of(0, Layout.even(4, 2)), None))
    assert ShardSpec(p, None) != ShardSpec(REPLICATE, None)
    assert ShardSpec(p, None) != p
