"""Paraxis makes PyTorch models tensor-parallel by itself.

The public names are loaded on first use, so that ``paraxis --help`` need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .utils.memory import gc_paused

__version__ = "0.1.0"

_EXPORTS = {
    "init": "initialize",
    "parallelize_model": "api",
    "plan_model": "plan.offline",
    "warm_up": "runtime.warming",
    "check_ranks": "runtime.check_ranks",
    "no_sync": "data_parallel",
    "save_state": "weights.state",
    "load_state": "weights.state",
    "explain_plan": "plan.explain",
    "compare_plans": "plan.diff",
    "report_plan": "report",
    "Machine": "solver",
    "ConstraintError": "solver",
    "parallelize_backend": "runtime.backend",
    "Config": "config",
    "ParallelExecutionCtx": "context",
    "ParameterMeta": "tensor.parameter_meta",
    "ParameterSlice": "tensor.parameter_meta",
    "HashableSlice": "tensor.parameter_meta",
    "MetaAwareMethodsPatcher": "weights.meta_init",
    "initialize_parameter_meta": "weights.meta_init",
    "move_model_to_device": "weights.meta_init",
    "ShardedTensor": "tensor.sharded_tensor",
    "Plan": "plan",
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "DivisibilityError": "errors",
    "RankMismatchError": "errors",
    "UnsoundRuleError": "errors",
    "register_rule": "rules",
    "ensure_divisibility": "placement",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from .api import parallelize_model
    from .capture import CaptureError
    from .config import Config
    from .context import ParallelExecutionCtx
    from .data_parallel import no_sync
    from .errors import CheckpointError, CollectiveError, DivisibilityError, RankMismatchError, UnsoundRuleError
    from .initialize import init
    from .placement import ensure_divisibility
    from .plan import Plan
    from .plan.diff import compare_plans
    from .plan.explain import explain_plan
    from .plan.offline import plan_model
    from .report import report_plan
    from .rules import register_rule
    from .runtime.backend import parallelize_backend
    from .runtime.check_ranks import check_ranks
    from .runtime.warming import warm_up
    from .solver import ConstraintError, Machine
    from .tensor.parameter_meta import HashableSlice, ParameterMeta, ParameterSlice
    from .tensor.sharded_tensor import ShardedTensor
    from .weights.meta_init import MetaAwareMethodsPatcher, initialize_parameter_meta, move_model_to_device
    from .weights.state import load_state, save_state


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paraxis' has no attribute {name!r}")
    with gc_paused():  # it scans all that torch and transformers load, again and again: a quarter of the time
        value = getattr(importlib.import_module(f"paraxis.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
