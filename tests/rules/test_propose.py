"""Rules found by trying: the right lines, and only those."""

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
from paraxis.rules import rule_for, sample, table, temporary_rules
from paraxis.rules.validation import missing, propose
from paraxis.rules.validation.__main__ import main
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
    ("op", "more", "wanted"),
    [
        (gate, (), {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(-1), S(-1) -> S(-1)", "R, P -> P"}),
        (head_softmax, (6,), {"S(-1) -> S(-1); num_heads", "S(0) -> S(0)", "S(-2) -> S(-2)"}),
        (scale_rows, (), {"S(-1), S(-1) -> S(-1)", "S(0), R -> S(0)", "S(-2), R -> S(-2)", "P, R -> P", "R, P -> P"}),
        (along_rows, (), {"S(0) -> S(0)", "S(-2) -> S(-2)"}),
        (packed_gate, (), {"S(0) -> S(0)", "S(-2) -> S(-2)", "S(-1 x2) -> S(-1)"}),
    ],
)
def test_finds_the_right_lines(op: Any, more: Any, wanted: set[str]) -> None:
    source = propose(op, few(op, *more))
    with temporary_rules():
        exec(source, {})
        rule = rule_for(op)
        assert rule is not None and "3 calls" in source
        call, _ = call_of(op, few(op, *more)[0].args, {}, 2)
        assert list(rule(call, [Shard.of(0, Layout.even(4, 2))] * len(call.inputs)))
    assert lines(source) == wanted


def test_makes_calls_from_the_schema() -> None:
    source = propose(head_softmax)
    with temporary_rules():
        exec(source, {})
        assert rule_for(head_softmax) is not None
    assert lines(source) >= {"S(-1) -> S(-1); num_heads", "S(-2) -> S(-2)"}
    assert not any(line == "S(-1) -> S(-1)" for line in lines(source))


def calls_of_along_rows() -> list[Any]:
    return few(along_rows)


def test_a_function_of_samples_is_referred_to() -> None:
    assert "import calls_of_along_rows" in propose(along_rows, calls_of_along_rows)


def test_says_why_there_is_nothing() -> None:
    for op, why in ((mixes_everything, "no way"), (noise, "random"), (secret_noise, "differ from call to call")):
        source = propose(op, [sample(op, f(4, 6))])
        assert why in source and "computed whole" in source
        exec(source, {})
        assert rule_for(op) is None
    assert "no call could be made" in propose(aten.cat.default)


def test_what_sizes_hide_is_not_proposed() -> None:
    """Where the sizes differ, a product cut along the contracted dimension looks like a line that is never offered."""
    calls = [sample(aten.mm.default, f(4, 6), f(6, 8)), sample(aten.mm.default, f(6, 6), f(6, 6))]
    found = lines(propose(aten.mm.default, calls))
    assert found == {"S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P", "P, R -> P", "R, P -> P"}


def test_values_that_were_given_stay_in_their_range() -> None:
    calls = [sample(aten.index_select.default, f(6, 8), 0, i(6, 5))]
    source = propose(aten.index_select.default, calls)
    assert "S(1), R -> S(1)" in lines(source) and "torch.tensor([" in source
    with temporary_rules():
        exec(source, {})


def test_missing() -> None:
    assert missing(aten.mul.Tensor, f(4, 6), f(6)) == []
    with temporary_rules():
        from paraxis.rules import register

        calls = [sample(aten.mul.Tensor, f(4, 6), f(4, 6))]
        register(aten.mul.Tensor, samples=calls)(table("S(0), S(0) -> S(0)"))
        assert missing(aten.mul.Tensor, f(4, 6), f(4, 6)) == ["R, P -> P", "P, R -> P", "S(1), S(1) -> S(1)"]
    assert missing(gate, f(4, 6), f(4, 6)) == ["R, P -> P", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten.native_group_norm", "aten.cumsum"]) == 0
    assert "aten.cumsum.default" in capsys.readouterr().out
    with temporary_rules():
        from paraxis.rules.base import _rules

        _rules[aten.cumsum.default] = _rules[aten.relu.default]
        assert main(["aten.cumsum", "--json"]) == 1
    assert '"operator": "aten.cumsum.default"' in capsys.readouterr().out
