"""The captured graph becomes a local program, which knows its collectives, order, inputs and parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from passes.small import TinyLM, inputs, planned

from paraxis import Config
from paraxis.compat.host_functions import HOST_FUNCTION
from paraxis.graph.local_program import info_of
from paraxis.passes import ParallelLayerReplacePass
from paraxis.passes.replace import _constants
from paraxis.passes.solve import solved_of
from paraxis.plan.offline import Planned
from paraxis.weights.materialize import materialize_parameters


def replace(offline: Planned) -> torch.fx.GraphModule:
    """The local program."""
    with torch.no_grad():
        return ParallelLayerReplacePass().run(offline.searched.captured, offline.ctx, Config())


def test_program_knows_its_collectives_and_parameters(offline: Planned) -> None:
    info = info_of(replace(offline))
    assert [(c.kind, c.module) for c in info.collectives] == [("all_reduce", "embed"), ("all_reduce", "")]
    assert {id(p) for p in info.parameters.values()} == {id(p) for p in offline.ctx.param_cache.values()}
    assert len(info.inputs) == len(offline.searched.captured.graph.find_nodes(op="placeholder"))


def test_all_ranks_have_the_same_order_and_fingerprint() -> None:
    found = []
    for rank in range(2):
        with planned(rank=rank) as offline:
            info = info_of(replace(offline))
            found.append((info.order, info.fingerprint))
    assert found[0] == found[1]


def test_captured_graph_is_not_changed(offline: Planned) -> None:
    before = offline.searched.captured.code
    replace(offline)
    assert offline.searched.captured.code == before and solved_of(offline.searched.captured) is offline.solved


def test_program_of_one_rank_computes_the_model() -> None:
    torch.manual_seed(0)
    expected = TinyLM()(**inputs())
    with planned(ranks=1) as offline:
        program = replace(offline)
        materialize_parameters(offline.ctx, Config())
        arguments = {**inputs(), **info_of(program).parameters}
        names = [str(node.target) for node in program.graph.find_nodes(op="placeholder")]
        values = [
            arguments[name] if name in arguments else arguments[name.removeprefix("L_kwargs_").rstrip("_")]
            for name in names
        ]
        with torch.no_grad():
            loss, hidden = program(*values)
        torch.testing.assert_close(loss, expected["loss"])
        torch.testing.assert_close(hidden, expected["hidden"])


def test_numbers_of_host_functions_are_of_one_process_alone() -> None:
    """Ranks compare the numbers of their programs, and each process numbers its host functions itself."""

    def steps(number: int) -> Any:
        calls = [(HOST_FUNCTION, ["x", number]), (torch.ops.aten.mul.Tensor, ["x", 2.5])]
        node = SimpleNamespace(meta={})
        found = [
            SimpleNamespace(node=node, call=SimpleNamespace(target=target, args=args[1:], kwargs={}))
            for target, args in calls
        ]
        return SimpleNamespace(program=SimpleNamespace(steps=found))

    assert _constants(steps(17)) == _constants(steps(18)) == ["aten.mul.Tensor(2.5) in the model"]
