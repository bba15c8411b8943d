"""Rules found by trial and error: the right lines, and only those."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from rules.operators import (
    along_rows,
    gate,
    head_softmax,
    mixes_everything,
    noise,
    packed_gate,
    scale_rows,
    secret_noise,
)

from paraxis.placement import Layout, Shard
from paraxis.rules import rule_for, sample, temporary_rules
from paraxis.rules.validation import propose
from paraxis.rules.validation.draw import f, i
from paraxis.rules.validation.run import call_of

aten = torch.ops.aten


def lines(source: str) -> set[str]:
    return set(re.findall(r'^        "(.*)",$', source, re.M))


def few(op: Any, *more: Any) -> list[Any]:
    """Calls of an operator that takes tensors of one shape."""
    vector = op is scale_rows
    shapes = [(4, 6, 12), (6, 12), (6, 6)]
    tensors = [(f(*s), f(s[-1]) if vector else f(*s)) if op in (gate, scale_rows) else (f(*s),) for s in shapes]
    return [sample(op, *t, *more) for t in tensors]


@pytest.mark.parametrize(
    ("op", "more", "expected"),
    [
        (gate, (), {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(-1), S(-1) -> S(-1)", "R, P -> P"}),
        (head_softmax, (6,), {"S(-1) -> S(-1); num_heads", "S(0) -> S(0)", "S(-2) -> S(-2)"}),
        (scale_rows, (), {"S(-1), S(-1) -> S(-1)", "S(0), R -> S(0)", "S(-2), R -> S(-2)", "P, R -> P", "R, P -> P"}),
        (along_rows, (), {"S(0) -> S(0)", "S(-2) -> S(-2)"}),
        (packed_gate, (), {"S(0) -> S(0)", "S(-2) -> S(-2)", "S(-1 x2) -> S(-1)"}),
    ],
)
def test_finds_the_right_lines(op: Any, more: Any, expected: set[str]) -> None:
    source = propose(op, few(op, *more))
    with temporary_rules():
        exec(source, {})
        rule = rule_for(op)
        assert rule is not None and "3 calls" in source
        call, _ = call_of(op, few(op, *more)[0].args, {}, 2)
        assert list(rule(call, [Shard.of(0, Layout.even(4, 2))] * len(call.inputs)))
    assert lines(source) == expected


def test_generates_calls_from_the_schema() -> None:
    source = propose(head_softmax)
    assert "from paraxis.rules.validation import schema_samples" in source
    with temporary_rules():
        exec(source, {})
        assert rule_for(head_softmax) is not None
    assert lines(source) >= {"S(-1) -> S(-1); num_heads", "S(-2) -> S(-2)"}
    assert not any(line == "S(-1) -> S(-1)" for line in lines(source))


def calls_of_along_rows() -> list[Any]:
    return few(along_rows)


def test_a_function_of_samples_is_imported() -> None:
    assert "import calls_of_along_rows" in propose(along_rows, calls_of_along_rows)


def test_says_why_there_is_no_rule() -> None:
    for op, why in (
        (mixes_everything, "no line of a table"),
        (noise, "random"),
        (secret_noise, "differ from call to call"),
    ):
        source = propose(op, [sample(op, f(4, 6))])
        assert why in source and "runs replicated" in source
        exec(source, {})
        assert rule_for(op) is None
    assert "no call could be generated" in propose(aten.cat.default)


def test_lines_that_only_hold_for_some_sizes_are_not_proposed() -> None:
    """Where sizes differ, sharding the contracted dimension of a matmul looks like a line that never applies."""
    calls = [sample(aten.mm.default, f(4, 6), f(6, 8)), sample(aten.mm.default, f(6, 6), f(6, 6))]
    found = lines(propose(aten.mm.default, calls))
    assert found == {"S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P", "P, R -> P", "R, P -> P"}


def test_integer_samples_stay_in_their_range() -> None:
    calls = [sample(aten.index_select.default, f(6, 8), 0, i(6, 5))]
    source = propose(aten.index_select.default, calls)
    assert "S(1), R -> S(1)" in lines(source) and "torch.tensor([" in source
    with temporary_rules():
        exec(source, {})
