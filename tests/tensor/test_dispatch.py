"""Operators on sharded tensors outside of graphs: they compute what they would on full tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.shards import sharded_parameter
from tensor.sharded import PLACEMENTS, SHAPE, assert_same, random_tensor, sharded
from torch import nn

from paraxis.placement import Layout, Shard
from paraxis.tensor import dispatch
from paraxis.tensor.sharded_tensor import ShardedTensor


def elementwise() -> None:
    """These run on the shards: no warning, same placement."""
    x, y = random_tensor(), random_tensor(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for name, p in PLACEMENTS.items():
            a, b = sharded(x, p), sharded(y, p)
            assert_same(f"{name} add", a + b, x + y, p)
            assert_same(f"{name} add a full tensor", a + y, x + y, p)
            assert_same(f"{name} full tensor first", y * a, x * y, p)
            assert_same(f"{name} scalar", a * 2 - 1, x * 2 - 1, p)
            assert_same(f"{name} zero-dimensional", a * torch.tensor(3.0), x * 3, p)
            assert_same(f"{name} zeros_like", torch.zeros_like(a), torch.zeros(SHAPE), p)
            assert_same(f"{name} full_like", torch.full_like(a, 3), torch.full(SHAPE, 3.0), p)
            assert_same(f"{name} clone", a.clone(), x, p)
            assert_same(f"{name} detach", a.detach(), x, p)
            assert_same(f"{name} to", a.to(torch.float64), x.double(), p)
            assert_same(f"{name} where", torch.where(a > 0, a, b), torch.where(x > 0, x, y), p)
            c = a.clone()
            assert c.add_(b, alpha=2) is c
            assert_same(f"{name} add_", c, x + 2 * y, p)
            c.copy_(y)
            assert_same(f"{name} copy_", c, y, p)
            c.zero_()
            assert_same(f"{name} zero_", c, torch.zeros(SHAPE), p)
            assert_same(f"{name} untouched", a, x, p)
            first, second = torch._foreach_add([a, b], [b, b])
            assert_same(f"{name} foreach", first, x + y, p)
            assert_same(f"{name} foreach 2", second, y + y, p)


def gathered() -> list[str]:
    """Any other operator gathers, and warns once per operator."""
    x, y = random_tensor(), random_tensor(1)
    dispatch._warned.clear()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for name, p in PLACEMENTS.items():
            a = sharded(x, p)
            assert_same(f"{name} matmul", a @ y.T, x @ y.T)
            assert_same(f"{name} sum", a.sum(0), x.sum(0))
            assert_same(f"{name} cat", torch.cat([a, a]), torch.cat([x, x]))
            assert_same(f"{name} broadcast", a + y[:1], x + y[:1])
            assert_same(f"{name} view", a.view(48), x.view(48))
            assert_same(f"{name} norm", torch.linalg.vector_norm(a), torch.linalg.vector_norm(x))
            (foreach,) = torch._foreach_norm([a])
            assert_same(f"{name} foreach norm", foreach, torch.linalg.vector_norm(x))
        other = sharded(y, PLACEMENTS["rows"])
        assert_same("two placements", sharded(x, PLACEMENTS["columns"]) + other, x + y)
    return [str(w.message) for w in caught]


def in_place_on_full_tensors() -> None:
    """An in-place operator that is not elementwise writes to the shard."""
    x = random_tensor()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, p in PLACEMENTS.items():
            a, expected = sharded(x, p), x.clone()
            result = a.index_fill_(0, torch.tensor([0, 5]), 7.0)
            expected.index_fill_(0, torch.tensor([0, 5]), 7.0)
            assert_same(name, a, expected, p)
            assert result is a, name


def lists() -> None:
    """``foreach`` operators: tensors of different placements and shapes."""
    names = [n for n in PLACEMENTS if n != "replicated"]
    xs = [random_tensor(k) for k in range(len(names))] + [random_tensor(9, (4, 2))]
    places = [PLACEMENTS[n] for n in names] + [Shard.of(0, Layout.even(4, 2))]
    tensors = [sharded(x, p) for x, p in zip(xs, places)]
    with torch.no_grad():
        for x, p, got in zip(xs, places, torch._foreach_mul(tensors, 2)):
            assert_same(f"scalar {p}", got, x * 2, p)
        for x, p, got in zip(xs, places, torch._foreach_add(tensors, tensors, alpha=3)):
            assert_same(f"list {p}", got, x * 4, p)
        for x, p, got in zip(xs, places, torch._foreach_add(tensors, xs)):
            assert_same(f"list of full tensors {p}", got, x * 2, p)
        torch._foreach_mul_(tensors, 5)
        for x, p, got in zip(xs, places, tensors):
            assert_same(f"in place {p}", got, x * 5, p)


def lists_of_mixed_placements() -> None:
    """Operands of different placements whose shards happen to have the same shape."""
    x, y = random_tensor(), random_tensor(1)
    a, b = sharded(x, PLACEMENTS["columns"]), sharded(y, PLACEMENTS["packed"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (total,) = torch._foreach_add([a], [b])
        assert_same("mixed", total.full_tensor() if isinstance(total, ShardedTensor) else total, x + y)


def optimizers(each: bool) -> None:
    """Steps on sharded parameters are those on full ones."""
    makers = {
        "sgd": lambda ps, each: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=each),
        "adamw": lambda ps, each: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.01, foreach=each),
    }
    for kind, make in makers.items():
        reference = [nn.Parameter(random_tensor(k)) for k in range(len(PLACEMENTS))]
        parameters = [sharded_parameter(random_tensor(k), p) for k, p in enumerate(PLACEMENTS.values())]
        left, right = make(reference, each), make(parameters, each)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                for k, (a, b, p) in enumerate(zip(reference, parameters, PLACEMENTS.values())):
                    grad = random_tensor(100 + 10 * step + k)
                    a.grad, b.grad = grad, sharded(grad, p)
                left.step()
                right.step()
        for name, a, b, p in zip(PLACEMENTS, reference, parameters, PLACEMENTS.values()):
            assert_same(f"{kind} {name}", b.detach(), a.detach(), p)
            for key, value in left.state[a].items():
                if torch.is_tensor(value) and value.ndim:
                    assert_same(f"{kind} {name} {key}", right.state[b][key], value, p)


def views() -> None:
    """A view is a gathered copy: it can be read, and refuses writes, which would be lost."""
    x = random_tensor()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        view = sharded_parameter(x, PLACEMENTS["columns"]).view(48)
        assert torch.equal(view + 1, x.view(48) + 1)
        traced = torch.compile(lambda y: y.to(torch.float32).relu() + 1, backend="eager", fullgraph=True)
        assert torch.equal(traced(view), x.view(48).relu() + 1)
        parameter = sharded_parameter(x, PLACEMENTS["columns"])
        parameter.view_as(x).add_(1)  # the same tensor
        assert_same("view of the same shape", parameter, x + 1)
        for write in (lambda: view.add_(1), lambda: view.__setitem__(0, 1.0)):
            with pytest.raises(RuntimeError, match="would change a gathered copy and be lost"):
                write()


INITIALIZERS: tuple[Any, ...] = (
    nn.init.normal_,
    nn.init.normal_,
    nn.init.kaiming_uniform_,
    nn.init.trunc_normal_,
    lambda x: x.bernoulli_(0.5, generator=torch.Generator().manual_seed(5 + dist.get_rank())),
    lambda x: x.add_(torch.randn_like(x)),
    lambda x: x.mul_(torch.rand_like(x)),
)


def drawn(seed: int, sharded_too: bool = True) -> list[torch.Tensor]:
    """What one initializer after another draws, and then the generator itself."""
    t = sharded(random_tensor(), PLACEMENTS["rows"]) if sharded_too else random_tensor()
    torch.manual_seed(seed)
    found: list[torch.Tensor] = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for initialize in INITIALIZERS:
            initialize(t)
            found.append(t.full_tensor() if isinstance(t, ShardedTensor) else t.clone())
    return [*found, torch.rand(3)]


def random_operators() -> None:
    """Random operators draw what they draw from an unsharded tensor with the seed of rank 0, and go on from there."""
    rank = dist.get_rank()
    one_seed, own_seeds = drawn(3), drawn(3 + rank)
    expected = drawn(3, sharded_too=False)
    if rank == 0:
        for i, x in enumerate(expected):
            assert torch.equal(one_seed[i], x) and torch.equal(own_seeds[i], x), i
    else:
        assert torch.equal(one_seed[3], expected[3]) and torch.equal(one_seed[-1], expected[-1])
        torch.manual_seed(3 + rank)
        assert torch.equal(own_seeds[-1], torch.rand(3)), "other seeds stay"
    several = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(several, sum(x.double().sum() for x in own_seeds[:-1]).reshape(1))  # type: ignore[union-attr]
    assert torch.equal(*several), "ranks draw the same whatever their seeds are"


@pytest.mark.parametrize(
    "job",
    [elementwise, in_place_on_full_tensors, lists, lists_of_mixed_placements, views, random_operators],
    ids=lambda f: f.__name__,
)
def test_on_two_ranks(ranks: Any, job: Any) -> None:
    ranks(2).run(job)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_steps(ranks: Any, foreach: bool) -> None:
    ranks(2).run(optimizers, foreach)


def test_other_operators_gather_and_warn(ranks: Any) -> None:
    for messages in ranks(2).run(gathered):
        text = [m for m in messages if "gathered first" in m]
        assert any("mm" in m for m in text) and any("aten.cat" in m for m in text)
        assert len(text) == len(set(text)), "once per operator"
        assert all("to_local" in m for m in text)
