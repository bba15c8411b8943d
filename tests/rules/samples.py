"""Sample calls of every operator family that has a rule: (operator, arguments, keyword arguments)."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def call(op: Any, *args: Any, **kwargs: Any) -> Sample:
    return op, args, kwargs


def pointwise() -> list[Sample]:
    return [
        call(aten.add.Tensor, f(4, 8), f(4, 8)),
        call(aten.add.Tensor, f(4, 8), f(8), alpha=3),
        call(aten.add.Tensor, f(4, 8), 2),
        call(aten.add.Tensor, f(4, 8), b(4, 8)),
        call(aten.sub.Tensor, f(4, 1, 8), f(6, 1)),
        call(aten.rsub.Scalar, f(4, 8), 1.0),
        call(aten.mul.Tensor, f(2, 4, 8), f(4, 1)),
        call(aten.mul.Tensor, f(4, 8), torch.tensor(3.0, dtype=torch.float64)),
        call(aten.mul.Scalar, f(4, 8), 0.5),
        call(aten.div.Tensor, f(4, 8), f(4, 8)),
        call(aten.div.Tensor, f(4, 8), 3.0),
        call(aten.div.Tensor, i(9, 4, 8), i(9, 4, 8) + 1),
        call(aten.div.Tensor_mode, f(4, 8), f(4, 8), rounding_mode="floor"),
        call(aten.div.Scalar_mode, i(90, 4, 8), 4, rounding_mode="trunc"),
        call(aten.neg.default, f(4, 8)),
        call(aten.pow.Tensor_Scalar, f(4, 8), 2),
        call(aten.where.self, b(4, 1), f(4, 8), f(8)),
        call(aten.where.self, b(1, 8), f(4, 8), torch.tensor(0.0, dtype=torch.float64)),
        call(aten.masked_fill.Scalar, f(2, 4, 8), b(4, 8), -1e9),
        call(aten.masked_fill.Scalar, f(2, 4, 8), b(2, 1, 1), 0),
        call(aten.masked_fill.Tensor, f(4, 8), b(4, 8), torch.tensor(1.0, dtype=torch.float64)),
        call(aten.clamp.default, f(4, 8), -0.5, 0.5),
        call(aten.clamp.Tensor, f(4, 8), f(8), f(4, 8) + 3),
        call(aten.to.dtype, f(4, 8), torch.float32),
        call(aten._to_copy.default, f(4, 8).float(), dtype=torch.float64),
        call(aten._to_copy.default, i(9, 4, 8), dtype=torch.float32),
        call(aten._to_copy.default, f(4, 8), dtype=torch.int64),
        call(aten.type_as.default, f(4, 8), f(4, 8).float()),
        call(aten.type_as.default, f(8), f(8, 4).float()),
        call(aten.type_as.default, f(4, 8), f(16, 8).float()),
        call(aten.to.other, f(8), i(9, 8, 4)),
        call(aten.contiguous.default, f(4, 8)),
        call(aten.clone.default, f(4, 8)),
        call(aten.copy.default, f(4, 8), f(4, 8).float()),
        call(aten.copy.default, f(4, 8), f(8)),
        call(aten.alias.default, f(4, 8)),
        call(aten.detach.default, f(4, 8)),
        call(aten.lift_fresh_copy.default, f(4, 8)),
        call(aten.zeros_like.default, f(4, 8)),
        call(aten.ones_like.default, f(4, 8)),
        call(aten.full_like.default, f(4, 8), 2.0),
        call(aten.dropout.default, f(4, 8), 0.5, False),
        call(aten.native_dropout.default, f(4, 8), 0.5, False),
        call(aten.feature_dropout.default, f(2, 4, 8), 0.5, False),
        call(aten.gelu.default, f(4, 8), approximate="tanh"),
        call(aten.silu.default, f(6, 8)),
        call(aten.lerp.Scalar, f(4, 8), f(8), 0.3),
        call(aten.addcmul.default, f(4, 8), f(8), f(4, 1), value=2),
        call(aten.relu.default, f(5)),
        call(aten.relu.default, f()),
    ]


def matmuls() -> list[Sample]:
    return [
        call(aten.linear.default, f(2, 3, 8), f(12, 8)),
        call(aten.linear.default, f(2, 8), f(12, 8), f(12)),
        call(aten.linear.default, f(8), f(6, 8), f(6)),
        call(aten.linear.default, f(4, 8), f(8)),
        call(aten.addmm.default, f(12), f(4, 8), f(8, 12)),
        call(aten.addmm.default, f(1), f(4, 8), f(8, 12)),
        call(aten.addmm.default, f(4, 12), f(4, 8), f(8, 12)),
        call(aten.addmm.default, f(12), f(4, 8), f(8, 12), beta=2, alpha=0.5),
        call(aten.matmul.default, f(4, 8), f(8, 6)),
        call(aten.matmul.default, f(2, 4, 8), f(2, 8, 6)),
        call(aten.matmul.default, f(2, 4, 6, 8), f(2, 1, 8, 6)),
        call(aten.matmul.default, f(4, 6, 8), f(8, 12)),
        call(aten.matmul.default, f(6, 8), f(4, 8, 12)),
        call(aten.matmul.default, f(8), f(8, 12)),
        call(aten.matmul.default, f(8), f(4, 8, 12)),
        call(aten.matmul.default, f(4, 8), f(8)),
        call(aten.mm.default, f(4, 8), f(8, 6)),
        call(aten.bmm.default, f(4, 6, 8), f(4, 8, 6)),
        call(aten.baddbmm.default, f(4, 6, 2), f(4, 6, 8), f(4, 8, 2), beta=0.5, alpha=2),
        call(aten.baddbmm.default, f(1, 6, 2), f(4, 6, 8), f(4, 8, 2)),
        call(aten.baddbmm.default, f(2), f(4, 6, 8), f(4, 8, 2)),
        call(aten.baddbmm.default, f(6, 4), f(8, 6, 2), f(8, 2, 4)),
    ]


def grouped() -> list[Sample]:
    import transformers.integrations.moe  # noqa: F401 -- defines the operator

    op = torch.ops.transformers.grouped_mm_fallback.default
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    return [call(op, f(7, 8), f(4, 8, 12), ends), call(op, f(7, 6), f(4, 6, 4), ends)]


def convolutions() -> list[Sample]:
    def conv(x: Any, w: Any, bias: Any, groups: int = 1, transposed: bool = False, stride: int = 1) -> Sample:
        n = x.ndim - 2
        fixed = ([stride] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
        return call(aten.convolution.default, x, w, bias, *fixed)

    return [
        conv(f(4, 8, 6), f(12, 8, 3), f(12)),
        conv(f(2, 8, 6, 6), f(4, 8, 3, 3), None, stride=2),
        conv(f(2, 8, 6), f(8, 1, 3), f(8), groups=8),
        conv(f(2, 8, 6), f(12, 2, 3), None, groups=4),
        conv(f(2, 8, 6), f(8, 12, 3), f(12), transposed=True),
        conv(f(2, 8, 6), f(8, 3, 3), f(12), groups=4, transposed=True),
    ]


def views() -> list[Sample]:
    return [
        call(aten.view.default, f(2, 4, 24), [2, 4, 4, 6]),
        call(aten.view_as_complex.default, f(4, 6, 2)),
        call(aten.view_as_real.default, torch.view_as_complex(f(4, 6, 2))),
        call(aten.view.default, f(2, 4, 4, 6), [2, 4, 24]),
        call(aten.view.default, f(2, 4, 24), [2, 4, 3, 4, 2]),
        call(aten.view.default, f(2, 4, 24), [2, -1, 6, 4]),
        call(aten.view.default, f(2, 4, 6), [8, 6]),
        call(aten.view.default, f(8, 6), [2, 4, 1, 6]),
        call(aten.view.default, f(8, 1, 6), [8, 6]),
        call(aten.view.default, f(4, 6), [24]),
        call(aten.view.default, f(24), [4, 6]),
        call(aten.view.default, f(24), [2, 3, 4]),
        call(aten.view.default, f(6, 4), [4, 6]),
        call(aten.view.default, f(2, 1, 1, 8), [1, 2, 8, 1]),
        call(aten.view.default, f(4, 4, 6, 2), [16, 12]),
        call(aten.view.default, f(4, 4), [-1]),
        call(aten.reshape.default, f(4, 8, 6).transpose(0, 1), [8, 24]),
        call(aten.reshape.default, f(2, 8, 8), [2, 8, 2, 4]),
        call(aten._unsafe_view.default, f(4, 12), [4, 4, 3]),
        call(aten.flatten.using_ints, f(2, 4, 6), 1),
        call(aten.flatten.using_ints, f(4, 6, 2), 0, 1),
        call(aten.unflatten.int, f(4, 24), 1, [4, 6]),
        call(aten.unflatten.int, f(4, 24), -1, [-1, 2, 3]),
        call(aten.unflatten.int, f(24, 4), 0, [4, -1]),
        call(aten.permute.default, f(4, 6, 8), [2, 0, 1]),
        call(aten.permute.default, f(4, 6, 8), [-1, -3, -2]),
        call(aten.transpose.int, f(4, 6, 8), -1, 0),
        call(aten.t.default, f(4, 6)),
        call(aten.t.default, f(6)),
        call(aten.numpy_T.default, f(4, 6, 2)),
        call(aten.mT.default, f(2, 4, 6)),
        call(aten.swapaxes.default, f(4, 6), 0, 1),
        call(aten.swapdims.default, f(4, 6, 2), 0, -1),
        call(aten.movedim.int, f(4, 6, 8), 0, 2),
        call(aten.movedim.int, f(4, 6, 8), 2, 0),
        call(aten.movedim.intlist, f(4, 6, 8, 2), [0, 3], [2, 0]),
        call(aten.unsqueeze.default, f(4, 6), 1),
        call(aten.unsqueeze.default, f(4, 6), -1),
        call(aten.squeeze.default, f(4, 1, 6)),
        call(aten.squeeze.default, f(2, 1, 4)),
        call(aten.squeeze.default, f(3, 1, 5)),
        call(aten.squeeze.dim, f(4, 1, 6), 1),
        call(aten.squeeze.dim, f(4, 2, 6), 1),
        call(aten.squeeze.dim, f(3, 4), 0),
        call(aten.squeeze.dim, f(4, 1, 6), -2),
        call(aten.squeeze.dims, f(4, 1, 6, 1), [1, 3]),
        call(aten.squeeze.dims, f(2, 1, 6), [0, 1]),
        call(aten.squeeze.dims, f(3, 1, 6), [0, 1]),
        call(aten.expand.default, f(4, 1, 6), [4, 8, 6]),
        call(aten.expand.default, f(4, 1, 6), [-1, 4, -1]),
        call(aten.expand.default, f(6), [4, 6]),
        call(aten.expand.default, f(2, 2, 1, 3), [2, 2, 4, 3]),
        call(aten.expand.default, f(1), [8]),
        call(aten.repeat.default, f(4, 6), [1, 2]),
        call(aten.repeat.default, f(4, 6), [2, 3, 1]),
        call(aten.repeat.default, f(4, 6), [4, 1]),
    ]


def splits() -> list[Sample]:
    return [
        call(aten.slice_scatter.default, f(4, 8), f(4, 3), 1, 2, 5),
        call(aten.slice_scatter.default, f(6, 4, 8), f(3, 4, 8), 0, 0, 6, 2),
        call(aten.select_scatter.default, f(4, 6, 8), f(4, 8), 1, 2),
        call(aten.select_scatter.default, f(4, 8), f(8), 0, -1),
        call(aten.slice.Tensor, f(4, 8), 1, 0, 2**63 - 1, 2),
        call(aten.slice.Tensor, f(4, 12), -1, 1, None, 3),
        call(aten.slice.Tensor, f(4, 8), 1, 3, None, 2),
        call(aten.split_with_sizes.default, f(4, 12), [8, 4], 1),
        call(aten.split_with_sizes.default, f(4, 12), [2, 6, 4], -1),
        call(aten.split.Tensor, f(4, 12), 4, 1),
        call(aten.split.Tensor, f(12, 4), 5),
        call(aten.split.sizes, f(4, 12), [8, 4], 1),
        call(aten.unsafe_split.Tensor, f(4, 12), 6, -1),
        call(aten.chunk.default, f(4, 12), 3, -1),
        call(aten.chunk.default, f(8, 4), 2),
        call(aten.unsafe_chunk.default, f(4, 12), 2, 1),
        call(aten.tensor_split.sections, f(4, 12), 5, 1),
        call(aten.tensor_split.indices, f(4, 12), [2, 8], 1),
        call(aten.tensor_split.indices, f(12, 2), [4]),
        call(aten.unbind.int, f(4, 6)),
        call(aten.unbind.int, f(4, 3, 6), 1),
        call(aten.unbind.int, f(4, 3, 6), -1),
        call(aten.select.int, f(4, 3, 6), 1, 2),
        call(aten.select.int, f(4, 3, 6), -1, -1),
        call(aten.slice.Tensor, f(4, 12), 1, 2, 8),
        call(aten.slice.Tensor, f(4, 12), 1, 0, 6),
        call(aten.slice.Tensor, f(4, 12), -1, -4, 9223372036854775807),
        call(aten.slice.Tensor, f(8, 12), 0, 1, -1),
        call(aten.slice.Tensor, f(4, 12), 1, 0, 12, 2),
        call(aten.slice.Tensor, f(8, 4), 0, None, 100),
        call(aten.slice.Tensor, f(8, 4), 0, 5, 3),
        call(aten.slice.Tensor, f(8, 4)),
        call(aten.cat.default, [f(4, 6), f(4, 6)]),
        call(aten.cat.default, [f(4, 6), f(4, 2)], 1),
        call(aten.cat.default, [f(4, 6), f(4, 8), f(4, 6)], -1),
        call(aten.cat.default, [f(0), f(4, 6)], -1),
        call(aten.cat.default, [f(4, 6), f(0), f(4, 6)], 0),
        call(aten.stack.default, [f(4, 6), f(4, 6)]),
        call(aten.stack.default, [f(4, 6), f(4, 6), f(4, 6)], -1),
        call(aten.constant_pad_nd.default, f(4, 6, 8), [1, 2]),
        call(aten.constant_pad_nd.default, f(4, 6, 8), [0, 0, 1, 0], 2.0),
        call(aten.constant_pad_nd.default, f(4, 6, 8), [-1, 0]),
    ]


def reductions() -> list[Sample]:
    return [
        call(aten.sum.default, f(4, 6)),
        call(aten.sum.dim_IntList, f(4, 6, 8), [1]),
        call(aten.sum.dim_IntList, f(4, 6, 8), [-1], True),
        call(aten.sum.dim_IntList, f(4, 6, 8), [0, 2]),
        call(aten.sum.dim_IntList, f(4, 6, 8), []),
        call(aten.sum.dim_IntList, b(4, 6), [1], dtype=torch.float64),
        call(aten.sum.default, b(4, 6)),
        call(aten.mean.default, f(4, 6)),
        call(aten.mean.default, i(9, 4, 6), dtype=torch.float64),
        call(aten.mean.dim, f(4, 6, 8), [-1], True),
        call(aten.mean.dim, f(4, 6, 8), [0, 1]),
        call(aten.mean.dim, f(4, 6, 8), None),
        call(aten.amax.default, f(4, 6, 8), [1]),
        call(aten.amax.default, f(4, 6)),
        call(aten.amin.default, f(4, 6, 8), [-1], True),
        call(aten.any.default, b(4, 6)),
        call(aten.any.dim, b(4, 6), 1),
        call(aten.any.dims, b(4, 6, 2), [0, 2]),
        call(aten.all.dim, b(4, 6), 0, True),
        call(aten.all.default, b(4, 6)),
        call(aten.argmax.default, f(4, 6), -1),
        call(aten.argmax.default, f(4, 6)),
        call(aten.argmin.default, f(4, 6), 0, True),
        call(aten.max.dim, f(4, 6), 1),
        call(aten.min.dim, f(4, 6, 8), 0, True),
        call(aten.prod.default, f(4, 6)),
        call(aten.prod.dim_int, f(4, 6), 1),
        call(aten.var.correction, f(4, 6), [1], correction=1),
        call(aten.var.correction, f(4, 6)),
        call(aten.var.dim, f(4, 6, 8), [0, 2], False),
        call(aten.var.default, f(4, 6), True),
        call(aten.var.default, f(4, 6), False),
        call(aten.std.correction, f(4, 6), [0], correction=0, keepdim=True),
        call(aten.std.default, f(4, 6), True),
        call(aten.logsumexp.default, f(4, 6), [1]),
        call(aten.logsumexp.default, f(4, 6), [0], True),
        call(aten.linalg_vector_norm.default, f(4, 6), 2, [1]),
        call(aten.linalg_vector_norm.default, f(4, 6)),
        call(aten.norm.ScalarOpt_dim, f(4, 6), 2, [1], True),
    ]


def lines() -> list[Sample]:
    return [
        call(aten.softmax.int, f(4, 6), -1),
        call(aten._softmax.default, f(4, 6, 8), 1, False),
        call(aten.log_softmax.int, f(4, 6), 0),
        call(aten._log_softmax.default, f(4, 6), -1, False),
        call(aten.cumsum.default, f(4, 6), 1),
        call(aten.cumprod.default, f(4, 6), -2),
        call(aten.flip.default, f(4, 6, 8), [0, 2]),
        call(aten.roll.default, f(4, 6), [1], [1]),
        call(aten.roll.default, f(4, 6), [1]),
        call(aten.topk.default, f(4, 6), 2),
        call(aten.topk.default, f(4, 6, 8), 2, 0),
        call(aten.sort.default, f(4, 6)),
        call(aten.sort.default, f(4, 6), 0, True),
        call(aten.sort.stable, f(4, 6), stable=True, dim=0),
        call(aten.layer_norm.default, f(4, 6, 8), [8], f(8), f(8)),
        call(aten.layer_norm.default, f(4, 6, 8), [6, 8]),
        call(aten.native_layer_norm.default, f(4, 6, 8), [8], f(8), f(8), 1e-5),
        call(aten.rms_norm.default, f(4, 6, 8), [8], f(8)),
        call(aten.rms_norm.default, f(4, 6, 8), [8], None, 1e-6),
    ]


def lookups() -> list[Sample]:
    return [
        call(aten.index_put.default, f(6, 8), [i(6, 5)], f(5, 8)),
        call(aten.index_put.default, f(6, 8), [torch.randperm(6)], f(6, 8), True),
        call(aten.index_put.default, f(6, 4, 8), [i(6, 5), i(4, 5)], f(8)),
        call(aten.index_put.default, f(6, 8), [i(6, 2, 3)], f(2, 3, 8), True),
        call(aten.index_put.default, f(6, 8), [i(6, 5)], f(5, 1)),
        call(aten.embedding.default, f(12, 8), i(12, 2, 4)),
        call(aten.embedding.default, f(12, 8), i(12, 4), 3),
        call(aten.index.Tensor, f(4, 6, 8), [i(4, 3)]),
        call(aten.index.Tensor, f(4, 6, 8), [None, i(6, 2, 3)]),
        call(aten.index.Tensor, f(4, 6, 8), [i(4, 3), i(6, 3)]),
        call(aten.index.Tensor, f(4, 6, 8), [i(4, 3), None, i(8, 3)]),
        call(aten.index.Tensor, f(4, 6, 8), [i(4, 3, 1), i(6, 5)]),
        call(aten.index.Tensor, f(4, 6, 8, 2), [None, i(6, 3), i(8, 3)]),
        call(aten.index.Tensor, f(4, 6, 8, 2), [None, i(6, 3), None, i(2, 1)]),
        call(aten.index.Tensor, f(4, 6, 8), [torch.tensor([True, False, True, False])]),
        call(aten.index.Tensor, f(4, 6, 8), [b(4, 6)]),
        call(aten.index_select.default, f(4, 6, 8), 1, i(6, 3)),
        call(aten.index_select.default, f(4, 6, 8), -1, i(8, 4)),
        call(aten.gather.default, f(4, 6), 1, i(6, 4, 3)),
        call(aten.gather.default, f(4, 6), 0, i(4, 2, 6)),
        call(aten.gather.default, f(4, 6, 8), -1, i(8, 2, 6, 3)),
    ]


def attentions() -> list[Sample]:
    sdpa = aten.scaled_dot_product_attention.default
    return [
        call(sdpa, f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8)),
        call(sdpa, f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 4), None, 0.0, True),
        call(sdpa, f(2, 8, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), None, 0.0, True, enable_gqa=True),
        call(sdpa, f(2, 8, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), None, 0.0, False, scale=0.3, enable_gqa=True),
        call(sdpa, f(2, 8, 6, 8), f(2, 1, 6, 8), f(2, 1, 6, 8), enable_gqa=True),
        call(sdpa, f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8), b(6, 5)),
        call(sdpa, f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8), f(2, 1, 6, 5)),
        call(sdpa, f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8), f(1, 4, 6, 5)),
        call(sdpa, f(4, 6, 8), f(4, 5, 8), f(4, 5, 8)),
        call(sdpa, f(6, 8), f(5, 8), f(5, 8)),
    ]


FAMILIES = {
    "pointwise": pointwise,
    "matmul": matmuls,
    "view": views,
    "split": splits,
    "reduction": reductions,
    "line": lines,
    "lookup": lookups,
    "attention": attentions,
    "grouped": grouped,
    "convolution": convolutions,
}
