"""The plan: what was decided for a model, as data; making it, applying it, keeping it, and reading it."""

from .plan import CollectivePlan, LayerPlan, Memory, ParameterPlan, Plan, block_of, is_replicated, pattern_of, size_text
