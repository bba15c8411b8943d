"""Which hooks of modules run in Python at every call, and which are part of a captured graph.

A hook is the user's Python code: it appends to a list, prints, counts, steps into a debugger. A graph would run that
while it is traced, or be compiled again for every length of the list. So a hook runs in Python, around the compiled
forward of its module, and the modules that contain this one run in Python too. The exceptions are hooks that compute a
result from their arguments and nothing else, and those that models are built with (transformers collects hidden states
by hooks, torch normalizes weights): they are traced as part of the program.
"""

from __future__ import annotations

import dis
import math
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..compat.torch import backward_hooks, forward_hooks
from ..compat.transformers import is_output_hook

_MODULES = (torch, F, nn, math)
_BUILTINS = {"isinstance", "tuple", "list", "len", "range", "zip", "min", "max", "abs", "getattr", "int", "float"}
_LEAVES_THE_GRAPH = {"item", "tolist", "numpy", "backward", "data_ptr", "register_hook", "grad", "data", "cpu"}
_EFFECTS = ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME", "DELETE", "IMPORT", "YIELD")
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


def graph_hooks(module: nn.Module) -> list[int]:
    """The ids of the module's hooks that a graph may contain."""
    return [key for key, hook in forward_hooks(module) if _is_of_a_library(hook) or is_pure(hook)]


def has_python_hooks(module: nn.Module, pure_too: bool = False) -> bool:
    """Whether a module has hooks that must run in Python; with ``pure_too``, any that the user has registered."""
    if backward_hooks(module):
        return True
    return any(not _is_of_a_library(hook) and (pure_too or not is_pure(hook)) for _, hook in forward_hooks(module))


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook is one of those that models are built with: transformers' own, or torch's weight norm."""
    return is_output_hook(hook) or type(hook).__module__.startswith("torch.nn.utils.")


@lru_cache(maxsize=1024)
def is_pure(hook: Any) -> bool:
    """Whether a hook is a function that computes its result from its arguments, with torch, and does nothing else.

    Answers no in doubt: a hook that captures a variable, is a method or a partial, refers to a global object, assigns
    to an attribute or item, or calls a method that tensors do not have.
    """
    if type(hook) is not FunctionType or hook.__closure__ or getattr(hook, "__wrapped__", None) is not None:
        return False
    defaults = [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    return all(isinstance(x, _CONSTANTS) for x in defaults) and _is_pure_code(hook.__code__, hook.__globals__)


def _is_pure_code(code: CodeType, namespace: dict[str, Any]) -> bool:
    if code.co_freevars or code.co_cellvars or any(isinstance(x, CodeType) for x in code.co_consts):
        return False
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name.startswith(_EFFECTS):
            return False
        if name.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            if value in namespace:
                if not any(namespace[value] is module for module in _MODULES):
                    return False
            elif value not in _BUILTINS:
                return False
        elif name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")) and not _is_of_tensors(value):
            return False
    return True


def _is_of_tensors(name: str) -> bool:
    """Whether this is a method or attribute of tensors, or a function on them, that a graph can contain."""
    if name in _LEAVES_THE_GRAPH or name.startswith("__"):
        return False
    return hasattr(torch.Tensor, name) or hasattr(F, name) or hasattr(math, name) or name in ("nn", "functional")
