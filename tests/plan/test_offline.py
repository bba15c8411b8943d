"""Planning without ranks: from a configuration or a module, with programs after any pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models.tiny import build, config
from passes.small import TinyLM, inputs, planned

from paraxis import CaptureError, plan_model
from paraxis.plan.offline import plan_offline, simulated_group


def test_configuration_and_model_have_the_same_plan() -> None:
    """The first without any weights."""
    by_config, by_model = plan_model(config("llama"), 2), plan_model(build("llama"), 2)
    assert by_config == by_model and by_config.sharded_fraction < 0.55
    torch._dynamo.reset()


def test_memory_is_computed_for_a_context() -> None:
    without, with_context = (plan_model(config("llama"), 2, context=n) for n in (None, 32))
    assert without.memory is not None and with_context.memory is not None
    assert with_context.memory.total > without.memory.total, "KV cache and activations are added"
    torch._dynamo.reset()


def test_timings_of_stages_and_passes_are_in_the_plan() -> None:
    with planned() as found:
        assert {"capture", "decompose", "search", "rewrite"} <= set(found.plan.timings)
        assert {"solve", "annotate", "replace"} <= set(found.plan.pass_timings)


def test_program_after_a_pass() -> None:
    with planned() as found:
        assert "torch.ops.paraxis.all_reduce" in found.program("replace").code
        assert "call_module" in {node.op for node in found.program().graph.nodes}, "layers are placed"
        with pytest.raises(ValueError, match="no pass 'nothing' in the pipeline"):
            found.program("nothing")
        with pytest.raises(ValueError, match="'lift' does not apply to this program; these do: .*replace"):
            found.program("lift")


def test_other_ranks_have_other_shards_of_the_same_plan() -> None:
    shapes = []
    for rank in range(3):
        with plan_offline(TinyLM(), 3, None, {"example_inputs": inputs()}, rank=rank) as found:
            shapes.append({name: p.local_shape for name, p in found.plan.parameters.items()})
        torch._dynamo.reset()
    assert sum(local["up.weight"][0] for local in shapes) == 32 and shapes[0] != shapes[2], "uneven shards"


def test_simulated_ranks_end_with_the_context() -> None:
    with simulated_group(4, rank=2) as group:
        assert (group.size(), group.rank()) == (4, 2)
        with pytest.raises(RuntimeError, match="torch.distributed is initialized"), simulated_group(2):
            pass
    assert not dist.is_initialized()


class Branch(torch.nn.Linear):
    """A graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_graph_break_cannot_be_planned_offline() -> None:
    with pytest.raises(CaptureError, match="planned by running it: call parallelize_model"):
        plan_model(Branch(4, 4), 2, example_inputs=torch.ones(2, 4))
    torch._dynamo.reset()


def test_plan_option_is_refused() -> None:
    with pytest.raises(ValueError, match="plan="):
        plan_model(Branch(4, 4), 2, plan="plan.json")
