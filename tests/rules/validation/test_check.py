"""Checking rules: broken ones are caught, and all built-in ones are right on torch's own samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules.broken import BROKEN
from rules.operators import gate

from paraxis.errors import UnsoundRuleError
from paraxis.placement import PARTIAL, REPLICATE, SHARED, Shard
from paraxis.rules import UNPLACED, rule_for, sample, table
from paraxis.rules.registry import registered
from paraxis.rules.validation import check
from paraxis.rules.validation.calls import recorded_calls
from paraxis.rules.validation.check import (
    NO_VALUE,
    Report,
    input_placements,
    layouts,
    placements,
    prove,
    sample_calls,
)
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of
from paraxis.rules.validation.samples import FAMILIES

aten = torch.ops.aten


@pytest.mark.parametrize(("rule", "op", "args"), BROKEN)
def test_a_broken_rule_is_caught(rule: Any, op: Any, args: Any) -> None:
    assert check(op, *args, rule=rule).wrong


@pytest.mark.filterwarnings("ignore")
def test_built_in_rules_on_samples_of_torch() -> None:
    """What torch's operator database calls, wherever a rule would see it."""
    recorded = recorded_calls(registered())
    checked, wrong = 0, []
    for func, calls in recorded.items():
        if func is aten.equal.default or func._schema.name.removeprefix("aten::") in NO_VALUE:
            continue
        for _, args, kwargs in calls:
            report = check(func, *args, worlds=(2,), skip_kinds=("vocab",), **kwargs)
            wrong += report.wrong[:1]
            checked += len(report.checked)
    assert len(recorded) > 200 and checked > 1800
    assert not wrong, "\n".join(wrong)


def test_an_operator_without_a_rule_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="has no rule to check"):
        check(gate, f(4, 6), f(4, 6))


def test_reports_add_up() -> None:
    first, second = (check(aten.relu.default, f(n, 6), worlds=(2,)) for n in (4, 8))
    total = Report()
    total.add(first)
    total.add(second)
    assert total.calls == 2 and total.sharded == first.sharded + second.sharded > 0
    assert total.checked == first.checked | second.checked and not total.wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_layouts_to_check_cover_what_occurs(world: int) -> None:
    found = layouts(24, world)
    assert len(found) == len(set(found)) and not any(x.is_full for x in found)
    assert any(x.contiguous(24) for x in found) and any(not x.is_even for x in found)
    assert any(x.period < 24 for x in found), "a packed or interleaved one"
    assert any(x.has_copies for x in found) and any(not all(x.ranges) for x in found)
    assert layouts(1, world) == []
    assert SHARED in placements((4, 8), world)
    assert world != 4 or any(isinstance(p, Shard) and len(p.layouts) == 2 for p in placements((4, 8), world))


def test_input_placements_vary_every_input() -> None:
    call, _ = call_of(aten.mul.Tensor, (f(4, 8), f(4, 8)), {}, 2)
    found = input_placements(call, 2)
    assert (PARTIAL, PARTIAL) in found and (PARTIAL, REPLICATE) in found and (REPLICATE, PARTIAL) in found
    assert UNPLACED not in {p for combination in found for p in combination}
    assert (REPLICATE, UNPLACED) in input_placements(call, 2, free=True) and call.layouts[1, 0]


def test_proving_needs_samples_that_shard() -> None:
    rule = table("S(0) -> S(0)")
    assert prove([aten.relu.default], rule, [sample(aten.relu.default, f(4, 6))]).sharded
    with pytest.raises(UnsoundRuleError, match="no sample call of aten.neg"):
        prove([aten.neg.default], rule, [sample(aten.relu.default, f(4, 6))])
    with pytest.raises(UnsoundRuleError, match="the rule is wrong for aten.cumsum"):
        prove([aten.cumsum.default], rule, [sample(aten.cumsum.default, f(4, 6), 0)])


def test_samples_by_list_function_or_family() -> None:
    one = sample(aten.relu.default, f(4))
    assert sample_calls([one]) == sample_calls(lambda: [one]) == [one]
    assert sample_calls([sample(aten.relu, f(4))])[0].target is aten.relu.default
    assert len(sample_calls("attention")) == len(FAMILIES["attention"]())
    assert rule_for(sample_calls("attention")[0].target) is not None
