"""The parallel layers of the local program, one for each layer of the model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Node

from ..context import ParallelExecutionCtx
from ..layers import ColumnParallelLinear, RowParallelLinear, VocabParallelCrossEntropyLoss, VocabParallelEmbedding
from ..placement import Shard
from ..rules import Strategy
from ..tensor.sharded_tensor import ShardedTensor
from .layers import Layer
from .solve import Solved

_REDUCTIONS = ("none", "mean", "sum")


def make_layer(
    layer: Layer, strategy: Strategy, solved: Solved, ctx: ParallelExecutionCtx
) -> tuple[str, nn.Module] | None:
    """(path, module); None where the layer stays an operator: it is replicated, or its weight is no parameter.

    A layer is created once: later captures find it in ``ctx.parallel_layer_cache``. Its own collectives are off, since
    the partitioner inserts them where they are needed.
    """
    if layer.kind == "cross_entropy":
        return _loss(layer, strategy, ctx)
    if not strategy.kind:
        return None
    weight = _parameter(layer.weight, solved, ctx)
    bias = _parameter(layer.bias, solved, ctx)
    takes_bias = len(layer.step.inputs) > 2
    if weight is None or (takes_bias and bias is None) or not _is_stored_for(strategy, weight, layer):
        return None
    assert layer.weight is not None
    path = solved.parameters[layer.weight].name.rpartition(".")[0] or "layer"
    key: Any
    if layer.kind == "embedding":
        args: Any = layer.step.node.args
        padding = args[2] if len(args) > 2 and args[2] != -1 else None
        if (len(args) > 3 and args[3]) or (len(args) > 4 and args[4]) or strategy.kind != "vocab":
            return None
        key = (id(weight), "vocab", padding)
        if key not in ctx.parallel_layer_cache:
            ctx.parallel_layer_cache[key] = VocabParallelEmbedding.from_parameters(
                ctx, weight, padding, reduce_output=False
            )
        return path, ctx.parallel_layer_cache[key]
    key = (id(weight), id(bias), strategy.kind, layer.transposed)
    if key not in ctx.parallel_layer_cache:
        if strategy.kind == "column":
            ctx.parallel_layer_cache[key] = ColumnParallelLinear.from_parameters(
                ctx, weight, bias, transposed=layer.transposed, gather_output=False, copy_input=False
            )
        else:
            ctx.parallel_layer_cache[key] = RowParallelLinear.from_parameters(
                ctx, weight, bias, transposed=layer.transposed, input_is_parallel=True, reduce_output=False
            )
    return path, ctx.parallel_layer_cache[key]


def _parameter(node: Node | None, solved: Solved, ctx: ParallelExecutionCtx) -> nn.Parameter | None:
    """The sharded parameter of a node; None for plain tensors, which are inputs of the program."""
    if node is None or solved.parameters[node].meta is None:
        return None
    found = ctx.param_cache.get(solved.parameters[node].name)
    if not isinstance(found, ShardedTensor) or found.spec.placement is None:  # or a plan is being searched
        return None
    return found  # type: ignore[return-value]


def _is_stored_for(strategy: Strategy, weight: nn.Parameter, layer: Layer) -> bool:
    """Whether the parameter is stored with the sharding that the strategy uses, and need not be gathered first."""
    placement = weight.placement  # type: ignore[attr-defined]
    if not isinstance(placement, Shard) or len(placement.layouts) != 1:
        return False
    dim = placement.layouts[0][0]
    expected = 0 if layer.kind == "embedding" else int((strategy.kind == "row") != layer.transposed)
    return dim == expected


def _loss(layer: Layer, strategy: Strategy, ctx: ParallelExecutionCtx) -> tuple[str, nn.Module] | None:
    """The vocab-parallel loss, or None."""
    call = layer.step.call
    assert call is not None
    if strategy.kind != "vocab":
        return None
    logits = call.inputs[0]
    size = logits.shape[0 if logits.ndim == 1 else 1]
    reduction, ignore = call.arg(3, "reduction", 1), call.arg(4, "ignore_index", -100)
    smoothing = call.arg(5, "label_smoothing", 0.0)
    key = ("loss", size, reduction, ignore, smoothing)
    if key not in ctx.parallel_layer_cache:
        ctx.parallel_layer_cache[key] = VocabParallelCrossEntropyLoss(
            ctx, ignore_index=ignore, reduction=_REDUCTIONS[reduction], label_smoothing=smoothing, vocab_size=size
        )
    return "loss", ctx.parallel_layer_cache[key]
