"""Norms of sharded tensors: every element counts once, and nothing is gathered."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensor.sharded import PLACEMENTS, random_tensor, sharded

from paraxis.distributed import count_collectives

ORDERS = [2, 1, 3, 0, float("inf"), -float("inf")]


def single(order: float) -> None:
    x = random_tensor()
    x[0, 0] = 0
    for name, p in PLACEMENTS.items():
        found = torch.linalg.vector_norm(sharded(x, p), order)
        assert torch.allclose(found, torch.linalg.vector_norm(x, order)), name


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_all_placements(ranks: Any, order: float) -> None:
    ranks(2).run(single, order)


def several() -> int:
    xs = [random_tensor(k) for k in range(len(PLACEMENTS))]
    gradients = [sharded(x, p) for x, p in zip(xs, PLACEMENTS.values())]
    with warnings.catch_warnings(), count_collectives() as count:
        warnings.simplefilter("error")
        found = torch._foreach_norm(gradients)
    assert torch.allclose(torch.stack(found), torch.stack([x.norm() for x in xs]))
    return count.total


def test_norms_of_several_tensors_take_one_all_reduce(ranks: Any) -> None:
    assert ranks(2).run(several) == [1, 1]


def clipped() -> None:
    xs = [random_tensor(k) for k in range(len(PLACEMENTS))]
    parameters = [torch.nn.Parameter(sharded(torch.zeros_like(x), p)) for x, p in zip(xs, PLACEMENTS.values())]
    for parameter, x, p in zip(parameters, xs, PLACEMENTS.values()):
        parameter.grad = sharded(x, p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert torch.allclose(total, torch.stack(xs).norm())
    for parameter, x in zip(parameters, xs):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.full_tensor(), x / total, atol=1e-5)  # type: ignore[attr-defined]


def test_gradients_are_clipped_to_their_global_norm(ranks: Any) -> None:
    ranks(2).run(clipped)


def other_norms() -> None:
    x = random_tensor()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = torch.linalg.vector_norm(sharded(x, PLACEMENTS["rows"]), dim=1)
    assert torch.allclose(found, torch.linalg.vector_norm(x, dim=1))


def test_norms_along_a_dimension_use_the_general_way(ranks: Any) -> None:
    ranks(2).run(other_norms)
