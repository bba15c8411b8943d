"""The plan formats of the other libraries: which styles each supports, and how a plan is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..compat.transformers import parallel_styles, supports_attention_interface
from .candidates import Candidates, Group
from .choose import Choice
from .styles import COLUMN, EXPERTS, GATHERED, PACKED, ROW, ROW_SPLIT, VOCAB, parse_parameter_style

FORMATS = ("transformers", "torch", "vllm")

_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    COLUMN: ("colwise",),
    GATHERED: ("colwise_gather_output", "colwise_rep"),
    PACKED: ("packed_colwise",),
    ROW: ("rowwise",),
    ROW_SPLIT: ("rowwise_split_input", "rowwise_rep"),
    VOCAB: ("embedding_rowwise",),
    EXPERTS: ("moe_tp_experts",),
    "shard:-2:1": ("colwise",),
    "shard:-2:2": ("packed_colwise",),
    "shard:-1:1": ("rowwise",),
    "shard:-1:2": ("packed_rowwise",),
}
"""The names of styles in transformers, the current one before older ones."""

_TORCH = {
    COLUMN: "ColwiseParallel()",
    GATHERED: "ColwiseParallel(output_layouts=Replicate())",
    ROW: "RowwiseParallel()",
    ROW_SPLIT: "RowwiseParallel(input_layouts=Replicate())",
    VOCAB: "RowwiseParallel(input_layouts=Replicate())",
}

_VLLM = {COLUMN: "colwise", ROW: "rowwise"}
"""The two styles that vLLM documents for its transformers backend."""


class NotExportable(ValueError):
    """The other library can run no part of a plan exactly. The message names the modules."""


def styles_of_transformers() -> dict[str, str]:
    """The styles that the installed transformers supports, and its names for them."""
    known = parallel_styles()
    found = {style: next((name for name in names if name in known), None) for style, names in _TRANSFORMERS.items()}
    return {style: name for style, name in found.items() if name is not None}


def names_of(target: str) -> Mapping[str, str]:
    """The styles that the library supports, and its names for them."""
    if target == "transformers":
        return styles_of_transformers()
    return _TORCH if target == "torch" else _VLLM


def restricted(found: Candidates, target: str) -> Candidates:
    """The candidates that the library has styles for."""
    names = names_of(target)
    supported = Candidates(replicated=dict(found.replicated), custom_forward=set(found.custom_forward))

    def known(styles: Mapping[str, str]) -> bool:
        return all(style in names and not _is_ambiguous(pattern, style) for pattern, style in styles.items())

    for group in found.groups:
        reason = _unsupported(target, group.styles)
        options = [styles for styles in (group.styles, *group.alternatives) if known(styles)]
        if options:
            separate = group.separate if known(group.separate) and target != "vllm" else {}
            supported.groups.append(Group(group.where, options[0], options[1:], separate, group.reason))
        elif group.separate and known(group.separate) and target != "vllm":
            supported.groups += [Group(p, {p: style}, reason=reason) for p, style in group.separate.items()]
        else:
            modules = {p: style for p, style in group.styles.items() if parse_parameter_style(style) is None}
            supported.replicated.update(
                {p: _unsupported_by_vllm(style) if target == "vllm" else reason for p, style in modules.items()}
            )
    return supported


def _is_ambiguous(pattern: str, style: str) -> bool:
    """A row style never shards a parameter called ``bias``."""
    return parse_parameter_style(style) is not None and pattern.endswith(".bias")


def _unsupported_by_vllm(style: str) -> str:
    if style == VOCAB:
        return "vLLM shards the input embedding itself"
    if style == EXPERTS:
        return "vLLM runs fused experts itself"
    if style in (PACKED, ROW):
        return "vLLM documents no style for packed outputs"
    return "vLLM documents no style for a single layer: it shards the lm_head itself, and replicates others"


def _unsupported(target: str, styles: Mapping[str, str]) -> str:
    what = {PACKED: "packed outputs", EXPERTS: "3-D weights"}
    which = next((what[style] for style in styles.values() if style in what), "this")
    return f"{target} has no style for {which}"


# -- transformers -------------------------------------------------------------------------------------------------


def transformers_plans(model: Any, choice: Choice) -> dict[str, dict[str, str]]:
    """``tp_plan`` of the model, and ``base_model_tp_plan`` with the names of the base model.

    transformers merges a plan with the one it ships for the model. Modules that are sharded only in the shipped plan
    must therefore be named as replicated.
    """
    names = styles_of_transformers()
    plan = {pattern: names[style] for pattern, style in choice.styles.items()}
    plan |= _gradient_styles(model, choice)
    shipped = _shipped(model) if _merges() else set()
    prefix = _base_prefix(model)
    base = {pattern.removeprefix(prefix): style for pattern, style in plan.items() if pattern.startswith(prefix)}
    implied = {name.removeprefix(prefix) for name in shipped if name.startswith(prefix)}
    base_model = getattr(model, "base_model", model)
    if _merges() and isinstance(getattr(base_model, "embed_tokens", None), nn.Embedding):
        implied.add("embed_tokens")  # transformers adds it to a base model's plan unless it is named
    if (shipped - set(plan)) | (implied - set(base)):
        replicate = _replicate_style()
        plan |= {name: replicate for name in sorted(shipped - set(plan))}
        base |= {name: replicate for name in sorted(implied - set(base))}
    return {"tp_plan": plan, "base_model_tp_plan": base}


_GRADIENT_STYLES = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of transformers that only affect the gradients of a module between sharded layers."""


def _gradient_styles(model: Any, choice: Choice) -> dict[str, str]:
    """The gradient styles of the shipped plan, inside groups that are sharded as in that plan."""
    sharded = [group.where for group in choice.groups if {COLUMN, PACKED} & set(group.styles.values())]
    return {
        name: style
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
        if style in _GRADIENT_STYLES and name not in choice.styles and any(name.startswith(f"{w}.") for w in sharded)
    }


def _shipped(model: Any) -> set[str]:
    """The modules in the plan that transformers ships for the model."""
    return set(getattr(model, "tp_plan", None) or {})


def ships_plan(model: Any) -> bool:
    """Whether transformers ships a plan for the model."""
    return bool(_shipped(model))


def _merges() -> bool:
    """Whether transformers merges a plan with the shipped one; before 5.18 it replaced the shipped one."""
    from transformers.distributed import tensor_parallel

    return hasattr(tensor_parallel, "resolve_parallel_plans")


def _replicate_style() -> str:
    if "replicate" not in parallel_styles():
        raise NotExportable(
            "transformers merges a plan with the one it ships for this model, and this version has no style "
            "'replicate' to exclude a module: use transformers 5.22"
        )
    return "replicate"


def _base_prefix(model: Any) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_plan(choice: Choice) -> dict[str, str]:
    """The plan for `parallelize_module`: module names, and the constructor calls of their styles."""
    return {pattern: _TORCH[style] for pattern, style in choice.styles.items()}


def torch_source(plan: Mapping[str, str], tied: list[tuple[str, str]], headline: str) -> str:
    """A Python module with `PLAN` and a function that applies it."""
    lines = [f'"""{headline}"""', ""]
    lines += ["from torch.distributed.tensor import Replicate", "from torch.distributed.tensor.parallel import ("]
    lines += ["    ColwiseParallel,", "    RowwiseParallel,", "    parallelize_module,", ")", "", "PLAN = {"]
    lines += [f"    {json.dumps(name)}: {call}," for name, call in plan.items()]
    lines += ["}", "", "", "def parallelize(model, mesh):"]
    lines += ['    """Shard the model over the ranks of a one-dimensional device mesh."""']
    lines += ["    parallelize_module(model, mesh, PLAN)"]
    lines += [
        f"    model.get_submodule({json.dumps(a)}).weight = model.get_submodule({json.dumps(b)}).weight  # tied"
        for a, b in tied
    ]
    return "\n".join([*lines, "    return model", ""])


def matches(pattern: str, name: str) -> bool:
    """Whether `parallelize_module` matches a name with a pattern: part by part."""
    from fnmatch import fnmatch

    atoms, parts = pattern.split("."), name.split(".")
    return len(atoms) == len(parts) and all(fnmatch(part, atom) for atom, part in zip(atoms, parts, strict=True))


# -- vLLM -------------------------------------------------------------------------------------------------------------


def vllm_plan(model: Any, choice: Choice, generic: Callable[[str], str], ranks: int) -> dict[str, str]:
    """``base_model_tp_plan`` as vLLM's transformers backend reads it.

    vLLM shards the heads of every attention over the ranks, so all of them must be sharded, KV heads too. It matches
    names as regular expressions from the left, so no name may match more than its own modules.

    Raises:
        NotExportable: vLLM would run something else.
    """
    if not supports_attention_interface(model):
        raise NotExportable(
            f"{type(model).__name__} does not use transformers' attention interface, which vLLM's transformers backend "
            "requires"
        )
    prefix = _base_prefix(model)
    rows = {pattern for pattern, style in choice.styles.items() if style == ROW}
    attentions: dict[str, None] = {}
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and any(isinstance(m, nn.Linear) for m in module.modules()):
            attentions[generic(name)] = None
    for where in attentions:
        if not any(row.startswith(f"{where}.") for row in rows):
            why = next((reason for p, reason in choice.replicated.items() if p.startswith(f"{where}.")), "")
            raise NotExportable(
                f"vLLM shards the heads of every attention, and {where} cannot be sharded" + (f": {why}" if why else "")
            )
    kv_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if attentions and isinstance(kv_heads, int) and kv_heads % ranks:
        raise NotExportable(
            f"vLLM shards the heads of every attention, and the {kv_heads} KV heads of {next(iter(attentions))} are "
            f"not divisible by {ranks} ranks"
        )
    plan = {p.removeprefix(prefix): _VLLM[style] for p, style in choice.styles.items() if p.startswith(prefix)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.startswith(prefix):
            continue
        inner = name.removeprefix(prefix)
        first = next((p for p in plan if re.match(p, inner)), None)
        if first is not None and first != generic(inner):
            raise NotExportable(f"vLLM would match {name} with {first}: it matches names from the left")
    return plan
