"""The plan: what was decided for a model, as data; making it, applying it, keeping it, and reading it."""

from ..utils.names import block_of, pattern_of
from ..utils.sizes import size_text
from .plan import CollectivePlan, LayerPlan, Memory, ParameterPlan, Plan, is_replicated

__all__ = [
    "CollectivePlan",
    "LayerPlan",
    "Memory",
    "ParameterPlan",
    "Plan",
    "block_of",
    "is_replicated",
    "pattern_of",
    "size_text",
]
