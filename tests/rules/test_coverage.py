"""Which of torch's core operators have a rule, and why the others have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paraxis.rules import rule_for

aten = torch.ops.aten

WITHOUT = {
    "backward operators, which the graph before autograd does not have": (
        "_adaptive_avg_pool2d_backward", "avg_pool2d_backward", "convolution_backward", "embedding_dense_backward",
        "max_pool2d_with_indices_backward", "native_group_norm_backward", "native_layer_norm_backward",
    ),
    "sizes of results that depend on the data": ("nonzero",),
    "works on memory, of which a shard has another": ("as_strided",),
    "takes as many values as a mask has before: the ranks do not know": ("masked_scatter",),
    "all pairs of rows, in one flat result": ("_pdist_forward",),
    "several results of different kinds, of bags that are not sharded": ("_embedding_bag",),
    "writes running statistics, or is made by autograd only": ("_native_batch_norm_legit",),
}  # fmt: skip


def core() -> Iterator[Any]:
    """The core operators that give tensors and write into none."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and not schema.is_mutable and any("Tensor" in str(r.type) for r in schema.returns):
            op = getattr(getattr(aten, name), schema.overload_name or "default", None)
            if op is not None and torch.Tag.core in op.tags:
                yield op


def test_core_operators_have_a_rule_or_a_reason() -> None:
    reasons = {name for names in WITHOUT.values() for name in names}
    without = {op._schema.name.removeprefix("aten::") for op in core() if rule_for(op) is None}
    assert without == reasons & without, f"neither rule nor reason: {sorted(without - reasons)}"
    assert len(list(core())) > 150
