"""The forward of a parallel model leads into its compiled program, whoever calls it.

``model(...)`` calls ``forward``, and so do wrappers around the model, which may do it directly. What stands around the
forward (hooks, the autocast of a trainer) stays in Python. A copy of the model gets shards and a program of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..capture.cached_properties import compute_cached_properties
from ..capture.trace import is_tracing
from ..compat.attention_masks import note_full_attention
from ..compat.dynamo import never_compile
from ..compat.torch import COMPILED_CALL, set_compiled_call
from ..compat.transformers import install_output_hooks
from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel import setup_data_parallel
from ..tensor.sharded_tensor import ShardedTensor
from .compiled_call import CompiledCall
from .submodule_call import SubmoduleCall

_BOUND = {
    "forward",
    "generate",
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
    "save_pretrained",
    "resize_token_embeddings",
    "get_compiled_call",
    "compile",
    "_apply",
    "_original_forward",
    "_is_accelerate_prepared",
    COMPILED_CALL,
    "__deepcopy__",
    "__reduce_ex__",
}
"""Attributes of a parallel model that belong to this one object: a copy gets its own."""


def compiled_call_of(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, name: str = "") -> CompiledCall:
    """The compiled program of a model, or of a part of it that is called by itself."""
    install_output_hooks(model)  # on every rank: one that did not make the plan has not captured the model
    note_full_attention(model)
    compute_cached_properties(model)
    # A forward that somebody has put on this object is compiled together with the call around it.
    own = None if "forward" in model.__dict__ else model.forward
    return CompiledCall(model, ctx, config, name, forward=own)


def redirect_forward(model: nn.Module, call: CompiledCall) -> None:
    """Make the model's forward run its program."""
    own = call.forward
    if own is None:
        set_compiled_call(model, SubmoduleCall(model, lambda: call))
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if call.running or (torch.compiler.is_compiling() and is_tracing()):  # the program is made of the forward
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # somebody compiles what this model is a part of
            return _outside_of_graphs(call, *args, **kwargs)
        return call(*args, **kwargs)

    never_compile(forward)
    # The signature alone: tools that undo wrappers must not go past this one.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    forward.__doc__ = own.__doc__
    forward.leads_in = call  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


@torch.compiler.disable
def _outside_of_graphs(call: CompiledCall, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def model_copier(
    model: nn.Module,
    call: CompiledCall,
    install_model_methods: Callable[[Any, ParallelExecutionCtx, CompiledCall], None],
) -> Callable[[dict[int, Any]], nn.Module]:
    """What ``copy.deepcopy(model)`` does: a model with shards and a program of its own, under the same plan."""

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        ctx = call.ctx
        twin = type(model).__new__(type(model))
        memo[id(model)] = twin
        twin.__dict__.update(copy.deepcopy(shallow_state(model), memo))
        for part in twin.modules():  # which would lead into the programs of the original
            if hasattr(part.__dict__.get("forward"), "leads_in"):
                del part.__dict__["forward"]
                part.__dict__.pop("get_compiled_call", None)
        theirs = copy.copy(ctx)
        theirs.param_cache = {name: memo.get(id(p), p) for name, p in ctx.param_cache.items()}
        theirs.parallel_layer_cache, theirs.last_optimized_graph_module = {}, None
        theirs.compile_times, theirs.state = 0, replace(ctx.state, grad_reducer=None, pass_seconds={})
        theirs.plan = replace(ctx.plan, breaks=()) if ctx.plan is not None else None
        sharded = {n: p for n, p in theirs.param_cache.items() if isinstance(p, ShardedTensor)}
        setup_data_parallel(sharded, theirs, call.config)
        program = compiled_call_of(twin, theirs, call.config, call.name)
        if call.fell_back:
            program.fall_back("; ".join(ctx.plan.breaks[:1]) if ctx.plan is not None else "")
        for kind, problem in call.broken.items():
            program.fall_back(problem, kind)
        install_model_methods(twin, theirs, program)
        return twin

    return deepcopy


def shallow_state(model: nn.Module) -> dict[str, Any]:
    """What a shallow copy of a parallel model has in common with it: all but what belongs to this one object."""
    return {name: value for name, value in model.__dict__.items() if name not in _BOUND}
