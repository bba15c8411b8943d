"""Registering a rule: one that is wrong, or that cannot be validated, is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rules.broken import BROKEN
from rules.operators import along_rows, both, clipped_backward, gate, head_softmax, noise, secret_noise

import paraxis
from paraxis.placement import REPLICATE, Shard
from paraxis.rules import Strategy, rule_for, sample, table, temporary_rules, unregister
from paraxis.rules.registry import registered
from paraxis.rules.validation.draw import f

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _temporary() -> Iterator[None]:
    with temporary_rules():
        yield


def test_a_right_rule_is_registered() -> None:
    rule = table("S(-1), S(-1) -> S(-1)", "R, P -> P")
    assert paraxis.register_rule(gate, samples=[sample(gate, f(4, 6), f(4, 6))])(rule) is rule
    assert rule_for(gate) is rule
    other = table("S(0), S(0) -> S(0)")
    paraxis.register_rule(gate, samples=lambda: [sample(gate, f(4, 6), f(4, 6))])(other)
    assert rule_for(gate) is other  # a later one replaces the earlier
    unregister(gate)
    assert rule_for(gate) is None


@pytest.mark.parametrize(("rule", "op", "args"), BROKEN)
def test_a_broken_rule_is_refused(rule: Any, op: Any, args: Any) -> None:
    before = rule_for(op)
    with pytest.raises(paraxis.UnsoundRuleError, match=r"ranks, .* -> .*: ") as error:
        paraxis.register_rule(op, samples=[sample(op, *args)])(rule)
    assert str(op) in str(error.value) and isinstance(error.value, ValueError)
    assert rule_for(op) is before


def test_samples_are_required() -> None:
    with pytest.raises(TypeError, match="samples"):
        paraxis.register_rule(gate)  # type: ignore[call-arg]
    rule = table("S(0), S(0) -> S(0)")
    with pytest.raises(paraxis.UnsoundRuleError, match="no sample call of paraxis_tests.gate.default"):
        paraxis.register_rule(gate, samples=[])(rule)
    with pytest.raises(paraxis.UnsoundRuleError, match="no sample call of paraxis_tests.head_softmax"):
        paraxis.register_rule(gate, head_softmax, samples=[sample(gate, f(4, 6), f(4, 6))])(rule)
    with pytest.raises(TypeError, match="paraxis.rules.sample"):
        paraxis.register_rule(gate, samples=[(f(4, 6), f(4, 6))])(rule)
    assert gate not in registered()


def test_a_family_of_samples_is_validated_too() -> None:
    with pytest.raises(paraxis.UnsoundRuleError, match="no sample call"):
        paraxis.register_rule(gate, samples="pointwise")(table("S(0), S(0) -> S(0)"))
    with pytest.raises(ValueError, match="no family"):
        paraxis.register_rule(gate, samples="anything")(table("S(0), S(0) -> S(0)"))
    with pytest.raises(paraxis.UnsoundRuleError, match="softmax"):
        paraxis.register_rule(aten._softmax.default, samples="line")(table("S(1) -> S(1)"))


def test_a_rule_that_shards_nothing_is_refused() -> None:
    silent: Any = lambda call, placements: []  # noqa: E731
    with pytest.raises(paraxis.UnsoundRuleError, match="cannot be validated"):
        paraxis.register_rule(gate, samples=[sample(gate, f(4, 6), f(4, 6))])(silent)
    with pytest.raises(paraxis.UnsoundRuleError, match="cannot be validated"):
        paraxis.register_rule(gate, samples=[sample(gate, f(1), f(1))])(table("S(0), S(0) -> S(0)"))


def test_a_rule_that_raises_is_refused() -> None:
    def rule(call: Any, placements: Any) -> Any:
        return [Strategy((placements[0],), (Shard.of(0, placements[0].dims[5]),))]

    with pytest.raises(paraxis.UnsoundRuleError, match="the rule raised"):
        paraxis.register_rule(along_rows, samples=[sample(along_rows, f(4, 6))])(rule)


def test_random_operators_are_compared_by_shape_and_have_no_copies() -> None:
    def everywhere(call: Any, placements: Any) -> Any:
        if isinstance(placements[0], Shard):
            yield Strategy((placements[0],), (placements[0],))

    calls = [sample(noise, f(4, 6))]
    paraxis.register_rule(noise, samples=calls)(table("S(0) -> S(0)", "S(1) -> S(1)"))
    with pytest.raises(paraxis.UnsoundRuleError, match="random"):
        paraxis.register_rule(noise, samples=calls)(everywhere)
    with pytest.raises(paraxis.UnsoundRuleError, match="are not the result"):
        paraxis.register_rule(secret_noise, samples=[sample(secret_noise, f(4, 6))])(table("S(0) -> S(0)"))


def test_a_replicated_result_beside_a_sharded_one_is_refused() -> None:
    """Right in values, but the gradient of the second input would be summed once per rank."""

    def rule(call: Any, placements: Any) -> Any:
        if isinstance(placements[0], Shard) and placements[0].layouts:
            yield Strategy((placements[0], REPLICATE), (placements[0], REPLICATE))

    with pytest.raises(paraxis.UnsoundRuleError, match="gradient would be summed"):
        paraxis.register_rule(both, samples=[sample(both, f(4, 6), f(4, 6))])(rule)
    paraxis.register_rule(both, samples=[sample(both, f(4, 6), f(4, 6))])(table("S(0), S(0) -> S(0), S(0)"))


def test_the_random_state_does_not_change() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    paraxis.register_rule(gate, samples=lambda: [sample(gate, f(4, 6), f(4, 6))])(table("S(0), S(0) -> S(0)"))
    assert torch.equal(torch.rand(3), expected)


def test_a_backward_that_needs_the_full_gradient_is_refused() -> None:
    """Pointwise forward, but a backward that reads the full gradient."""
    calls = [sample(clipped_backward, f(4, 6))]
    with pytest.raises(paraxis.UnsoundRuleError, match="gradient of input 0"):
        paraxis.register_rule(clipped_backward, samples=calls)(table("S(0) -> S(0)"))


def test_validation_is_loaded_when_a_rule_is_registered() -> None:
    """Importing Paraxis does not load it."""
    program = (
        "import sys, torch, paraxis\n"
        "from paraxis.rules import sample, table\n"
        "assert 'paraxis.rules.validation' not in sys.modules\n"
        "relu, x = torch.ops.aten.relu.default, torch.rand(4, 6, dtype=torch.float64)\n"
        "paraxis.register_rule(relu, samples=[sample(relu, x)])(table('S(0) -> S(0)'))\n"
        "assert 'paraxis.rules.validation' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
