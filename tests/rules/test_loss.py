"""Cross-entropy with sharded classes."""

from __future__ import annotations

import pytest
import torch
from rules.families import strategies

from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.rules.validation.check import input_placements
from paraxis.rules.validation.draw import f, i
from paraxis.rules.validation.run import call_of, indices, same, shard_of
from paraxis.rules.validation.samples import FAMILIES

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default


def vocab_parallel_log_softmax(shards: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """What the ranks of the parallel layer compute: log-softmax from two all-reduces, of maxima and of sums."""
    maximum = torch.stack([x.amax(dim, keepdim=True) for x in shards if x.numel()]).amax(0)
    total = torch.stack([(x - maximum).exp().sum(dim, keepdim=True) for x in shards]).sum(0)
    return [x - maximum - total.log() for x in shards]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_strategy_for_the_samples_is_right(world: int) -> None:
    """The loss from the shards that the rule asks for, and its gradient, are those of the unsharded operator.

    The strategy is run by a parallel layer, not by the operator: here on simulated ranks.
    """
    torch.manual_seed(0)
    validated = 0
    for op, args, kwargs in FAMILIES["loss"]():
        logits, target, *more = args
        call, _ = call_of(op, args, kwargs, world)
        dim = 0 if logits.ndim == 1 else 1
        found = {
            s.inputs[0]
            for placements in input_placements(call, world)
            for s in strategies(op, args, placements, world, **kwargs)
        }
        for placement in found:
            full = logits.clone().requires_grad_()
            assert isinstance(placement, Shard) and list(placement.dims) == [dim]
            ranks = [indices(placement.dims[dim], logits.shape[dim], rank) for rank in range(world)]
            assert [c for rank in ranks for c in rank] == list(range(logits.shape[dim])), "classes must be contiguous"
            parts = vocab_parallel_log_softmax([shard_of(full, placement, rank) for rank in range(world)], dim)
            loss = aten.nll_loss_nd.default(torch.cat(parts, dim), target, *more)
            expected = op(logits.requires_grad_(), target, *more)
            assert same(loss, expected)
            gradients = [torch.autograd.grad(y.sum(), x)[0] for y, x in ((loss, full), (expected, logits))]
            assert same(*gradients)
            validated += 1
    assert validated >= 4


def test_offers_only_contiguous_classes_and_index_targets() -> None:
    def kinds(logits: torch.Tensor, target: torch.Tensor, placed: Shard, *more: torch.Tensor) -> list[str]:
        others = [REPLICATE] * (1 + len(more))
        return [s.kind for s in strategies(CROSS_ENTROPY, (logits, target, *more), [placed, *others])]

    even, packed = Layout.even(8, 2), Layout.even(4, 2)
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, even)) == ["vocab"]
    assert kinds(f(8), torch.tensor(3), Shard.of(0, even)) == ["vocab"]
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, packed)) == []
    assert kinds(f(6, 8), f(6, 8), Shard.of(1, even)) == []
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, even), torch.ones(8, dtype=torch.float64)) == ["vocab"]
    assert kinds(f(8, 8), i(8, 8), Shard.of(0, even)) == []
