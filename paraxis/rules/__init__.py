"""Rules for operators, one file per family. See :mod:`paraxis.rules.base` for what a rule is."""

from . import (
    attention,
    base,
    convolution,
    factory,
    grouped,
    image,
    indexing,
    loss,
    matmul,
    normalization,
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
    accepts_unplaced,
    register,
    register_rule,
    replicated,
    rule_for,
    same_size,
    sample,
    structures_for,
    temporary_rules,
    unregister,
)
from .table import table

base._built_in = False  # from here on, a rule is checked when it is registered

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
