"""Registering a rule: what is wrong, or not shown to be right, is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rules.operators import along_rows, both, clipped_backward, gate, head_softmax, noise, secret_noise
from rules.test_soundness import BROKEN

import paraxis
from paraxis.placement import REPLICATE, Shard
from paraxis.rules import Strategy, rule_for, sample, table, temporary_rules, unregister
from paraxis.rules.base import _families, _rules
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.samples import FAMILIES

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    with temporary_rules():
        yield


def test_a_right_rule_is_taken() -> None:
    rule = table("S(-1), S(-1) -> S(-1)", "R, P -> P")
    assert paraxis.register_rule(gate, samples=[sample(gate, f(4, 6), f(4, 6))])(rule) is rule
    assert rule_for(gate) is rule
    other = table("S(0), S(0) -> S(0)")
    paraxis.register_rule(gate, samples=lambda: [sample(gate, f(4, 6), f(4, 6))])(other)
    assert rule_for(gate) is other  # a later one replaces the earlier
    unregister(gate)
    assert rule_for(gate) is None


def test_the_block_leaves_no_traces() -> None:
    with temporary_rules():
        paraxis.register_rule(gate, samples=[sample(gate, f(4, 6), f(4, 6))])(table("S(0), S(0) -> S(0)"))
        unregister(aten.relu.default)
        assert rule_for(aten.relu.default) is None
    assert rule_for(gate) is None and rule_for(aten.relu.default) is not None
    assert _families[aten.relu.default] == "pointwise"


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
    assert gate not in _rules


def test_a_family_is_no_way_around() -> None:
    with pytest.raises(paraxis.UnsoundRuleError, match="no sample call"):
        paraxis.register_rule(gate, samples="pointwise")(table("S(0), S(0) -> S(0)"))
    with pytest.raises(ValueError, match="no family"):
        paraxis.register_rule(gate, samples="anything")(table("S(0), S(0) -> S(0)"))
    with pytest.raises(paraxis.UnsoundRuleError, match="softmax"):
        paraxis.register_rule(aten._softmax.default, samples="line")(table("S(1) -> S(1)"))


def test_what_offers_nothing_proves_nothing() -> None:
    silent: Any = lambda call, given: []  # noqa: E731
    with pytest.raises(paraxis.UnsoundRuleError, match="nothing shows"):
        paraxis.register_rule(gate, samples=[sample(gate, f(4, 6), f(4, 6))])(silent)
    with pytest.raises(paraxis.UnsoundRuleError, match="nothing shows"):
        paraxis.register_rule(gate, samples=[sample(gate, f(1), f(1))])(table("S(0), S(0) -> S(0)"))


def test_a_rule_that_raises_is_refused() -> None:
    def rule(call: Any, given: Any) -> Any:
        return [Strategy((given[0],), (Shard.of(0, given[0].dims[5]),))]

    with pytest.raises(paraxis.UnsoundRuleError, match="the rule raised"):
        paraxis.register_rule(along_rows, samples=[sample(along_rows, f(4, 6))])(rule)


def test_random_operators_are_compared_by_shape_and_never_drawn_twice() -> None:
    def everywhere(call: Any, given: Any) -> Any:
        if isinstance(given[0], Shard):
            yield Strategy((given[0],), (given[0],))

    calls = [sample(noise, f(4, 6))]
    paraxis.register_rule(noise, samples=calls)(table("S(0) -> S(0)", "S(1) -> S(1)"))
    with pytest.raises(paraxis.UnsoundRuleError, match="random"):
        paraxis.register_rule(noise, samples=calls)(everywhere)
    with pytest.raises(paraxis.UnsoundRuleError, match="not the result"):
        paraxis.register_rule(secret_noise, samples=[sample(secret_noise, f(4, 6))])(table("S(0) -> S(0)"))


def test_a_whole_result_beside_a_sharded_one_is_refused() -> None:
    """Right in values, but the gradient of the second input would count once per rank."""

    def rule(call: Any, given: Any) -> Any:
        if isinstance(given[0], Shard) and given[0].layouts:
            yield Strategy((given[0], REPLICATE), (given[0], REPLICATE))

    with pytest.raises(paraxis.UnsoundRuleError, match="gradients"):
        paraxis.register_rule(both, samples=[sample(both, f(4, 6), f(4, 6))])(rule)
    paraxis.register_rule(both, samples=[sample(both, f(4, 6), f(4, 6))])(table("S(0), S(0) -> S(0), S(0)"))


def test_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    paraxis.register_rule(gate, samples=lambda: [sample(gate, f(4, 6), f(4, 6))])(table("S(0), S(0) -> S(0)"))
    assert torch.equal(torch.rand(3), wanted)


def test_every_built_in_rule_names_a_family() -> None:
    assert set(_rules) == set(_families) and set(_families.values()) <= set(FAMILIES)


def test_a_backward_that_does_not_come_apart_is_refused() -> None:
    """Elementwise forward, but a backward that looks at the whole gradient."""
    calls = [sample(clipped_backward, f(4, 6))]
    with pytest.raises(paraxis.UnsoundRuleError, match="gradient of input 0"):
        paraxis.register_rule(clipped_backward, samples=calls)(table("S(0) -> S(0)"))


def test_rules_do_not_import_the_tool() -> None:
    """Only when a rule is registered from outside: importing Paraxis does not load it."""
    root = Path(paraxis.__file__).parent
    for file in root.rglob("*.py"):
        if "soundness" not in file.parts:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ImportFrom):
                    assert "soundness" not in (node.module or ""), file
