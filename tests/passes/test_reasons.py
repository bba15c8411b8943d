"""Every collective has a reason, in one phrase."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paraxis.passes.layers import find_layers
from paraxis.passes.reasons import reason_for
from paraxis.placement import PARTIAL, REPLICATE
from paraxis.plan.offline import Planned, plan_offline


def test_partial_outputs_name_their_layer(offline: Planned) -> None:
    assert [c.reason for c in offline.plan.collectives] == [
        "partial output of a vocab-parallel embedding",
        "partial output of a row-parallel layer",
    ]


def test_gathered_tensors_name_their_consumer(offline: Planned) -> None:
    layers = find_layers(offline.solved)
    gelu = next(step for step in offline.solved.program.steps if "gelu" in str(step.node.target))
    assert reason_for(REPLICATE, layers[1].step, layers[1], None) == "returned to the caller"
    assert reason_for(REPLICATE, layers[0].step, None, gelu) == "aten.gelu needs the full tensor"
    assert reason_for(PARTIAL, gelu, None, None) == "partial output of aten.gelu"


class Norm(nn.Module):
    """A norm over a sharded dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return self.down(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class QR(nn.Module):
    """An operator without a rule on a sharded dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.linalg.qr(self.up(x)).Q)


@pytest.mark.parametrize(("module", "reason"), [(Norm, "statistics of a norm"), (QR, "no rule for aten.linalg_qr")])
def test_reason_of_other_operators(module: type[nn.Module], reason: str) -> None:
    options = {"example_inputs": torch.randn(64, 16), "constraints": {"up": "column"}}
    with plan_offline(module(), 2, None, options) as found:
        assert any(reason in c.reason for c in found.plan.collectives), found.plan.collectives
    torch._dynamo.reset()
