"""The two parallel linear layers. Paired, they need one all-reduce: column in, row out."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ..context import ParallelExecutionCtx
from ..distributed import (
    differentiable_all_gather_reduce_scatter,
    differentiable_all_reduce_sum,
    differentiable_identity,
    differentiable_reduce_scatter_sum,
    redistribute,
)
from ..distributed.redistribute import _MaskToRank0, slice_dim
from ..kernels.cpu.gemv import linear
from ..placement import REPLICATE, Layout, Placement, Shard, ensure_divisibility
from ..tensor.sharded_tensor import ShardedTensor, unwrap

SEQUENCE_DIM = -2
"""The dimension of activations [..., sequence, hidden] that sequence parallelism shards between the layers."""


def layout_of(weight: torch.Tensor, dim: int, ctx: ParallelExecutionCtx, module: str, name: str) -> Layout:
    """The layout of ``weight`` along ``dim``: its own if it is sharded, even shards for a plain tensor."""
    world = ctx.world_size
    if not isinstance(weight, ShardedTensor):
        ensure_divisibility(weight.shape[dim], world, module, name)
        return Layout.even(weight.shape[dim], world)
    placement = weight.placement
    if not isinstance(placement, Shard) or any(d != dim for d in placement.dims):
        raise ValueError(
            f"{module} takes a weight that is sharded on dimension {dim} ({name}) only, but the weight of "
            f"shape {tuple(weight.shape)} is placed as {placement}."
        )
    return placement.dims.get(dim) or Layout.full(world)


def local_parameter(
    parameter: torch.Tensor | None, dim: int | None, layout: Layout, ctx: ParallelExecutionCtx
) -> nn.Parameter | None:
    """The parameter that a layer registers.

    A sharded parameter is used itself, the same object, so that tied weights stay tied. Of a plain one this rank's
    slice along ``dim`` is copied (all of it for ``None``), so that the full tensor can be freed.
    """
    if parameter is None or isinstance(parameter, ShardedTensor):
        return parameter  # type: ignore[return-value]
    full = parameter.detach()
    local = full if dim is None else slice_dim(full, dim, layout, ctx.rank)
    return nn.Parameter(local.clone(memory_format=torch.contiguous_format), parameter.requires_grad)


class LinearParameters(NamedTuple):
    """The parameters of a linear layer. ``transposed``: the weight is [in, out], not ``nn.Linear``'s [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transposed: bool = False

    @classmethod
    def of(cls, linear: nn.Module | LinearParameters) -> LinearParameters:
        """The parameters of a module. transformers' Conv1D, which has an attribute ``nf``, has its weight [in, out]."""
        if isinstance(linear, LinearParameters):
            return linear
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            raise TypeError(f"{type(linear).__name__} is not a linear layer: it has no two-dimensional weight.")
        transposed = not isinstance(linear, nn.Linear) and hasattr(linear, "nf")
        return cls(weight, getattr(linear, "bias", None), transposed)


Layer = TypeVar("Layer", bound="_ParallelLinear")


class _ParallelLinear(nn.Module):
    """What column and row parallel layers share: their parameters, the matmul and their representation."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _flags: tuple[str, ...] = ()

    def __init__(self, ctx: ParallelExecutionCtx, linear: nn.Module | LinearParameters, *, shard_output: bool) -> None:
        super().__init__()
        weight, bias, self.transposed = LinearParameters.of(linear)
        self.group, self.rank, self.world_size = ctx.tp_group, ctx.rank, ctx.world_size
        self.in_features, self.out_features = weight.shape if self.transposed else weight.shape[::-1]
        dim = int(shard_output == self.transposed)
        name = "the output dimension" if shard_output else "the input dimension"
        self.layout = layout_of(weight, dim, ctx, type(self).__name__, name)
        self.register_parameter("weight", local_parameter(weight, dim, self.layout, ctx))
        self.register_parameter("bias", local_parameter(bias, 0 if shard_output else None, self.layout, ctx))

    @classmethod
    def from_parameters(
        cls: type[Layer],
        ctx: ParallelExecutionCtx,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        transposed: bool = False,
        **flags: bool,
    ) -> Layer:
        """The layer for these parameters, which may be sharded or full, without an ``nn.Linear``.

        ``transposed`` says that the weight is [in, out]; ``flags`` are the constructor's.
        """
        return cls(ctx, LinearParameters(weight, bias, transposed), **flags)  # type: ignore[call-arg]

    def _matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = unwrap(self.weight)
        return linear(x, weight.t() if self.transposed else weight, bias)

    def _bias(self, target: Placement) -> torch.Tensor | None:
        """The local bias in the placement ``target``, redistributed if the plan has placed it otherwise."""
        if not isinstance(self.bias, ShardedTensor):
            return self.bias
        if self.bias.placement == target:
            return unwrap(self.bias)
        return redistribute(unwrap(self.bias), self.bias.placement, target, self.bias.shape, self.group)

    def extra_repr(self) -> str:
        """Sizes and flags, for ``print(model)``."""
        text = f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
        flags = "".join(f", {name}={getattr(self, name)}" for name in self._flags)
        return f"{text}{flags}, rank={self.rank}/{self.world_size}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose weight is sharded on its output dimension.

    The input is replicated; every rank computes its features of the output.

    Args:
        ctx: The ranks.
        linear: An ``nn.Linear``, or transformers' ``Conv1D``, with plain parameters (of which the layer
            copies this rank's slices) or sharded ones (which it uses without a copy).
        gather_output: Whether to all-gather all features of the output.
        sequence_parallel: Whether the input is sharded on the sequence dimension (-2). It is all-gathered, and
            its gradient is reduce-scattered.
        copy_input: Whether the layer enters the parallel region itself (Megatron's *f*), so that the gradient of
            the input is all-reduced here. With ``False`` the producer of the input does that, once for all
            layers that read it.
    """

    _flags = ("gather_output", "sequence_parallel", "copy_input")

    def __init__(
        self,
        ctx: ParallelExecutionCtx,
        linear: nn.Module | LinearParameters,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        *,
        copy_input: bool = True,
    ) -> None:
        super().__init__(ctx, linear, shard_output=True)
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.copy_input = copy_input
        self._split = Shard.of(0, self.layout)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output: all features, or this rank's without ``gather_output``."""
        if self.copy_input:
            if self.sequence_parallel:
                input = differentiable_all_gather_reduce_scatter(input, self.group, SEQUENCE_DIM)
            else:
                input = differentiable_identity(input, self.group)
        output = self._matmul(input, None if self.bias is None else self._bias(self._split))
        if not self.gather_output:
            return output
        placement = Shard.of(output.ndim - 1, self.layout)
        return redistribute(output, placement, REPLICATE, (*output.shape[:-1], self.out_features), self.group)


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose weight is sharded on its input dimension.

    Every rank multiplies its features of the input; an all-reduce sums the partial results. The bias is replicated.

    Args:
        ctx: The ranks.
        linear: An ``nn.Linear``, or transformers' ``Conv1D``; see :class:`ColumnParallelLinear`.
        input_is_parallel: Whether the input is already sharded, this rank's features; otherwise the layer slices
            the replicated input.
        sequence_parallel: Whether to return the result sharded on the sequence dimension (-2), by a
            reduce-scatter.
        reduce_output: Whether to all-reduce. With ``False`` the result is partial, and rank 0's includes the bias.
    """

    _flags = ("input_is_parallel", "sequence_parallel", "reduce_output")

    def __init__(
        self,
        ctx: ParallelExecutionCtx,
        linear: nn.Module | LinearParameters,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        *,
        reduce_output: bool = True,
    ) -> None:
        super().__init__(ctx, linear, shard_output=False)
        if self.layout.has_copies:
            raise ValueError(
                "RowParallelLinear sums over the ranks, but some input features of its weight live on "
                f"several of them ({self.in_features} sharded as {self.layout}) and would be counted twice."
            )
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.reduce_output = reduce_output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output, or this rank's term of it without ``reduce_output``."""
        if not self.input_is_parallel:
            placement = Shard.of(input.ndim - 1, self.layout)
            input = redistribute(input, REPLICATE, placement, input.shape, self.group)
        bias = self._bias(REPLICATE)
        if not self.reduce_output:
            if bias is not None and torch.is_grad_enabled():
                bias = _MaskToRank0.apply(bias, self.group)
            elif self.rank:  # the same, where there is no backward pass
                bias = None
            return self._matmul(input, bias)
        output = self._matmul(input)
        if self.sequence_parallel:
            output = differentiable_reduce_scatter_sum(output, self.group, SEQUENCE_DIM)
            # Each rank adds it to its part of the sequence only: its gradient is partial.
            bias = None if bias is None else differentiable_identity(bias, self.group)
        else:
            output = differentiable_all_reduce_sum(output, self.group)
        return output if bias is None else output + bias
