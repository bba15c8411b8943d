"""What each of the other libraries can be told, and how it is written down for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .candidates import Candidates, Group
from .choose import Choice
from .styles import COLUMN, EXPERTS, GATHERED, PACKED, ROW, ROW_SPLIT, VOCAB, parse_cut

FORMATS = ("transformers", "torch", "vllm")

_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    COLUMN: ("colwise",),
    GATHERED: ("colwise_gather_output", "colwise_rep"),
    PACKED: ("packed_colwise",),
    ROW: ("rowwise",),
    ROW_SPLIT: ("rowwise_split_input", "rowwise_rep"),
    VOCAB: ("embedding_rowwise",),
    EXPERTS: ("moe_tp_experts",),
    "cut:-2:1": ("colwise",),
    "cut:-2:2": ("packed_colwise",),
    "cut:-1:1": ("rowwise",),
    "cut:-1:2": ("packed_rowwise",),
}
"""Names that transformers has or had for a way, the present one first."""

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
    """Nothing of a plan can be told to the other library. The message names the modules."""


def styles_of_transformers() -> dict[str, str]:
    """The ways that the installed transformers has a registered style for."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    known = set(ALL_PARALLEL_STYLES.keys())
    found = {way: next((name for name in names if name in known), None) for way, names in _TRANSFORMERS.items()}
    return {way: name for way, name in found.items() if name is not None}


def names_of(target: str) -> Mapping[str, str]:
    """What the library calls each of the ways that it has."""
    if target == "transformers":
        return styles_of_transformers()
    return _TORCH if target == "torch" else _VLLM


def restricted(found: Candidates, target: str) -> Candidates:
    """What of the candidates the library has a style for."""
    names = names_of(target)
    kept = Candidates(whole=dict(found.whole), own=set(found.own))

    def known(ways: Mapping[str, str]) -> bool:
        return all(way in names and not _ambiguous(pattern, way) for pattern, way in ways.items())

    for group in found.groups:
        reason = _lacking(target, group.ways)
        several = [ways for ways in (group.ways, *group.others) if known(ways)]
        if several:
            instead = group.instead if known(group.instead) and target != "vllm" else {}
            kept.groups.append(Group(group.where, several[0], several[1:], instead, group.reason))
        elif group.instead and known(group.instead) and target != "vllm":
            kept.groups += [Group(p, {p: way}, reason=reason) for p, way in group.instead.items()]
        else:
            modules = {p: way for p, way in group.ways.items() if parse_cut(way) is None}
            kept.whole.update({p: _left_to_vllm(way) if target == "vllm" else reason for p, way in modules.items()})
    return kept


def _ambiguous(pattern: str, way: str) -> bool:
    """A parameter called ``bias`` is never cut by a row style."""
    return parse_cut(way) is not None and pattern.endswith(".bias")


def _left_to_vllm(way: str) -> str:
    if way == VOCAB:
        return "vLLM splits the input embedding by itself"
    if way == EXPERTS:
        return "vLLM runs fused experts by itself"
    if way in (PACKED, ROW):
        return "vLLM documents no style for two halves that are cut each by itself"
    return "vLLM documents no style for a layer by itself; it replicates it, or, for the head, splits it by itself"


def _lacking(target: str, ways: Mapping[str, str]) -> str:
    what = {PACKED: "two halves that are cut each by itself", EXPERTS: "weights of three dimensions"}
    which = next((what[way] for way in ways.values() if way in what), "this")
    return f"{target} has no style for {which}"


# -- transformers -------------------------------------------------------------------------------------------------


def transformers_plans(model: Any, choice: Choice) -> dict[str, dict[str, str]]:
    """``tp_plan`` for the model, and ``base_model_tp_plan`` with the names that its base model has for its part.

    A plan is merged with the one that the model ships, so what that one splits and this one does not has to be named.
    """
    names = styles_of_transformers()
    plan = {pattern: names[way] for pattern, way in choice.ways.items()}
    plan |= _gradients(model, choice)
    whole = _shipped(model) if _merges() else set()
    prefix = _base_prefix(model)
    base = {pattern.removeprefix(prefix): style for pattern, style in plan.items() if pattern.startswith(prefix)}
    implied = {name.removeprefix(prefix) for name in whole if name.startswith(prefix)}
    base_model = getattr(model, "base_model", model)
    if _merges() and isinstance(getattr(base_model, "embed_tokens", None), nn.Embedding):
        implied.add("embed_tokens")  # a base model's plan gets it unless it is named
    if (whole - set(plan)) | (implied - set(base)):
        whole_style = _whole_style()
        plan |= {name: whole_style for name in sorted(whole - set(plan))}
        base |= {name: whole_style for name in sorted(implied - set(base))}
    return {"tp_plan": plan, "base_model_tp_plan": base}


_FOR_GRADIENTS = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of transformers that change nothing but the gradients of a module between split layers."""


def _gradients(model: Any, choice: Choice) -> dict[str, str]:
    """What the shipped plan says of gradients, inside of groups that are split as in that plan."""
    split = [group.where for group in choice.together if {COLUMN, PACKED} & set(group.ways.values())]
    return {
        name: style
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
        if style in _FOR_GRADIENTS and name not in choice.ways and any(name.startswith(f"{w}.") for w in split)
    }


def _shipped(model: Any) -> set[str]:
    """What the plan splits that transformers has for the model."""
    return set(getattr(model, "tp_plan", None) or {})


def ships_plan(model: Any) -> bool:
    """Whether transformers has a plan for the model."""
    return bool(_shipped(model))


def _merges() -> bool:
    """Whether a plan that is given is merged with the shipped one; before transformers 5.18 it replaced it."""
    from transformers.distributed import tensor_parallel

    return hasattr(tensor_parallel, "resolve_parallel_plans")


def _whole_style() -> str:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    if "replicate" not in ALL_PARALLEL_STYLES:
        raise NotExportable(
            "transformers merges a plan with the one that it ships for this model, and has no style 'replicate' to "
            "leave a module whole: use transformers 5.22"
        )
    return "replicate"


def _base_prefix(model: Any) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_plan(choice: Choice) -> dict[str, str]:
    """Names as `parallelize_module` takes them, and the calls that make their styles."""
    return {pattern: _TORCH[way] for pattern, way in choice.ways.items()}


def torch_source(plan: Mapping[str, str], tied: list[tuple[str, str]], head: str) -> str:
    """A module with `PLAN` and a function that applies it."""
    lines = [f'"""{head}"""', ""]
    lines += ["from torch.distributed.tensor import Replicate", "from torch.distributed.tensor.parallel import ("]
    lines += ["    ColwiseParallel,", "    RowwiseParallel,", "    parallelize_module,", ")", "", "PLAN = {"]
    lines += [f"    {json.dumps(name)}: {call}," for name, call in plan.items()]
    lines += ["}", "", "", "def parallelize(model, mesh):"]
    lines += ['    """Split the model over the ranks of a one-dimensional device mesh."""']
    lines += ["    parallelize_module(model, mesh, PLAN)"]
    lines += [
        f"    model.get_submodule({json.dumps(a)}).weight = model.get_submodule({json.dumps(b)}).weight  # one weight"
        for a, b in tied
    ]
    return "\n".join([*lines, "    return model", ""])


def matches(pattern: str, name: str) -> bool:
    """Whether `parallelize_module` takes a name for one of this pattern: part by part."""
    from fnmatch import fnmatch

    atoms, parts = pattern.split("."), name.split(".")
    return len(atoms) == len(parts) and all(fnmatch(part, atom) for atom, part in zip(atoms, parts, strict=True))


# -- vLLM -------------------------------------------------------------------------------------------------------------


def vllm_plan(model: Any, choice: Choice, generic: Callable[[str], str], ranks: int) -> dict[str, str]:
    """``base_model_tp_plan`` as vLLM's transformers backend reads it; an error where it would run something else.

    vLLM gives every attention its rank's share of the heads, so all of them have to be split, those of keys and values
    too. It looks names up as regular expressions from the left, so no name may match more than its own modules.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise NotExportable(
            f"{type(model).__name__} does not compute its attention through transformers' attention interface, which "
            "vLLM's transformers backend needs"
        )
    prefix = _base_prefix(model)
    rows = {pattern for pattern, way in choice.ways.items() if way == ROW}
    attentions: dict[str, None] = {}
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and any(isinstance(m, nn.Linear) for m in module.modules()):
            attentions[generic(name)] = None
    for where in attentions:
        if not any(row.startswith(f"{where}.") for row in rows):
            why = next((reason for p, reason in choice.whole.items() if p.startswith(f"{where}.")), "")
            raise NotExportable(
                f"vLLM gives every attention its rank's share of the heads, and {where} cannot be split so"
                + (f": {why}" if why else "")
            )
    shared = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if attentions and isinstance(shared, int) and shared % ranks:
        raise NotExportable(
            f"vLLM gives every attention its rank's share of the heads, and those of keys and values of "
            f"{next(iter(attentions))} are {shared}, which cannot be shared out over {ranks} ranks"
        )
    plan = {p.removeprefix(prefix): _VLLM[way] for p, way in choice.ways.items() if p.startswith(prefix)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.startswith(prefix):
            continue
        inner = name.removeprefix(prefix)
        first = next((p for p in plan if re.match(p, inner)), None)
        if first is not None and first != generic(inner):
            raise NotExportable(f"vLLM would take {name} for {first}, since it looks names up from the left")
    return plan
