"""Rules for operators, one file per family. See :mod:`paraxis.rules.base` for what a rule is."""

from . import (
    attention,
    convolution,
    factory,
    grouped,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    reduction,
    split,
    view,
)
from .base import FREE, Call, Free, Given, Strategy, Tensor, accepts_free, register, replicated, rule_for, same_size

__all__ = [
    "FREE",
    "Call",
    "Free",
    "Given",
    "Strategy",
    "Tensor",
    "accepts_free",
    "register",
    "replicated",
    "rule_for",
    "same_size",
]
