"""Lifting: shards become arguments and results, so that Inductor sees plain tensors only."""

from __future__ import annotations

import pytest
import torch
from passes.small import inputs, planned

from paraxis import Config
from paraxis.graph.local_program import info_of
from paraxis.passes import ParallelLayerReplacePass
from paraxis.passes.lift import LiftShardsPass, ResultAt, lift, lifted_of
from paraxis.passes.setting import Setting
from paraxis.plan.offline import Planned
from paraxis.tensor.sharded_tensor import ShardedTensor
from paraxis.weights.materialize import materialize_parameters


def local_program(offline: Planned) -> torch.fx.GraphModule:
    """The local program, with weights."""
    with torch.no_grad():
        program = ParallelLayerReplacePass().run(offline.searched.captured, offline.ctx, Config())
    materialize_parameters(offline.ctx, Config())
    return program


def test_lifted_program_computes_what_the_local_program_does() -> None:
    with planned(ranks=1) as offline, torch.no_grad():
        program = local_program(offline)
        parameters = info_of(program).parameters
        lifted_program, lifted = lift(program, parameters)
        arguments = [
            parameters[node.target]
            if node.target in parameters
            else inputs()[str(node.target).removeprefix("L_kwargs_").rstrip("_")]
            for node in program.graph.find_nodes(op="placeholder")
        ]
        local = [p.to_local() for p in lifted.parameters] + [arguments[i] for i in lifted.inputs]  # type: ignore[attr-defined]
        assert not any(isinstance(x, ShardedTensor) for x in local)
        for found, expected in zip(lifted_program(*local), program(*arguments), strict=True):
            torch.testing.assert_close(found, expected)
        assert lifted.results == (ResultAt(0), ResultAt(1)) and lifted.source is program


def test_pass_leaves_fake_examples_for_the_compiler(offline: Planned) -> None:
    program = local_program(offline)
    with torch.no_grad():
        lifted = lifted_of(LiftShardsPass().run(program, offline.ctx, Config()))
    assert len(lifted.examples) == len(lifted.parameters) + len(lifted.inputs)
    shapes = {id(p): tuple(p.to_local().shape) for p in offline.ctx.param_cache.values()}  # type: ignore[attr-defined]
    for example, parameter in zip(lifted.examples, lifted.parameters, strict=False):
        assert tuple(example.shape) == shapes[id(parameter)]
    assert not lifted.dynamic and not lifted.written


def test_program_that_is_not_lifted_is_refused(offline: Planned) -> None:
    with pytest.raises(RuntimeError, match="needs the pass 'lift'"):
        lifted_of(offline.searched.captured)


def test_only_programs_for_inductor_are_lifted() -> None:
    assert LiftShardsPass().applies(Setting(compiled=True))
    assert not LiftShardsPass().applies(Setting()) and not LiftShardsPass().applies(
        Setting(compiled=True, searching=True)
    )
