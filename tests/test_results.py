"""Outputs whose sharded fields are gathered when they are read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed import cut
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from paraxis.distributed import count_collectives
from paraxis.distributed.redistribute import sum_copies
from paraxis.placement import SHARED, Layout, Placement, Shard
from paraxis.runtime.gather_on_access import gather_on_access
from paraxis.tensor.sharded_tensor import ShardSpec, wrap

SHAPE = (6, 8)
PLACEMENTS: dict[str, Placement] = {
    "rows": Shard.of(0, Layout.even(6, 2)),
    "uneven": Shard.of(1, Layout.of(8, [[(0, 5)], [(5, 8)]])),
    "packed": Shard.of(1, Layout.concat([(4, Layout.even(4, 2))] * 2)),
    "copies": Shard.of(1, Layout.of(8, [[(0, 6)], [(2, 8)]])),
    "shared": SHARED,
}


def output(placement: Placement) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """An output with sharded logits, the shard that they were made of, and the whole."""
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    local = cut(whole, placement, dist.get_rank()).clone().requires_grad_()
    logits = wrap(local * 1.0, ShardSpec(placement, dist.group.WORLD), SHAPE)  # type: ignore[arg-type]
    made = CausalLMOutputWithPast(loss=local.sum(), logits=logits)  # type: ignore[arg-type]
    return gather_on_access(made), local, whole


def gradients() -> None:
    factor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    for name, placement in PLACEMENTS.items():
        made, local, whole = output(placement)
        assert torch.equal(made.logits, whole), name
        (made.logits * factor).sum().backward()
        total = local.grad
        if isinstance(placement, Shard):  # of copies, each has a part
            total = sum_copies(total, placement, SHAPE, dist.group.WORLD)
        assert torch.allclose(total, cut(factor, placement, dist.get_rank()), atol=1e-6), name


READERS: dict[str, Any] = {
    "attribute": lambda o: o.logits,
    "key": lambda o: o["logits"],
    "position": lambda o: o[1],
    "slice": lambda o: o[:2][1],
    "get": lambda o: o.get("logits"),
    "tuple": lambda o: o.to_tuple()[1],
    "values": lambda o: list(o.values())[1],
    "items": lambda o: dict(o.items())["logits"],
    "arguments": lambda o: dict(**o)["logits"],
    "leaves": lambda o: pytree.tree_leaves(o)[1],
    "copy": lambda o: copy.copy(o).logits,
    "rebuilt": lambda o: type(o)(**{k: v for k, v in o.items()}).logits,
}


def reading() -> None:
    for how, read in READERS.items():
        made, _, whole = output(PLACEMENTS["rows"])
        with count_collectives() as counter:
            assert float(made.loss.detach()) == float(made["loss"].detach()) == float(made[0].detach())
            assert len(made) == 2 and "logits" in made and list(made) == ["loss", "logits"]
            assert isinstance(made, CausalLMOutputWithPast)
        assert counter.total == 0, "nothing is gathered for the loss"
        found = read(made)
        assert type(found) is torch.Tensor and torch.equal(found, whole), how
        assert type(made) is CausalLMOutputWithPast, how
        with count_collectives() as counter:
            assert torch.equal(made.logits, whole) and torch.equal(made["logits"], whole)
        assert counter.total == 0, "it is gathered once"


@pytest.mark.parametrize("job", [gradients, reading])
def test_on_two_ranks(ranks: Any, job: Any) -> None:
    ranks(2).run(job)
