"""Sample calls of every operator family that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...compat.flex_attention import FlexAttention
from ...compat.packed_attention import PACKED_ATTENTION
from ...compat.paged_attention import PAGED_ATTENTION
from ...compat.transformers import grouped_mm_fallback
from ..base import Sample
from ..base import sample as call
from .draw import b, f, i
from .shapes import lines, lookups, reductions, splits, views

aten = torch.ops.aten


def pointwise() -> list[Sample]:
    """Pointwise operators, with broadcasting; also those that draw random numbers."""
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
        call(aten.leaky_relu.default, f(6, 8), 0.1),
        call(aten.lerp.Scalar, f(4, 8), f(8), 0.3),
        call(aten.addcmul.default, f(4, 8), f(8), f(4, 1), value=2),
        call(aten.relu.default, f(5)),
        call(aten.relu.default, f()),
        call(aten.fill.Scalar, f(4, 8), 2.0),
        call(aten.fill.Tensor, f(4, 8), f()),
        call(aten.polar.default, f(4, 8), f(4, 8)),
        call(aten.real.default, torch.view_as_complex(f(4, 6, 2))),
        call(aten.imag.default, torch.view_as_complex(f(4, 6, 2))),
        call(aten.empty_like.default, f(4, 8)),
        call(aten.rand_like.default, f(4, 8)),
        call(aten.randn_like.default, f(4, 8)),
        call(aten.bernoulli.default, torch.rand(4, 8)),
        call(aten.bernoulli.p, f(4, 8), 0.5),
        call(aten.dropout.default, f(4, 8), 0.5, True),
        call(aten.native_dropout.default, f(4, 8), 0.5, True),
        call(aten.native_dropout.default, f(4, 8), 0.5, None),
        call(aten.feature_dropout.default, f(4, 6, 8), 0.5, True),
    ]


def matmuls() -> list[Sample]:
    """Matmuls and related operators."""
    solve = aten.linalg_solve_triangular.default

    def triangular(*shape: int) -> torch.Tensor:
        return (f(*shape) + 4 * torch.eye(shape[-1], dtype=torch.float64)).triu()

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
        call(solve, triangular(4, 6, 6), f(4, 6, 8), upper=True),
        call(solve, triangular(6, 6), f(6, 8), upper=True),
        call(solve, triangular(6, 6), f(4, 8, 6), upper=True, left=False),
        call(aten.linalg_inv_ex.default, triangular(4, 6, 5, 5)),
        call(aten.linalg_cholesky_ex.default, 9 * torch.eye(5, dtype=torch.float64) + f(6, 5, 5), upper=True),
        call(aten.linalg_matrix_exp.default, f(4, 6, 5, 5)),
        call(aten._cdist_forward.default, f(4, 6, 3), f(4, 8, 3), 2.0, None),
        call(aten._cdist_forward.default, f(6, 4), f(8, 4), 1.0, None),
    ]


def grouped() -> list[Sample]:
    """The experts of a mixture of experts."""
    op = grouped_mm_fallback()
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    return [call(op, f(7, 8), f(4, 8, 12), ends), call(op, f(7, 6), f(4, 6, 4), ends)]


def convolutions() -> list[Sample]:
    """Plain, strided, in groups, transposed."""

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


def attentions() -> list[Sample]:
    """With and without masks, with grouped queries, with dropout."""
    sdpa = aten.scaled_dot_product_attention.default
    offsets = torch.tensor([0, 2, 4, 9])
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
        call(sdpa, f(2, 2, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), None, 0.5),
        call(PACKED_ATTENTION, f(1, 4, 9, 8), f(1, 4, 9, 8), f(1, 4, 9, 6), offsets, None, False),
        call(PACKED_ATTENTION, f(2, 8, 9, 8), f(2, 2, 9, 8), f(2, 2, 9, 8), offsets, 0.3, True),
    ]


def paged_attentions() -> list[Sample]:
    """One sequence from its beginning: with grouped queries, one KV head, a window, sinks."""
    return [
        call(PAGED_ATTENTION, f(1, 4, 9, 8), f(1, 4, 9, 8), f(1, 4, 9, 6), None, 0.3, 0, 0.0, []),
        call(PAGED_ATTENTION, f(1, 8, 9, 8), f(1, 4, 9, 8), f(1, 4, 9, 8), None, 0.3, 4, 0.0, []),
        call(PAGED_ATTENTION, f(1, 8, 9, 8), f(1, 2, 9, 8), f(1, 2, 9, 8), f(8), 0.3, 0, 5.0, []),
        call(PAGED_ATTENTION, f(1, 8, 9, 8), f(1, 1, 9, 8), f(1, 1, 9, 8), None, 0.3, 0, 0.0, []),
    ]


def flex_attentions() -> list[Sample]:
    """With grouped queries, with functions that look at the head, that read tensors, with a block mask per head."""

    def flex(
        q: Any, k: Any, score: Any, mask: Any, score_buffers: Any = (), mask_buffers: Any = (), h: int = 1
    ) -> Sample:
        blocks = torch.ones(1, h, 1, dtype=torch.int32), torch.zeros(1, h, 1, 1, dtype=torch.int32)
        block_mask = (q.shape[2], k.shape[2], *blocks, *[None] * 10, 128, 128, torch.fx.symbolic_trace(mask))
        values = f(*k.shape)
        args: tuple[Any, ...] = (
            q,
            k,
            values,
            torch.fx.symbolic_trace(score),
            block_mask,
            0.3,
            {},
            score_buffers,
            mask_buffers,
        )
        target, leaves = FlexAttention.of(args, {})
        return call(target, *leaves)

    def plain(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score

    def slope(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score + (head + 1) * (q - k)

    def bias(score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any) -> Any:
        return score + table[head, q, k]

    def causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q >= k

    def window(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q - k <= head

    def padded(batch: Any, head: Any, q: Any, k: Any, lengths: Any) -> Any:
        return k < lengths[batch]

    return [
        flex(f(2, 4, 6, 8), f(2, 4, 6, 8), plain, causal),
        flex(f(2, 8, 6, 8), f(2, 4, 6, 8), plain, causal),
        flex(f(2, 6, 6, 8), f(2, 1, 6, 8), slope, causal),
        flex(f(2, 8, 6, 8), f(2, 4, 5, 8), plain, padded, (), (torch.tensor([3, 5]),)),
        flex(f(1, 8, 6, 8), f(1, 8, 6, 8), plain, window, h=8),
        flex(f(1, 4, 6, 8), f(1, 4, 6, 8), bias, causal, (f(4, 6, 6),)),
    ]


def norms() -> list[Sample]:
    """Normalizations of rows, groups and channels."""
    group, batch = aten.native_group_norm.default, aten.batch_norm.default
    frozen = aten._native_batch_norm_legit_no_training.default
    mean, var = f(8), torch.rand(8, dtype=torch.float64) + 0.5
    return [
        call(aten.layer_norm.default, f(4, 6, 8), [8], f(8), f(8)),
        call(aten.layer_norm.default, f(4, 6, 8), [6, 8]),
        call(aten.native_layer_norm.default, f(4, 6, 8), [8], f(8), f(8), 1e-5),
        call(aten.rms_norm.default, f(4, 6, 8), [8], f(8)),
        call(aten.rms_norm.default, f(4, 6, 8), [8], None, 1e-6),
        call(group, f(4, 8, 3), f(8), f(8), 4, 8, 3, 4, 1e-5),
        call(group, f(4, 12, 3, 2), None, None, 4, 12, 6, 6, 1e-5),
        call(group, f(2, 6, 4), f(6), None, 2, 6, 4, 3, 1e-5),
        call(batch, f(4, 8, 3), f(8), f(8), mean, var, False, 0.1, 1e-5, False),
        call(batch, f(4, 8, 3, 2), None, None, mean, var, False, 0.1, 1e-5, False),
        call(batch, f(4, 8, 3), f(8), f(8), None, None, True, 0.1, 1e-5, False),
        call(batch, f(4, 8), None, None, None, None, True, 0.1, 1e-5, False),
        call(frozen, f(4, 8, 3), f(8), f(8), mean, var, 0.1, 1e-5),
        call(frozen, f(4, 8), None, None, mean, var, 0.1, 1e-5),
    ]


def images() -> list[Sample]:
    """Operators along the last dimensions, with and without a batch."""
    one, two, three = f(4, 6, 8), f(4, 6, 7, 8), f(2, 4, 4, 5, 6)
    return [
        call(aten.avg_pool1d.default, one, [2]),
        call(aten.avg_pool2d.default, two, [2, 2], [1, 2], [1, 0]),
        call(aten.avg_pool2d.default, one, [2, 2]),
        call(aten.avg_pool3d.default, three, [2, 2, 2]),
        call(aten.adaptive_avg_pool1d.default, one, [3]),
        call(aten.adaptive_avg_pool2d.default, two, [3, 1]),
        call(aten.adaptive_avg_pool3d.default, three, [3, 1, 2]),
        call(aten._adaptive_avg_pool2d.default, two, [3, 3]),
        call(aten._adaptive_avg_pool3d.default, three, [3, 1, 2]),
        call(aten.max_pool1d.default, one, [2]),
        call(aten.max_pool2d.default, two, [2, 3], [1, 1], [1, 0]),
        call(aten.max_pool3d.default, three, [2, 2, 2]),
        call(aten.max_pool1d_with_indices.default, one, [2]),
        call(aten.max_pool2d_with_indices.default, two, [2, 2]),
        call(aten.max_pool2d_with_indices.default, one, [2, 2]),
        call(aten.max_pool3d_with_indices.default, three, [2, 2, 2]),
        call(aten.adaptive_max_pool1d.default, one, [3]),
        call(aten.adaptive_max_pool2d.default, two, [3, 3]),
        call(aten.adaptive_max_pool3d.default, three, [2, 3, 3]),
        call(aten.reflection_pad1d.default, one, [1, 2]),
        call(aten.reflection_pad2d.default, two, [1, 2, 0, 1]),
        call(aten.reflection_pad3d.default, three, [1, 2, 0, 1, 1, 1]),
        call(aten.replication_pad1d.default, one, [1, 2]),
        call(aten.replication_pad2d.default, one, [1, 2, 0, 1]),
        call(aten.replication_pad3d.default, three, [1, 2, 0, 1, 1, 1]),
        *[call(getattr(aten.upsample_nearest1d, o), one, *size) for o, size in _sizes(1)],
        *[call(getattr(aten.upsample_nearest2d, o), two, *size) for o, size in _sizes(2)],
        *[call(getattr(aten.upsample_nearest3d, o), three, *size) for o, size in _sizes(3)],
        *[call(getattr(aten.upsample_linear1d, o), one, size[0], False, *size[1:]) for o, size in _sizes(1)],
        *[call(getattr(aten.upsample_bilinear2d, o), two, size[0], True, *size[1:]) for o, size in _sizes(2)],
        *[call(getattr(aten.upsample_bicubic2d, o), two, size[0], False, *size[1:]) for o, size in _sizes(2)],
        *[call(getattr(aten.upsample_trilinear3d, o), three, size[0], False, *size[1:]) for o, size in _sizes(3)],
        call(aten.grid_sampler_2d.default, two, f(4, 6, 3, 2), 0, 0, False),
        call(aten.grid_sampler.default, two, f(4, 6, 3, 2), 0, 1, True),
        call(aten.grid_sampler_3d.default, three, f(2, 4, 3, 2, 3), 0, 0, False),
        call(aten.im2col.default, two, [2, 3], [1, 1], [0, 0], [1, 1]),
        call(aten.im2col.default, one, [2, 2], [1, 1], [1, 0], [2, 2]),
        call(aten.col2im.default, f(4, 24, 30), [6, 7], [2, 2], [1, 1], [0, 0], [1, 1]),
        call(aten._fft_r2c.default, one, [2], 0, True),
        call(aten._fft_c2r.default, torch.fft.rfft(one), [2], 0, 8),
        call(aten._fft_c2c.default, torch.fft.rfft(two), [1, 2], 0, True),
    ]


def _sizes(spatial: int) -> list[tuple[str, tuple[Any, ...]]]:
    """Both ways to specify the size of the result: a factor, or the size."""
    return [("vec", (None, [2.0] * spatial)), ("default", ([9, 10, 11][:spatial],))]


def losses() -> list[Sample]:
    """The vocabulary-parallel loss: a parallel layer runs it, with the classes sharded."""
    loss, weight = aten.cross_entropy_loss.default, torch.rand(8, dtype=torch.float64) + 0.5
    return [
        call(loss, f(6, 8), i(8, 6)),
        call(loss, f(6, 8), i(8, 6), weight),
        call(loss, f(4, 8, 3), i(8, 4, 3), None, 2, 3),
        call(loss, f(8), i(8)),
    ]


def factories() -> list[Sample]:
    """Operators that create tensors."""
    return [call(aten.new_zeros.default, f(4, 6), [3, 8]), call(aten.new_full.default, f(4, 6), [3, 8], 2.0)]


FAMILIES: dict[str, Callable[[], list[Sample]]] = {
    "pointwise": pointwise,
    "matmul": matmuls,
    "view": views,
    "split": splits,
    "reduction": reductions,
    "line": lines,
    "lookup": lookups,
    "norm": norms,
    "image": images,
    "attention": attentions,
    "flex_attention": flex_attentions,
    "paged_attention": paged_attentions,
    "grouped": grouped,
    "convolution": convolutions,
    "loss": losses,
    "factory": factories,
}
"""Sample calls by family: the rule of an operator names its family."""
