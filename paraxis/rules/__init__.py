"""Rules for operators, one file per family. See :mod:`paraxis.rules.base` for what a rule is.

``rules/validation`` checks them against the real operators.
"""

from . import (
    attention,
    convolution,
    factory,
    flex_attention,
    grouped,
    image,
    indexing,
    loss,
    matmul,
    normalization,
    paged_attention,
    pointwise,
    reduction,
    split,
    view,
)
from .base import (
    UNPLACED,
    Call,
    InputPlacement,
    Rule,
    Sample,
    Strategy,
    Tensor,
    Unplaced,
    replicated,
    same_size,
    sample,
)
from .registration import register_rule
from .registry import (
    accepts_unplaced,
    register_replicated,
    rule_for,
    structures_for,
    temporary_rules,
    unregister,
)
from .table import table

register = register_rule

__all__ = [
    "UNPLACED",
    "Call",
    "InputPlacement",
    "Rule",
    "Sample",
    "Strategy",
    "Tensor",
    "Unplaced",
    "accepts_unplaced",
    "register",
    "register_replicated",
    "register_rule",
    "replicated",
    "rule_for",
    "same_size",
    "sample",
    "structures_for",
    "table",
    "temporary_rules",
    "unregister",
]
