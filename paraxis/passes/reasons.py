"""Why a collective is there, in words: what was made in pieces, and who needs it in one."""

from __future__ import annotations

import torch

from ..capture import mark_output_op
from ..placement import Partial, Placement
from ..rules import rule_for
from ..solver import Step
from .layers import Layer

aten = torch.ops.aten
_SUMS = {"aten::sum", "aten::mean", "aten::var"}
_LAYERS = {"row": "sums of a row-parallel layer", "vocab": "look-ups in parts of the vocabulary"}


def reason_for(source: Placement, producer: Step | None, layer: Layer | None, consumer: Step | None) -> str:
    """What is brought together; ``consumer`` is the step that asks for it first, or the return."""
    if isinstance(source, Partial):
        return _of_a_sum(producer, layer)
    if consumer is None or consumer.call is None or consumer.node.target is mark_output_op:
        return "returned to the caller"
    target = consumer.call.target
    name = _name(target)
    if rule_for(target) is None:
        return f"no rule for {name} on a sharded tensor"
    if consumer.impure:
        return f"{name} writes into memory that others see"
    if producer is not None and layer is not None and layer.kind == "linear" and consumer.node.target in _CONTRACT:
        return "a small projection, split for memory, whose output the next one needs whole"
    return f"{name} needs it whole"


_CONTRACT = {aten.linear.default, aten.addmm.default, aten.matmul.default, aten.mm.default}


def _of_a_sum(producer: Step | None, layer: Layer | None) -> str:
    if layer is not None and layer.axis in _LAYERS:
        return _LAYERS[str(layer.axis)]
    if producer is None or producer.call is None:
        return "a sum in parts"
    name = _name(producer.call.target)
    if getattr(producer.call.target, "_schema", None) is not None and producer.call.target._schema.name in _SUMS:
        return f"{name} over a sharded dimension, as in the statistics of a norm"
    return f"{name} in parts"


def _name(target: object) -> str:
    return str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else "an operator"
