"""Finding strategies by trial and error."""

from __future__ import annotations

import torch
from rules.operators import gate, head_softmax, packed_gate

from paraxis.rules import register, sample, table, temporary_rules
from paraxis.rules.table import Line
from paraxis.rules.validation import missing
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.exploration import candidates, confirm, report_on

aten = torch.ops.aten


def test_missing_strategies_are_listed() -> None:
    assert missing(aten.mul.Tensor, f(4, 6), f(6)) == []
    with temporary_rules():
        calls = [sample(aten.mul.Tensor, f(4, 6), f(4, 6))]
        register(aten.mul.Tensor, samples=calls)(table("S(0), S(0) -> S(0)"))
        assert missing(aten.mul.Tensor, f(4, 6), f(4, 6)) == ["R, P -> P", "P, R -> P", "S(1), S(1) -> S(1)"]
    assert missing(gate, f(4, 6), f(4, 6)) == ["R, P -> P", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]


def test_candidates_of_one_call() -> None:
    assert [str(x) for x in candidates(sample(head_softmax, f(3, 12), 6))] == [
        "S(0) -> S(0)",
        "S(1) -> S(1); num_heads",
    ]
    assert "S(1 x2) -> S(1)" in map(str, candidates(sample(packed_gate, f(4, 12))))
    assert candidates(sample(aten.rand_like.default, f(4, 6))) == [], "values cannot be compared"


def test_only_lines_that_hold_for_every_layout_are_confirmed() -> None:
    lines = [Line.parse("S(0) -> S(0)"), Line.parse("S(1) -> S(1)")]
    calls = [sample(aten.cumsum.default, f(4, 6), 1)]
    confirmed = confirm(lines, calls, worlds=(2, 3))
    assert confirmed == lines[:1]
    assert report_on(confirmed, calls, (2,)).sharded and report_on(lines, calls, (2,)).wrong
