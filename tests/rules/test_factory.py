"""Operators that create tensors."""

from __future__ import annotations

import torch
from rules.families import strategies

from paraxis.placement import Layout, Shard
from paraxis.rules import replicated
from paraxis.rules.registry import registered
from paraxis.rules.validation.check import input_placements
from paraxis.rules.validation.run import Trial, same, shard_of
from paraxis.rules.validation.samples import FAMILIES


def test_every_strategy_for_the_samples_is_right() -> None:
    """No strategy shards anything; the replicated one is right, and the result does not depend on the input's shard."""
    torch.manual_seed(0)
    for op, args, kwargs in FAMILIES["factory"]():
        trial = Trial.of(op, args, kwargs, 2)
        for placements in input_placements(trial.call, 2, free=True):
            assert strategies(op, args, placements, **kwargs) == []
        assert trial.problem(replicated(trial.call)) is None
        for rank in range(2):
            shard = shard_of(args[0], Shard.of(0, Layout.even(args[0].shape[0], 2)), rank)
            assert same(op(shard, *args[1:], **kwargs), trial.results[0])


def test_there_is_nothing_to_shard() -> None:
    """Factories take no tensors, or only their dtype (``x.new_zeros(...)``), or scalars (the bounds of linspace)."""
    factories = [op for op, entry in registered().items() if entry.samples == "factory"]
    assert len(factories) > 20
    for op in factories:
        takes_tensor = any("Tensor" in str(a.type) for a in op._schema.arguments)
        assert not takes_tensor or op._schema.name.startswith(("aten::new_", "aten::linspace")), op
