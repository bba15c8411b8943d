"""The registry: which operators have a rule, and why the others have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rules.operators import gate

from paraxis.capture import mark_output_op
from paraxis.compat.host_functions import HOST_FUNCTION
from paraxis.placement import Layout, Shard
from paraxis.rules import rule_for, structures_for, temporary_rules, unregister
from paraxis.rules.registry import accepts_unplaced, builtin_rule, overloads_of, register_replicated, registered
from paraxis.rules.table import table
from paraxis.rules.validation.draw import f
from paraxis.rules.validation.run import call_of
from paraxis.rules.validation.samples import FAMILIES

aten = torch.ops.aten

WITHOUT_RULE = {
    "backward operators, which the graph before autograd does not have": (
        "_adaptive_avg_pool2d_backward", "avg_pool2d_backward", "convolution_backward", "embedding_dense_backward",
        "max_pool2d_with_indices_backward", "native_group_norm_backward", "native_layer_norm_backward",
    ),
    "the size of the result depends on the data": ("nonzero",),
    "works on memory, which is different for a shard": ("as_strided",),
    "the number of values it reads depends on the part of the mask that other ranks hold": ("masked_scatter",),
    "all pairs of rows, in one flat result": ("_pdist_forward",),
    "several results of different kinds, of bags that are not sharded": ("_embedding_bag",),
    "writes running statistics, or is created by autograd only": ("_native_batch_norm_legit",),
}  # fmt: skip


def core_operators() -> Iterator[Any]:
    """The core operators that return tensors and write to none."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and not schema.is_mutable and any("Tensor" in str(r.type) for r in schema.returns):
            op = getattr(getattr(aten, name), schema.overload_name or "default", None)
            if op is not None and torch.Tag.core in op.tags:
                yield op


def test_core_operators_have_a_rule_or_a_reason() -> None:
    reasons = {name for names in WITHOUT_RULE.values() for name in names}
    without = {op._schema.name.removeprefix("aten::") for op in core_operators() if rule_for(op) is None}
    assert without == reasons & without, f"neither rule nor reason: {sorted(without - reasons)}"
    assert len(list(core_operators())) > 150


REPLICATED = (mark_output_op, HOST_FUNCTION)


def test_every_built_in_rule_names_a_family() -> None:
    assert all(entry.samples in FAMILIES for op, entry in registered().items() if op not in REPLICATED)


def test_temporary_rules_are_undone() -> None:
    with temporary_rules():
        builtin_rule(gate, samples="pointwise")(table("S(0), S(0) -> S(0)"))
        unregister(aten.relu.default)
        assert rule_for(gate) is not None and rule_for(aten.relu.default) is None
    assert rule_for(gate) is None and rule_for(aten.relu.default) is not None
    assert registered()[aten.relu.default].samples == "pointwise"


def test_overloads_leave_out_variants_that_write() -> None:
    found = list(overloads_of([aten.relu, aten.add_, aten.mm.default]))
    assert aten.relu.default in found and aten.relu.out not in found and aten.mm.default in found
    assert not any(op._schema.is_mutable for op in found)


def test_replicated_operators_are_never_sharded() -> None:
    call, _ = call_of(gate, (f(4, 6), f(4, 6)), {}, 2)
    with temporary_rules():
        register_replicated(gate)
        rule = rule_for(gate)
        assert rule is not None and list(rule(call, [Shard.of(0, Layout.even(4, 2))] * 2)) == []


def test_pointwise_functions_have_the_rule_of_pointwise_operators() -> None:
    def custom(x: Any) -> Any:
        return x

    assert rule_for(custom) is None and not accepts_unplaced(custom)
    custom.pointwise = True  # type: ignore[attr-defined]
    assert rule_for(custom) is rule_for(aten.relu.default) is not None and accepts_unplaced(custom)


@pytest.mark.parametrize(("op", "accepted"), [(aten.linear.default, True), (aten.matmul.default, False)])
def test_rules_that_accept_unplaced_inputs(op: Any, accepted: bool) -> None:
    assert accepts_unplaced(op) == accepted


def test_operators_have_no_structure_by_default() -> None:
    call, _ = call_of(aten.relu.default, (f(4, 6),), {}, 2)
    assert structures_for(call) == {}
