"""Random numbers: the same where tensors are replicated, different where they are sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paraxis.distributed.random import RandomState


def drawn() -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + dist.get_rank())
    group: Any = dist.group.WORLD
    state, other = RandomState(group, torch.device("cpu")), RandomState(group, torch.device("cpu"), stream=1)
    torch.manual_seed(3)
    found = {
        "replicated": state.run(torch.rand, False, 8),
        "next": state.run(torch.rand, False, 8),
        "sharded": state.run(torch.rand, True, 8),
        "other stream": other.run(torch.rand, False, 8),
    }
    torch.manual_seed(3)
    expected = torch.rand(8)
    torch.manual_seed(3)
    state.run(torch.rand, False, 8)
    assert torch.equal(torch.rand(8), expected), "the caller's random state does not change"
    return found


def test_ranks_draw_the_same_or_different_numbers(ranks: Any) -> None:
    first, second = ranks(2).run(drawn)
    for name in ("replicated", "next", "other stream"):
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(first["sharded"], second["sharded"])
    assert len({tuple(x.tolist()) for x in first.values()}) == 4
