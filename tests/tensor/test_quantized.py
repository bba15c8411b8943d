"""Quantized tensors: operators on the encoding give what they give on the dequantized tensor."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from kernels.quantized.cases import CASES, case
from torch.nn import functional as F

from paraxis.kernels.quantized import Encoding
from paraxis.kernels.quantized.encoding import INT4
from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.placement.blocks import Axis
from paraxis.tensor.quantized import Part, QuantizedTensor, QuantizedWeight


def tensor(name: str, transposed: bool = False) -> tuple[QuantizedTensor, torch.Tensor]:
    """A quantized tensor and the plain one."""
    parts, encoding, weight = CASES[name]
    plain = weight.float().transpose(-1, -2) if transposed else weight.float()
    return QuantizedTensor(parts, encoding, plain.shape, torch.float32, transposed), plain


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_dequantized_values(name: str, transposed: bool) -> None:
    q, plain = tensor(name, transposed)
    assert q.shape == plain.shape and q.dtype == torch.float32
    assert torch.allclose(q.dequantized(), plain) and torch.allclose(q + 0, plain)
    assert q.nbytes == q.parts.nbytes < plain.nbytes


OPERATORS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda w, x: F.linear(x, w),
    "linear with bias": lambda w, x: F.linear(x, w, torch.ones(w.shape[0])),
    "matmul": lambda w, x: x @ w.t(),
    "matmul, not transposed": lambda w, x: x[..., :1].expand(*x.shape[:-1], w.shape[0]) @ w,
    "permute": lambda w, x: x @ w.permute(1, 0),
    "embedding": lambda w, x: F.embedding(torch.tensor([[0, 3], [2, 1]]), w),
    "detach": lambda w, x: w.detach() * 2,
    "to": lambda w, x: w.to(torch.float64),
    "sum": lambda w, x: w.sum(),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["blocks that do not divide", "zero points", "two levels of scales", "index of both"])
def test_operators_on_the_encoding(name: str, operator: str) -> None:
    q, plain = tensor(name)
    x = torch.randn(2, 3, plain.shape[1])
    found, expected = OPERATORS[operator](q, x), OPERATORS[operator](plain, x)
    assert type(found) is torch.Tensor and torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_weights(transposed: bool) -> None:
    q, plain = tensor("stack", transposed)
    x = torch.randn(4, plain.shape[1])
    for one in (q[1], q.unbind(0)[1], q[1:].select(0, 0), q.index_select(0, torch.tensor([1]))[0]):
        assert isinstance(one, QuantizedTensor) and torch.allclose(x @ one, x @ plain[1], atol=1e-4)
    assert isinstance(q[torch.tensor([2, 0])], QuantizedTensor)
    assert torch.allclose(q[torch.tensor([2, 0])].dequantized(), plain[[2, 0]])
    assert torch.allclose(x.expand(3, *x.shape) @ q, x @ plain, atol=1e-4)


def test_gradients_flow_through_it() -> None:
    q, plain = tensor("groups")
    x = torch.randn(3, 64, requires_grad=True)
    (F.linear(x, q) ** 2).sum().backward()
    y = x.detach().requires_grad_()
    (F.linear(y, plain) ** 2).sum().backward()
    assert x.grad is not None and y.grad is not None and torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_it_cannot_be_written_to() -> None:
    q, _ = tensor("groups")
    with pytest.raises(RuntimeError, match="cannot be written to"):
        q.add_(1)
    with pytest.raises(RuntimeError, match="cannot be written to"):
        q.copy_(torch.zeros(q.shape))


def test_copies_and_dtypes() -> None:
    q, _ = tensor("groups")
    for other in (q.clone(), deepcopy(q)):
        assert other.parts.codes.data_ptr() != q.parts.codes.data_ptr() and torch.equal(other + 0, q + 0)
    half = q.with_dtype(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.dequantized(), (q + 0).bfloat16())
    names, spec = q.__tensor_flatten__()
    again = QuantizedTensor.__tensor_unflatten__({n: getattr(q, n) for n in names}, spec, q.shape, None)
    assert torch.equal(again + 0, q + 0)
    assert q.new_empty(2, 3).shape == (2, 3) and torch.empty_like(q).shape == q.shape


def weight(rows: int, columns: int, encoding: Encoding) -> QuantizedWeight:
    """A quantized weight with codes and scales."""
    width = 2 if encoding.packed else 1
    return QuantizedWeight(
        "test",
        encoding,
        (rows, columns),
        False,
        {
            "codes": Part(torch.uint8, (Axis.blocks(0, rows, 1), Axis.blocks(1, columns, width))),
            "scales": Part(
                torch.float32,
                (Axis.blocks(0, rows, encoding.block[0]), Axis.blocks(1, columns, encoding.block[1])),
            ),
        },
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("encoding", [Encoding((16, 16)), Encoding((1, 16), INT4)], ids=["blocks", "groups"])
def test_a_shard_is_assembled_from_slices_of_the_parts(encoding: Encoding, dim: int, world: int) -> None:
    """Cut anywhere: what the shards dequantize to are slices of what the weight dequantizes to."""
    from paraxis.distributed.redistribute import slice_box

    parts, _, full = case(40, 44, encoding)
    q = weight(40, 44, encoding)
    placement = Shard.of(dim, Layout.even((40, 44)[dim], world, 2))
    assert not q.problems(placement)
    where = q.placements(placement)
    for rank in range(world):
        mine = {name: slice_box(tensor, where[name], rank) for name, tensor in parts.present()}
        shard = q.assemble(mine, placement, rank, torch.float32)
        assert torch.allclose(shard.dequantized().double(), slice_box(full, placement, rank), rtol=1e-6)
        assert q.nbytes(placement, rank) == shard.nbytes
    assert q.nbytes(REPLICATE, 0) == parts.nbytes


def test_a_byte_of_two_codes_cannot_be_cut() -> None:
    q = weight(40, 44, Encoding((1, 16), INT4))
    assert "inside of a byte" in q.problems(Shard.of(1, Layout.of(44, [[(0, 21)], [(21, 44)]])))
    assert not q.problems(Shard.of(0, Layout.of(40, [[(0, 21)], [(21, 40)]]))) and not q.problems(REPLICATE)
    assert q.units == {0: (1, 1), 1: (2, 16)}
