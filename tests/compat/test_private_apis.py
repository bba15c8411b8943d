"""Private APIs of torch and transformers are used in ``paraxis/compat`` and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paraxis

PACKAGE = Path(paraxis.__file__).parent
LIBRARIES = {"torch", "transformers", "triton", "dist", "nn"}
"""Roots of dotted names that are looked at; ``dist`` and ``nn`` are what torch's packages are imported as."""

OPERATORS = ("torch.ops.", "aten.")
"""Operators are registered with a schema, and matched by identity: those with an underscore too."""

ATTRIBUTES = {
    "_call_impl": "call_forward_and_hooks",
    "_cdata": "storage_key",
    "_compiled_call_impl": "set_compiled_call, has_compiled_call",
    "_flatten": "flattened_group",
    "_get_backend": "backend_name, group_timeout",
    "_get_dtype_plan": "dtype_by_name",
    "_get_root_mesh": "root_mesh",
    "_init_weights": "init_weights_of",
    "_initialize_weights": "initialize_weights_slot",
    "_is_param": "mark_as_parameter",
    "_is_view": "is_view",
    "_attn_implementation": "attention_implementation",
    "_backward_hooks": "has_backward_hooks",
    "_dynamo_source": "name_inputs",
    "_hf_peft_config_loaded": "has_adapters_loaded",
    "_keys_to_ignore_on_load_missing": "keys_to_ignore_on_load",
    "_keys_to_ignore_on_save": "keys_to_ignore_on_save",
    "_make_subclass": "make_subclass",
    "_make_wrapper_subclass": "make_wrapper_subclass",
    "_opname": "packet_name",
    "_opoverload": "overload_of",
    "_overloadname": "overload_name",
    "_param_name_to_source": "name_inputs",
    "_schema": "schema_of, operator_name, schema_or_none",
    "_supports_attention_backend": "supports_attention_interface",
}
"""Private attributes of objects of torch and transformers, and what compat has instead."""


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is used) for each private API in a module's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names if _is_private_module(name))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_library(node.module or ""):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in full if _is_private_module(name))
        elif isinstance(node, ast.Attribute):
            name = _dotted(node)
            operator = name.startswith(OPERATORS)
            if node.attr in ATTRIBUTES or (_is_private_module(name) and not operator):
                yield node.lineno, name or f"….{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ATTRIBUTES or (_is_private_module(node.value) and " " not in node.value):
                yield node.lineno, repr(node.value)


def _is_library(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES


def _is_private_module(name: str) -> bool:
    parts = name.split(".")
    private = [p for p in parts[1:] if p.startswith("_") and not p.startswith("__")]
    moved_often = ("transformers.core_model_loading", "transformers.conversion_mapping", "triton.language.extra")
    return _is_library(name) and (bool(private) or name.startswith(moved_often))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def test_private_apis_are_in_compat_alone() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "compat" not in path.relative_to(PACKAGE).parts
        for line, what in private_uses(path.read_text(encoding="utf-8"))
    ]
    assert not found, "add what is needed to paraxis/compat, and use it from there:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo as dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "from torch.distributed.distributed_c10d import _resolve_process_group",
        "from transformers.core_model_loading import WeightConverter",
        "isinstance(x, torch._ops.OpOverload)",
        "call.target._schema.name",
        "getattr(target, '_schema', None)",
        "importlib.import_module('torch.testing._internal.common_methods_invocations')",
        "model._call_impl(x)",
        "from triton.language.extra.cuda import gdc_wait",
        "dist.distributed_c10d._get_default_store()",
    ],
)
def test_private_apis_are_found(source: str) -> None:
    assert list(private_uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops.aten._to_copy.default",
        "aten._softmax.default",
        "self._schema_cache",
        "module._parameters",
        "torch.__version__",
        "from ._launch import launch",
        "from torch.fx.experimental.proxy_tensor import make_fx",
    ],
)
def test_public_names_are_not_found(source: str) -> None:
    assert not list(private_uses(source))
