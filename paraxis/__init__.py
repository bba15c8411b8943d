"""Paraxis makes PyTorch models tensor-parallel by itself.

The public names are loaded on first use, so that ``paraxis --help`` need not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "parallelize_model": "api",
    "plan_model": "planning",
    "warm_up": "warming",
    "no_sync": "data_parallel",
    "save_state": "weights.state",
    "load_state": "weights.state",
    "explain_plan": "explaining",
    "compare_plans": "comparing",
    "report_plan": "report",
    "Machine": "solver",
    "ConstraintError": "solver",
    "parallelize_backend": "compile",
    "Config": "core",
    "ParallelExecutionCtx": "core",
    "ParameterMeta": "core",
    "ParameterSlice": "core",
    "HashableSlice": "core",
    "MetaAwareMethodsPatcher": "meta",
    "initialize_parameter_meta": "meta",
    "move_model_to_device": "meta",
    "ShardedTensor": "sharded",
    "Plan": "plan",
    "CaptureError": "capture",
    "CheckpointError": "weights.errors",
    "CollectiveError": "errors",
    "UnsoundRuleError": "errors",
    "register_rule": "rules",
    "ensure_divisibility": "placement",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from .api import parallelize_model
    from .capture import CaptureError
    from .comparing import compare_plans
    from .compile import parallelize_backend
    from .core import Config, HashableSlice, ParallelExecutionCtx, ParameterMeta, ParameterSlice
    from .data_parallel import no_sync
    from .errors import CollectiveError, UnsoundRuleError
    from .explaining import explain_plan
    from .meta import MetaAwareMethodsPatcher, initialize_parameter_meta, move_model_to_device
    from .placement import ensure_divisibility
    from .plan import Plan
    from .planning import plan_model
    from .report import report_plan
    from .rules import register_rule
    from .sharded import ShardedTensor
    from .solver import ConstraintError, Machine
    from .warming import warm_up
    from .weights.errors import CheckpointError
    from .weights.state import load_state, save_state


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paraxis' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paraxis.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
