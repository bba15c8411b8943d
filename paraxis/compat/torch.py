"""Private APIs of torch that are loaded with torch itself.

Seen on torch 2.11, 2.13 and 2.15 unless an entry says otherwise. Names are bound here once: a call site pays no extra
Python frame (``attrgetter`` runs in C).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _current_graph_task_id,
    _functorch,
    _get_mkldnn_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _set_grad_enabled,
)
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.nn import _reduction
from torch.nn.modules import module as module_namespace
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "COMPILED_CALL",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "after_backward",
    "as_if_compiling",
    "backward_hooks",
    "call_forward_and_hooks",
    "core_aten_decompositions",
    "current_dispatch_modes",
    "current_graph_task",
    "disable_dispatch_modes",
    "dispatch_mode_depth",
    "enable_python_dispatcher",
    "fake_tensor_logger",
    "foreach_copy",
    "foreach_mul",
    "foreach_zero",
    "forward_hooks",
    "fused_sdp_choice",
    "global_module_hooks",
    "has_backward_hooks",
    "has_compiled_call",
    "has_module_hooks",
    "higher_order_name",
    "is_data_of_tensor",
    "is_grad_mode_switch",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "is_view",
    "legacy_reduction",
    "linear",
    "make_subclass",
    "make_wrapper_subclass",
    "mark_as_parameter",
    "mkldnn_enabled",
    "module_hook_dicts",
    "must_use_aten",
    "operator_database",
    "operator_name",
    "overload_name",
    "overload_of",
    "packet_name",
    "plain_size",
    "plain_torch_function",
    "pytree",
    "register_ordered_effect",
    "replace_swap_tensors",
    "scaled_dot_product_attention",
    "schema_of",
    "schema_or_none",
    "set_compiled_call",
    "set_data",
    "storage_key",
    "unset_fake_temporarily",
]

# -- operators -----------------------------------------------------------------------------------------------------

linear: Callable[..., torch.Tensor] = torch._C._nn.linear
"""``F.linear``, also where somebody has patched that: a program that has the patch in it would apply it twice."""

scaled_dot_product_attention: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
"""``F.scaled_dot_product_attention``, likewise."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The ``FunctionSchema`` of an operator overload: argument names, aliasing, mutability."""

operator_name: Callable[[Any], str] = attrgetter("_schema.name")
"""The qualified name of an operator overload, without the overload: ``aten::add``."""

packet_name: Callable[[Any], str] = attrgetter("_opname")
"""The name of an operator overload without namespace and overload: ``add``."""

overload_name: Callable[[Any], str] = attrgetter("_overloadname")
"""The overload of an operator: ``Tensor`` in ``aten.add.Tensor``."""


def schema_or_none(target: Any) -> Any:
    """The schema of a graph node's target; None if it is a Python function."""
    return getattr(target, "_schema", None)


def overload_of(target: Any) -> Any:
    """The overload behind the object that ``torch.library.custom_op`` returns; any other target unchanged."""
    return getattr(target, "_opoverload", target)


def higher_order_name(target: Any) -> str:
    """The name of a higher-order operator such as ``autograd_function_apply``; empty for other targets."""
    return str(target.name()) if isinstance(target, HigherOrderOperator) else ""


def is_data_of_tensor(target: Any) -> bool:
    """Whether a node reads ``tensor.data``: a function of its own in what Dynamo captures."""
    return target is getattr(torch._C._autograd, "_get_data_attr", object)


def is_grad_mode_switch(target: Any) -> bool:
    """Whether a node turns gradient computation on or off: what Dynamo leaves of ``with torch.no_grad()``."""
    return target is _set_grad_enabled or target is torch.set_grad_enabled


def register_ordered_effect(name: str) -> None:
    """Keep calls of the operator ``namespace::name`` in program order: a compiler must not reorder collectives."""
    _register_effectful_op(name, _EffectType.ORDERED)


fused_sdp_choice: Callable[..., int] = torch._fused_sdp_choice
"""Which kernel ``scaled_dot_product_attention`` picks for these tensors."""

foreach_zero: Callable[..., Any] = torch._foreach_zero_
"""Zero a list of tensors in place, in one launch."""

foreach_copy: Callable[..., Any] = torch._foreach_copy_
"""Copy a list of tensors to a list of tensors, with one call from Python."""

foreach_mul: Callable[..., Any] = torch._foreach_mul
"""A list of tensors times a scalar in one launch; the fused copy of many tensors (``_foreach_copy_`` loops)."""

legacy_reduction: Callable[..., str] = _reduction.legacy_get_string
"""The ``reduction`` that the deprecated arguments ``size_average`` and ``reduce`` of a loss stand for."""

mkldnn_enabled: Callable[[], bool] = _get_mkldnn_enabled
"""Whether ATen may call oneDNN; the public flag can only be set."""


def operator_database() -> list[Any]:
    """torch's test samples of its operators (``OpInfo``); slow to import, and needs ``expecttest`` or a stand-in."""
    return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)


# -- tensor subclasses and storages --------------------------------------------------------------------------------

plain_torch_function: Any = torch._C._disabled_torch_function_impl
"""What a subclass has as ``__torch_function__`` whose operators are all found by dispatch."""
make_wrapper_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""A tensor subclass without storage of its own, as ``torch.utils._python_dispatch`` tells authors to create it."""

make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
"""A tensor of another class on the same storage."""

storage_key: Callable[[Any], int] = attrgetter("_cdata")
"""Identity of a storage: the same for all Python objects of one C++ storage."""


has_backward_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""The gradient hooks of a tensor; None or empty if it has none."""

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether autograd regards a tensor as a view of another one."""


set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""``tensor.data = other`` for a subclass that overrides ``data``: shape, dtype and storage become those of the other
tensor, and autograd expects gradients of the new dtype."""


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor subclass."""
    tensor._is_param = True  # type: ignore[attr-defined]


def replace_swap_tensors(handles: Callable[[Any], bool], swap: Callable[[Any, Any], None]) -> None:
    """Let ``torch.utils.swap_tensors`` use ``swap`` where one of its tensors is one that ``handles`` accepts.

    torch swaps the contents of Python objects, and refuses tensors to which there are weak references, as Dynamo has to
    each parameter of a program. ``parametrize`` asks for a swap where a parameter is a wrapper subclass.
    """
    own = torch.utils.swap_tensors

    @functools.wraps(own)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if handles(t1) or handles(t2):
            swap(t1, t2)
        else:
            own(t1, t2)

    torch.utils.swap_tensors = swap_tensors


# -- modules -------------------------------------------------------------------------------------------------------


def call_forward_and_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, bypassing the compiled call that was installed on it."""
    return module._call_impl(*args, **kwargs)


def fake_tensor_logger() -> logging.Logger:
    """Where torch logs the traceback of every operator that fails on fake tensors (seen in 2.11 to 2.13)."""
    return logging.getLogger(FakeTensorMode.__module__)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute with what ``module(...)`` runs instead of its forward, as ``nn.Module.compile`` sets it."""


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` run ``call`` instead, the way ``nn.Module.compile`` does."""
    setattr(module, COMPILED_CALL, call)


def has_compiled_call(module: nn.Module) -> bool:
    """Whether calling the module runs compiled code instead of its forward."""
    return getattr(module, COMPILED_CALL) is not None


module_hook_dicts: tuple[Callable[[nn.Module], dict[int, Any]], ...] = tuple(
    map(attrgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))
)
"""A module's hooks by their ids, of each of the four kinds."""

global_module_hooks: tuple[dict[int, Any], ...] = (
    module_namespace._global_forward_hooks,
    module_namespace._global_forward_pre_hooks,
    module_namespace._global_backward_hooks,
    module_namespace._global_backward_pre_hooks,
)
"""The hooks of all modules of the process: what ``register_module_forward_hook`` and its like fill."""


def forward_hooks(module: nn.Module) -> list[tuple[int, Callable[..., Any]]]:
    """The forward hooks and forward pre-hooks of a module, with their ids."""
    return [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]


def backward_hooks(module: nn.Module) -> list[int]:
    """The ids of the backward hooks of a module."""
    return [*module._backward_hooks, *module._backward_pre_hooks]


def has_module_hooks(module: nn.Module) -> bool:
    """Whether hooks run around this module's forward: its own, or those of all modules."""
    return any(global_module_hooks) or any(hooks(module) for hooks in module_hook_dicts)


# -- who watches ---------------------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = _current_graph_task_id
"""The backward pass that runs on this thread; -1 outside of one."""

after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function when the backward pass that runs now has ended; only from inside of one, such as from a hook."""

dispatch_mode_depth: Callable[[], int] = _len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` are active."""

disable_dispatch_modes: Callable[[], Any] = _disable_current_modes
"""A context in which no ``TorchDispatchMode`` is active."""

current_dispatch_modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""The active modes, the outermost first."""


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp``) or forward differentiation is active."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def must_use_aten() -> bool:
    """Whether torch's own operators must run: something differentiates, traces, counts, casts or batches them.

    Otherwise a kernel may bypass the dispatcher.
    """
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or _is_tracing()
        or _len_torch_dispatch_stack_pre_dispatch() > 0
    )


def plain_size(size: torch.SymInt) -> torch.SymInt:
    """A symbolic size that is its symbol and nothing else: torch may have replaced another symbol by it."""
    node = size.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)  # type: ignore[no-any-return]


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is true for Python code that no compiler traces."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
