"""Why a collective is in the program: which operator left its result sharded or partial, and which one needs it."""

from __future__ import annotations

import torch

from ..capture import mark_output_op
from ..compat.torch import OpOverload, schema_or_none
from ..placement import Partial, Placement
from ..rules import rule_for
from ..solver import Step
from .layers import Layer

aten = torch.ops.aten
_SUMS = {"aten::sum", "aten::mean", "aten::var"}
_LAYERS = {"row": "partial output of a row-parallel layer", "vocab": "partial output of a vocab-parallel embedding"}


def reason_for(source: Placement, producer: Step | None, layer: Layer | None, consumer: Step | None) -> str:
    """The reason in one phrase. ``consumer`` is the first step that needs the result, None if it is returned."""
    if isinstance(source, Partial):
        return _reason_of_partial(producer, layer)
    if consumer is None or consumer.call is None or consumer.node.target is mark_output_op:
        return "returned to the caller"
    target = consumer.call.target
    name = _name(target)
    if rule_for(target) is None:
        return f"no rule for {name} on a sharded tensor"
    if consumer.impure:
        return f"{name} writes in place into memory that is visible elsewhere"
    if producer is not None and layer is not None and layer.kind == "linear" and consumer.node.target in _MATMULS:
        return "a small projection, sharded to save memory, whose full output the next layer needs"
    return f"{name} needs the full tensor"


_MATMULS = {aten.linear.default, aten.addmm.default, aten.matmul.default, aten.mm.default}


def _reason_of_partial(producer: Step | None, layer: Layer | None) -> str:
    if layer is not None and layer.axis in _LAYERS:
        return _LAYERS[str(layer.axis)]
    if producer is None or producer.call is None:
        return "a partial result"
    name, schema = _name(producer.call.target), schema_or_none(producer.call.target)
    if schema is not None and schema.name in _SUMS:
        return f"{name} over a sharded dimension, as in the statistics of a norm"
    return f"partial output of {name}"


def _name(target: object) -> str:
    return str(target).removesuffix(".default") if isinstance(target, OpOverload) else "an operator"
