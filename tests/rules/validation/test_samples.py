"""The families of sample calls: each rule has some, and they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from paraxis.capture import mark_output_op
from paraxis.rules.registry import registered
from paraxis.rules.validation.calls import pointwise_overloads
from paraxis.rules.validation.samples import FAMILIES

SAME_RULE = {"aten::_grouped_mm"}
"""Runs in bfloat16 only, too coarse to compare; its rule is validated on an operator that computes the same."""


def test_every_rule_has_samples() -> None:
    """Each operator with a rule has a sample call in the family that its rule names."""

    def name_of(op: Any) -> Any:
        return op._schema.name if isinstance(op, OpOverload) else op if isinstance(op, type) else type(op)

    sampled = {name_of(op): family for family in FAMILIES for op, _, _ in FAMILIES[family]()}
    pointwise = set(pointwise_overloads(registered()))
    for op, entry in registered().items():
        if op in pointwise or op is mark_output_op or entry.samples in ("", "factory") or name_of(op) in SAME_RULE:
            continue
        assert sampled.get(name_of(op)) == entry.samples, f"no sample of {op} in the family {entry.samples}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_run(family: str) -> None:
    torch.manual_seed(0)
    for op, args, kwargs in FAMILIES[family]():
        op(*args, **kwargs)
