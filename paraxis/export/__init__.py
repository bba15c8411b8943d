"""Exporting plans: transformers' ``tp_plan``, torch's ``parallelize_module``, vLLM's transformers backend.

Only what the other library computes exactly is exported. That depends on the model's code, because there Python sees
local sizes instead of global ones. So a small model with the same code runs as the other library would run it
(:mod:`.simulate`), and its outputs are compared. Modules that cannot be sharded are listed with the reason.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from ..capture import CaptureError
from ..plan.offline import plan_model
from ..weights.build import build_on_meta
from ..weights.meta_init import tied_names
from .candidates import Candidates, find_candidates, generic
from .check import Check, is_divisible
from .choose import Choice, choose, choose_unverified
from .layers import failing_layers
from .loading import sharded_before_conversion
from .small import NoSmallModel, small_model
from .styles import EXPERTS, ROW, ROW_SPLIT
from .targets import (
    FORMATS,
    NotExportable,
    matches,
    restricted,
    ships_plan,
    torch_plan,
    torch_source,
    transformers_plans,
    vllm_plan,
)

__all__ = ["FORMATS", "Export", "NotExportable", "export_plan"]


@dataclass
class Export:
    """A plan for another library.

    Attributes:
        target: The library: one of :data:`FORMATS`.
        world_size: The number of ranks.
        model: The class of the model.
        plan: The style of every module, by names with ``*`` for block numbers: the name of the style for transformers
            and vLLM, its constructor call for torch. Names for vLLM are those of the base model.
        base_model_tp_plan: For transformers, the plan of the base model, with its names.
        source: For torch, the plan as a Python module.
        groups: The modules in which activations stay sharded between layers.
        gathered: Layers that are sharded separately, with gathers that Paraxis does not need, and the reason.
        replicated: Modules that the plan does not shard, and the reason; vLLM shards some of them itself.
        sharded_fraction: The fraction of all parameter elements that one rank holds.
        error: The largest error in the verification; None if the plan was not verified.
        ships_plan: Whether transformers ships a plan for the model.
    """

    target: str
    world_size: int
    model: str
    plan: dict[str, str]
    base_model_tp_plan: dict[str, str] = field(default_factory=dict)
    source: str = ""
    groups: list[str] = field(default_factory=list)
    gathered: dict[str, str] = field(default_factory=dict)
    replicated: dict[str, str] = field(default_factory=dict)
    sharded_fraction: float = 1.0
    error: float | None = None
    ships_plan: bool = False

    @property
    def whole(self) -> dict[str, str]:
        """The former name of :attr:`replicated`."""
        warnings.warn("Export.whole is deprecated: use replicated", DeprecationWarning, stacklevel=2)
        return self.replicated

    def to_json(self) -> dict[str, Any]:
        """The export as a JSON-serializable dictionary."""
        import transformers

        name = {"transformers": "tp_plan", "torch": "parallelize_plan", "vllm": "base_model_tp_plan"}[self.target]
        data: dict[str, Any] = {
            "format": self.target,
            "model": self.model,
            "world_size": self.world_size,
            name: self.plan,
        }
        if self.target == "transformers":
            data["base_model_tp_plan"] = self.base_model_tp_plan
        if self.source:
            data["source"] = self.source
        return {
            **data,
            "groups": self.groups,
            "gathered": [{"name": n, "reason": r} for n, r in self.gathered.items()],
            "replicated": [{"name": n, "reason": r} for n, r in self.replicated.items()],
            "sharded_fraction": self.sharded_fraction,
            "verified": self.error is not None,
            "error": self.error,
            "ships_plan": self.ships_plan,
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }


def export_plan(
    model: Any, tp_size: int, target: str = "transformers", *, verify: bool = True, **kwargs: Any
) -> Export:
    """Plan a model and export the plan to another library.

    Args:
        model: A Hub id, a directory with a ``config.json``, or a transformers configuration.
        tp_size: The number of ranks.
        target: ``transformers``, ``torch`` or ``vllm``.
        verify: Run a small model with the same code to test where activations can stay sharded between layers. If
            False, only layers that are exact on their own are sharded.
        kwargs: Options of the plan, as for :func:`paraxis.plan_model`.

    Raises:
        NotExportable: No module can be sharded; the message names them and says why.
    """
    if target not in FORMATS:
        raise ValueError(f"unknown format {target!r}: use one of {', '.join(FORMATS)}")
    if tp_size < 2:
        raise ValueError("one rank has nothing to shard: use two ranks or more")
    built: Any = build_on_meta(model, None, {})
    try:
        plan = plan_model(model, tp_size, **kwargs)
    except CaptureError as error:
        raise NotExportable(f"{type(built).__name__} has no plan to export: {error}") from error
    found = restricted(find_candidates(built, plan), target)
    if target == "transformers":
        found.drop(sharded_before_conversion(built))
    choice = _choose(built, found, tp_size, verify)
    export = Export(
        target,
        tp_size,
        type(built).__name__,
        {},
        groups=[group.where for group in choice.groups if len(group.styles) > 1 and not _are_tied(built, group.styles)],
        gathered=choice.gathered,
        replicated=choice.replicated,
        error=choice.error,
        ships_plan=ships_plan(built),
        sharded_fraction=_sharded_fraction(built, choice, tp_size),
    )
    if not choice.styles:
        raise NotExportable(_refusal(export, choice))
    if target == "transformers":
        plans = transformers_plans(built, choice)
        export.plan, export.base_model_tp_plan = plans["tp_plan"], plans["base_model_tp_plan"]
    elif target == "torch":
        export.plan = torch_plan(choice)
        _check_patterns(built, export.plan)
        export.source = torch_source(export.plan, _tied_pairs(built, choice), _headline(export))
    else:
        export.plan = vllm_plan(built, choice, generic, tp_size)
    return export


def _choose(built: Any, found: Candidates, world: int, verify: bool) -> Choice:
    """Choose the styles: verified with a small model, or only those that are always exact."""
    custom = "it has its own forward, which was not verified"
    if not verify:
        found.drop(dict.fromkeys(found.custom_forward, custom))
        return choose_unverified(found, "not verified (--no-verify)")
    grouped = {p: style for group in found.groups for p, style in group.styles.items()}
    separate = {p: style for group in found.groups for p, style in group.separate.items()}
    checks: list[Check] = []

    def problem_of(small: nn.Module) -> str:
        if not is_divisible(small, grouped, world) or not is_divisible(small, separate, world):
            return "its sizes are no longer divisible by the number of ranks"
        try:
            checks[:] = [Check(small, world)]
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    try:
        with small_model(built.config, type(built), world, problem_of) as small:
            custom_layers = found.custom_forward & {pattern for group in found.groups for pattern in group.styles}
            if custom_layers:
                found.drop(failing_layers(small, custom_layers, checks[0].inputs, world))
            return choose(found, checks[0])
    except NoSmallModel as error:
        found.drop(dict.fromkeys(found.custom_forward, custom))
        return choose_unverified(found, str(error))


def _are_tied(model: nn.Module, styles: dict[str, str]) -> bool:
    """Whether the modules form a group because their weights are tied."""
    tied = {generic(name.rpartition(".")[0]) for names in tied_names(model).values() for name in names}
    return set(styles) <= tied


def _tied_pairs(model: nn.Module, choice: Choice) -> list[tuple[str, str]]:
    """Sharded modules with tied weights: each after the first, paired with the first."""
    found = []
    for names in tied_names(model).values():
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        if generic(owners[0]) in choice.styles:
            found += [(other, owners[0]) for other in owners[1:] if generic(other) in choice.styles]
    return found


def _sharded_fraction(model: nn.Module, choice: Choice, world: int) -> float:
    """The fraction of all parameter elements that one rank holds."""
    total = local = 0
    for name, parameter in model.named_parameters():
        size = prod(parameter.shape)
        total += size
        owner, leaf = generic(name.rpartition(".")[0]), name.rpartition(".")[2]
        style = choice.styles.get(generic(name)) or choice.styles.get(owner)
        is_sharded = style not in (None, EXPERTS)
        if style in (ROW, ROW_SPLIT) and leaf == "bias":
            is_sharded = False
        local += size // world if is_sharded else size
    return local / total if total else 1.0


def _check_patterns(model: nn.Module, plan: dict[str, str]) -> None:
    """Raise if a pattern matches more than its own modules."""
    for name, _ in model.named_modules():
        for pattern in plan:
            if matches(pattern, name) and generic(name) != pattern:
                raise NotExportable(f"parallelize_module would match {name} with {pattern}")


def _headline(export: Export) -> str:
    """The docstring of the Python module for torch."""
    verified = "not verified" if export.error is None else "verified on simulated ranks with a small model of its code"
    return f"{export.model} on {export.world_size} ranks for torch's parallelize_module, by Paraxis; {verified}."


def _refusal(export: Export, choice: Choice) -> str:
    """Why nothing can be exported."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(choice.replicated.items())[:12])
    more = len(choice.replicated) - 12
    return (
        f"{export.target} can run no part of the plan of {export.model} on {export.world_size} ranks exactly. "
        f"{reasons}{f'; and {more} more' if more > 0 else ''}"
    )
