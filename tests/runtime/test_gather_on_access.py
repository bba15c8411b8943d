"""Outputs whose sharded fields are gathered when they are read, and only then."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.shards import local_shard
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
    """An output with sharded logits, the shard they wrap, and the full tensor."""
    full = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    local = local_shard(full, placement, dist.get_rank()).clone().requires_grad_()
    logits = wrap(local * 1.0, ShardSpec(placement, dist.group.WORLD), SHAPE)  # type: ignore[arg-type]
    plain = CausalLMOutputWithPast(loss=local.sum(), logits=logits)  # type: ignore[arg-type]
    found = gather_on_access(plain)
    assert type(plain) is CausalLMOutputWithPast, "the class of the caller's object is left alone"
    return found, local, full


def gradients() -> None:
    factor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    for name, placement in PLACEMENTS.items():
        found, local, full = output(placement)
        assert torch.equal(found.logits, full), name
        (found.logits * factor).sum().backward()
        total = local.grad
        if isinstance(placement, Shard):  # where ranks hold replicas, each has a partial gradient
            total = sum_copies(total, placement, SHAPE, dist.group.WORLD)
        assert torch.allclose(total, local_shard(factor, placement, dist.get_rank()), atol=1e-6), name


READERS: dict[str, Any] = {
    "attribute": lambda o: o.logits,
    "key": lambda o: o["logits"],
    "position": lambda o: o[1],
    "negative": lambda o: o[-1],
    "slice": lambda o: o[:2][1],
    "get": lambda o: o.get("logits"),
    "tuple": lambda o: o.to_tuple()[1],
    "values": lambda o: list(o.values())[1],
    "items": lambda o: dict(o.items())["logits"],
    "arguments": lambda o: dict(**o)["logits"],
    "leaves": lambda o: pytree.tree_leaves(o)[1],
    "copy": lambda o: copy.copy(o).logits,
    "copy method": lambda o: o.copy().logits,
    "rebuilt": lambda o: type(o)(**{k: v for k, v in o.items()}).logits,
    "mapped": lambda o: pytree.tree_map(lambda x: x, o).logits,
}


def reading() -> None:
    for how, read in READERS.items():
        found, _, full = output(PLACEMENTS["rows"])
        value = read(found)
        assert type(value) is torch.Tensor and torch.equal(value, full), how
        assert isinstance(found, CausalLMOutputWithPast) and type(found).__name__ == "CausalLMOutputWithPast"
        assert type(type(found)(loss=found.loss)) is CausalLMOutputWithPast, "rebuilt, it is a plain one"
        with count_collectives() as counter:
            assert torch.equal(found.logits, full) and torch.equal(found["logits"], full), how
            detached = type(found)(**{name: tensor.detach() for name, tensor in found.items()})
            assert torch.equal(pickle.loads(pickle.dumps(detached)).logits, full)
        assert counter.total == 0, "it is gathered once"


def looking() -> None:
    """What one rank may do on its own: nothing of it is a collective."""
    found, _, full = output(PLACEMENTS["rows"])
    if dist.get_rank() == 0:
        with count_collectives() as counter:
            assert float(found.loss.detach()) == float(found["loss"].detach()) == float(found[0].detach())
            assert float(found[:1][0].detach()) == float(found.get("loss").detach())
            assert len(found) == 2 and "logits" in found and list(found) == list(found.keys()) == ["loss", "logits"]
            assert found.past_key_values is None and type(found).past_key_values is None and type(found).logits is None
            assert repr(found).startswith("CausalLMOutputWithPast(loss=tensor(") and "ShardedTensor(" in str(found)
            assert "ShardedTensor(" in repr(copy.copy(found))
            with pytest.raises(TypeError, match="cannot pickle CausalLMOutputWithPast while logits is sharded"):
                pickle.dumps(found)
        assert counter.total == 0
    assert torch.equal(found.logits, full) and "ShardedTensor(" not in repr(found)


def replacing() -> None:
    """A field that is set is the caller's; a copy has fields of its own."""
    for name in ("attribute", "key"):
        found, _, full = output(PLACEMENTS["rows"])
        twin = copy.copy(found)
        with count_collectives() as counter:
            if name == "attribute":
                found.logits = torch.zeros(2)
            else:
                found["logits"] = torch.zeros(2)
            assert torch.equal(found.logits, torch.zeros(2)) and torch.equal(found["logits"], torch.zeros(2))
        assert counter.total == 0
        assert torch.equal(twin.logits, full)


@pytest.mark.parametrize("job", [gradients, reading, looking, replacing])
def test_on_two_ranks(ranks: Any, job: Any) -> None:
    ranks(2).run(job)


def test_other_results_are_left_alone() -> None:
    plain = CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2))  # type: ignore[arg-type]
    for result in (plain, (torch.ones(2),), {"loss": torch.ones(())}, None):
        assert gather_on_access(result) is result
