"""The vocabulary parallel embedding against the unsharded one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.shards import local_shard, run_all, sharded_parameter
from models.compare import context
from torch import nn

from paraxis.layers import VocabParallelEmbedding
from paraxis.placement import SHARED, Layout, Shard
from paraxis.tensor.sharded_tensor import ShardedTensor
from ranks import RankPool

Ranks = Callable[[int], RankPool]

VOCAB, HIDDEN = 20, 6
IDS = torch.tensor([[0, 19, 3, 3, 4, 9, 10, 15], [5, 0, 14, 12, 1, 2, 19, 3]])


def full_table(padding_idx: int | None) -> nn.Embedding:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding_idx)


def the_gradient() -> torch.Tensor:
    return torch.randn(*IDS.shape, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def expected(padding_idx: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    table = full_table(padding_idx)
    y = table(IDS)
    y.backward(the_gradient())
    assert table.weight.grad is not None
    return y.detach(), table.weight.grad


def lookup(
    padding_idx: int | None, sequence_parallel: bool, reduce_output: bool, layout: Layout | None
) -> tuple[torch.Tensor, torch.Tensor]:
    table = full_table(padding_idx)
    flags = {"sequence_parallel": sequence_parallel, "reduce_output": reduce_output}
    if layout is None:
        layer = VocabParallelEmbedding(context(), table, **flags)
    else:
        weight = sharded_parameter(table.weight, Shard.of(0, layout))
        layer = VocabParallelEmbedding.from_parameters(context(), weight, padding_idx, **flags)
        assert layer.weight is weight
    y = layer(IDS)
    rank, world = dist.get_rank(), dist.get_world_size()
    y.backward(the_gradient().chunk(world, 1)[rank] if sequence_parallel else the_gradient())
    grad = layer.weight.grad
    assert grad is not None
    return y.detach(), grad._local if isinstance(grad, ShardedTensor) else grad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_results_and_gradients_are_those_of_the_full_table(ranks: Ranks, world: int, padding_idx: int | None) -> None:
    y, dw = expected(padding_idx)
    even = Layout.even(VOCAB, world)
    ends = [0, 7, 20] if world == 2 else [0, 7, 8, 17, 20]
    uneven = Layout.of(VOCAB, [[span] for span in itertools.pairwise(ends)])
    layouts = [None, even, uneven]
    cases = [(padding_idx, False, True, layout) for layout in layouts]
    cases += [(padding_idx, True, True, None), (padding_idx, False, False, None)]
    jobs = ranks(world).run(run_all, lookup, cases)
    for (_, sequence_parallel, reduce_output, layout), *results in zip(cases, *jobs):
        outputs = [y_ for y_, _ in results]
        if not reduce_output:
            outputs = [torch.stack(outputs).sum(0)]
        elif sequence_parallel:
            outputs = [torch.cat(outputs, 1)]
        for y_ in outputs:
            torch.testing.assert_close(y_, y, rtol=0, atol=0)
        for rank, (_, dw_) in enumerate(results):
            torch.testing.assert_close(dw_, local_shard(dw, Shard.of(0, layout or even), rank))


def refusals() -> dict[str, str]:
    ctx, world = context(), dist.get_world_size()
    messages = {}
    table = full_table(None)
    packed = sharded_parameter(table.weight, Shard.of(0, Layout.even(10, world)))  # twice ten ids
    shared = sharded_parameter(table.weight, SHARED)
    builds = {
        "packed": lambda: VocabParallelEmbedding.from_parameters(ctx, packed),
        "shared": lambda: VocabParallelEmbedding.from_parameters(ctx, shared),
        "divisible": lambda: VocabParallelEmbedding(ctx, nn.Embedding(21, 4)),
        "max_norm": lambda: VocabParallelEmbedding(ctx, nn.Embedding(20, 4, max_norm=1.0)),
        # Ids that are in no rank's range: an error on every rank, as on one device, and not a zero vector.
        "too large": lambda: VocabParallelEmbedding(ctx, table)(torch.tensor([0, VOCAB])),
        "negative": lambda: VocabParallelEmbedding(ctx, table)(torch.tensor([0, -1])),
    }
    for name, build in builds.items():
        with pytest.raises((ValueError, NotImplementedError, IndexError)) as caught:
            build()
        messages[name] = f"{type(caught.value).__name__}: {caught.value}"
    messages["text"] = repr(VocabParallelEmbedding(ctx, full_table(3)))
    return messages


def test_what_cannot_be_sharded_is_refused(ranks: Ranks) -> None:
    for rank, messages in enumerate(ranks(2).run(refusals)):
        assert "one range of ids per rank" in messages["packed"] and "one range" in messages["shared"]
        assert "21 is not divisible by 2" in messages["divisible"] and "vocabulary" in messages["divisible"]
        assert "max_norm=1.0" in messages["max_norm"]
        assert messages["too large"].startswith("IndexError") and messages["negative"].startswith("IndexError")
        assert f"ids={rank * 10}:{rank * 10 + 10}" in messages["text"] and "padding_idx=3" in messages["text"]


def operators_of_lookup() -> set[str]:
    layer = VocabParallelEmbedding(context(), full_table(None))
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert torch.equal(layer(IDS), full_table(None)(IDS))
    return {event.key for event in profile.key_averages()}


def test_a_single_rank_masks_nothing(ranks: Ranks) -> None:
    (found,) = ranks(1).run(operators_of_lookup)
    assert "aten::embedding" in found
    assert not found & {"aten::masked_fill", "aten::ge", "aten::bitwise_or"}
