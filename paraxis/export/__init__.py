"""Plans for other libraries: transformers' ``tp_plan``, torch's ``parallelize_module``, vLLM's transformers backend.

Only what the other library computes exactly is exported. Which part of a plan that is depends on the model's code, for
there Python sees a rank's sizes and not the whole ones; it is found out by running a small model of the same code as
the other library would (:mod:`.simulate`), and comparing. What is left whole is named, with the reason.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from ..capture import CaptureError
from ..weights.meta_init import tied_names
from .candidates import Candidates, find_candidates, generic
from .choose import Check, Choice, choose, choose_alone, fits
from .layers import failing_layers
from .loading import cut_before_converted
from .small import NotSmall, small_like
from .styles import parse_cut
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
        plan: By module names with block numbers left open: style names for transformers and vLLM, the calls that make
            the styles for torch. vLLM's names are those of the base model.
        base_model_tp_plan: For transformers, the part of the plan that is the base model's, with its names.
        source: For torch, the plan as a Python module.
        groups: The modules within which split layers follow one another without a gather.
        gathered: Layers that are split each by itself, where Paraxis splits them together, and why.
        whole: What is not split, and why.
        sharded_fraction: Parameter elements on a rank over all of them.
        error: The largest difference seen when the plan was tried; None if it was not.
        ships_plan: Whether transformers has a plan of its own for the model.
    """

    target: str
    world_size: int
    model: str
    plan: dict[str, str]
    base_model_tp_plan: dict[str, str] = field(default_factory=dict)
    source: str = ""
    groups: list[str] = field(default_factory=list)
    gathered: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    sharded_fraction: float = 1.0
    error: float | None = None
    ships_plan: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
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
            "whole": [{"name": n, "reason": r} for n, r in self.whole.items()],
            "sharded_fraction": self.sharded_fraction,
            "tried": self.error is not None,
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
    """The plan of a model in a form that another library can run.

    Args:
        model: A Hub id, a directory with a ``config.json``, or a transformers configuration.
        tp_size: The number of ranks.
        target: ``transformers``, ``torch`` or ``vllm``.
        verify: Run a small model of the same code to find out which groups of layers can stay split from one to the
            next. Without, only layers that are exact each by itself are split.
        kwargs: Options of the plan, as for :func:`paraxis.plan_model`.

    Raises:
        NotExportable: Where nothing is left; the message names the modules and says why.
    """
    if target not in FORMATS:
        raise ValueError(f"there is no format {target!r}: use one of {', '.join(FORMATS)}")
    if tp_size < 2:
        raise ValueError("a plan for one rank splits nothing: give two ranks or more")
    from ..plan.offline import plan_model
    from ..weights.build import build_on_meta

    built: Any = build_on_meta(model, None, {})
    try:
        plan = plan_model(model, tp_size, **kwargs)
    except CaptureError as error:
        raise NotExportable(f"{type(built).__name__} has no plan to export: {error}") from error
    found = restricted(find_candidates(built, plan), target)
    if target == "transformers":
        found.drop(cut_before_converted(built))
    choice = _chosen(built, found, tp_size, verify)
    export = Export(
        target,
        tp_size,
        type(built).__name__,
        {},
        groups=[group.where for group in choice.together if len(group.ways) > 1 and not _tied(built, group.ways)],
        gathered=choice.gathered,
        whole=choice.whole,
        error=choice.error,
        ships_plan=ships_plan(built),
        sharded_fraction=_fraction(built, choice, tp_size),
    )
    if not choice.ways:
        raise NotExportable(_refusal(export, choice))
    if target == "transformers":
        plans = transformers_plans(built, choice)
        export.plan, export.base_model_tp_plan = plans["tp_plan"], plans["base_model_tp_plan"]
    elif target == "torch":
        export.plan = torch_plan(choice)
        _check_patterns(built, export.plan)
        export.source = torch_source(export.plan, _ties(built, choice), _headline(export))
    else:
        export.plan = vllm_plan(built, choice, generic, tp_size)
    return export


def _chosen(built: Any, found: Candidates, world: int, verify: bool) -> Choice:
    own = "it has a forward of its own"
    if not verify:
        found.drop(dict.fromkeys(found.own, own))
        return choose_alone(found, "not tried (--no-verify)")
    everything = {p: way for group in found.groups for p, way in group.ways.items()}
    instead = {p: way for group in found.groups for p, way in group.instead.items()}
    checks: list[Check] = []

    def obstacle(small: nn.Module) -> str:
        if not fits(small, everything, world) or not fits(small, instead, world):
            return "its sizes no longer divide by the number of ranks"
        try:
            checks[:] = [Check(small, world)]
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    try:
        with small_like(built.config, type(built), world, obstacle) as small:
            there = found.own & {pattern for group in found.groups for pattern in group.ways}
            if there:
                found.drop(failing_layers(small, there, checks[0].inputs, world))
            return choose(found, checks[0])
    except NotSmall as error:
        found.drop(dict.fromkeys(found.own, own))
        return choose_alone(found, str(error))


def _tied(model: nn.Module, ways: dict[str, str]) -> bool:
    """Whether a group is one because its modules share a weight."""
    shared = {generic(name.rpartition(".")[0]) for names in tied_names(model).values() for name in names}
    return set(ways) <= shared


def _ties(model: nn.Module, choice: Choice) -> list[tuple[str, str]]:
    """Split modules that share a weight: each after the first, and the first."""
    found = []
    for names in tied_names(model).values():
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        if generic(owners[0]) in choice.ways:
            found += [(other, owners[0]) for other in owners[1:] if generic(other) in choice.ways]
    return found


def _fraction(model: nn.Module, choice: Choice, world: int) -> float:
    total = local = 0
    for name, parameter in model.named_parameters():
        size = prod(parameter.shape)
        total += size
        owner, leaf = generic(name.rpartition(".")[0]), name.rpartition(".")[2]
        way = choice.ways.get(generic(name)) or choice.ways.get(owner)
        is_split = way is not None and (parse_cut(way) is not None or way != "experts")
        if way in ("row", "row-split") and leaf == "bias":
            is_split = False
        local += size // world if is_split else size
    return local / total if total else 1.0


def _check_patterns(model: nn.Module, plan: dict[str, str]) -> None:
    """No pattern may match more than the modules that it stands for."""
    for name, _ in model.named_modules():
        for pattern in plan:
            if matches(pattern, name) and generic(name) != pattern:
                raise NotExportable(f"parallelize_module would take {name} for {pattern}")


def _headline(export: Export) -> str:
    tried = "not tried" if export.error is None else "tried on simulated ranks of a small model of the same code"
    return f"{export.model} over {export.world_size} ranks for torch's parallelize_module, made by Paraxis; {tried}."


def _refusal(export: Export, choice: Choice) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(choice.whole.items())[:12])
    more = len(choice.whole) - 12
    return (
        f"nothing of the plan of {export.model} over {export.world_size} ranks can be run exactly by {export.target}. "
        f"{reasons}{f'; and {more} more' if more > 0 else ''}"
    )
