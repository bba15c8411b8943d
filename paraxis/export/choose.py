"""Finding the largest part of a plan that another library runs exactly, by running it as that library would."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.dummy_inputs import example_call
from .candidates import Candidates, Group, generic
from .simulate import run_split
from .styles import EXPERTS, GATHERED, PACKED, ROW, ROW_SPLIT, VOCAB, Assignment, parse_cut

LIMIT = 1e-4
"""The largest difference of a result, relative to the largest result if that is above one."""
LENGTH = 12
SAFE = (GATHERED, ROW_SPLIT, VOCAB)
"""Ways that are exact whatever the code around a module does."""


@dataclass
class Choice:
    """What is split, and why the rest is not.

    Attributes:
        ways: How a module or parameter is split, by names with block numbers left open.
        whole: Why a module is not split.
        gathered: Why a module is split alone, where the plan has it in a group.
        error: The largest difference that the split model showed; None where it was not run.
        together: The groups that are split as such.
    """

    ways: dict[str, str]
    whole: dict[str, str]
    gathered: dict[str, str] = field(default_factory=dict)
    error: float | None = None
    together: list[Group] = field(default_factory=list)


def choose_alone(found: Candidates, reason: str) -> Choice:
    """Without running anything: only what is exact by itself, the rest for this reason."""
    choice = Choice({}, dict(found.whole))
    for group in found.groups:
        if set(group.ways.values()) <= set(SAFE):
            _take(choice, group)
        else:
            _apart(choice, group, reason)
    return choice


def choose(found: Candidates, check: Check) -> Choice:
    """The groups that are right when run on ranks, the others apart, the rest whole.

    What is returned has been run as it is: all at once, and then, if that is not right, what is right by itself.
    """
    choice = Choice({}, dict(found.whole))
    everything = {p: way for group in found.groups for p, way in group.ways.items()}
    if not everything:
        return choice
    seen = check(everything)
    if seen.right:
        for group in found.groups:
            _take(choice, group)
        choice.error = seen.error
        return choice
    for group in found.groups:
        alone = check(group.ways)
        right = group.ways if alone.right else next((ways for ways in group.others if check(ways).right), None)
        if right is not None:
            group.ways = right
            _take(choice, group)
        else:
            _apart(choice, group, alone.reason)
    seen = check(choice.ways)
    if not seen.right:
        _one_by_one(choice, check)
        seen = check(choice.ways)
    if choice.ways and not seen.right:
        choice.whole.update(dict.fromkeys(choice.ways, f"all together are not right: {seen.reason}"))
        choice.ways, choice.together = {}, []
    choice.error = seen.error if choice.ways else None
    return choice


def _take(choice: Choice, group: Group) -> None:
    """The group as it is."""
    choice.ways.update(group.ways)
    choice.together.append(group)
    if group.reason:
        choice.gathered.update(dict.fromkeys(group.ways, group.reason))


def _apart(choice: Choice, group: Group, reason: str) -> None:
    """The modules of a group each by itself."""
    for pattern, way in group.ways.items():
        if pattern in group.instead:
            choice.ways[pattern] = group.instead[pattern]
            choice.gathered[pattern] = reason
        elif parse_cut(way) is None:
            choice.whole[pattern] = reason


def _one_by_one(choice: Choice, check: Check) -> None:
    """Leave out what is not right together with what was taken before it."""
    taken: dict[str, str] = {}
    units = [dict(group.ways) for group in choice.together]
    inside = {pattern for unit in units for pattern in unit}
    units += [{p: way} for p, way in choice.ways.items() if p not in inside]
    for unit in units:
        seen = check({**taken, **unit})
        if seen.right:
            taken.update(unit)
        else:
            choice.whole.update({p: seen.reason for p, way in unit.items() if parse_cut(way) is None})
            choice.gathered = {p: r for p, r in choice.gathered.items() if p not in unit}
    choice.ways = taken
    choice.together = [group for group in choice.together if set(group.ways) <= set(taken)]


# -- running it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What came of running a split model."""

    right: bool
    error: float | None
    reason: str = ""


class Check:
    """Compares a model that is split with the same model whole."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.model, self.world = model, world
        self.inputs = example_inputs(model)
        self.expected = results(model, self.inputs)
        self.runs = 0

    def __call__(self, assignment: Assignment) -> Seen:
        self.runs += 1
        if not assignment:
            return Seen(True, 0.0)
        try:
            several = run_split(
                self.model, assignment, self.world, generic, lambda model: results(model, self.inputs, self.expected)
            )
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return Seen(False, None, f"its code does not work on a rank's part ({type(error).__name__}: {lines[0]})")
        worst = max(_difference(found, self.expected) for found in several)
        if worst <= LIMIT:
            return Seen(True, worst)
        return Seen(False, worst, f"its code gives something else on a rank's part (off by {worst:.2g})")


def fits(model: nn.Module, assignment: Assignment, world: int) -> bool:
    """Whether all that is to be split is there and divides."""
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(generic(name), []).append(module)
    for pattern, way in assignment.items():
        cut = parse_cut(way)
        owner, _, leaf = pattern.rpartition(".")
        for module in modules.get(pattern if cut is None else owner, [None]):  # type: ignore[list-item]
            weight = None if module is None else getattr(module, "weight" if cut is None else leaf, None)
            if way == EXPERTS:
                if module is None:
                    return False
                continue
            if not isinstance(weight, Tensor):
                return False
            dim, segments = cut or {ROW: (1, 1), ROW_SPLIT: (1, 1), PACKED: (0, 2)}.get(way, (0, 1))
            if weight.shape[dim] % (world * segments):
                return False
    return True


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Random inputs, the same each time."""
    _, inputs = example_call(model, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 2
    for name, value in inputs.items():
        if name.endswith("input_ids"):
            longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
            length = min(LENGTH, longest) if longest > 0 else LENGTH
            inputs[name] = torch.randint(0, vocabulary, (value.shape[0], length), generator=generator)
        elif isinstance(value, Tensor) and value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator)
    return inputs


def results(model: nn.Module, inputs: dict[str, Any], like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Everything that the model returns in one call, and in two of which the second goes on with the first's cache.

    The second where the model (or, with ``like``, the one that it is compared with) can do that.
    """
    options = set(signature(model.forward).parameters)
    with torch.no_grad():
        found = named(model(**inputs, **({"use_cache": False} if "use_cache" in options else {})))
        if like is None or any(name.startswith("cached.") for name in like):
            try:
                cached = _continued(model, inputs, options)
            except Exception:
                if like is not None:
                    raise
                cached = {}
            found |= {f"cached.{name}": value for name, value in cached.items()}
    if like is None and not all(bool(value.isfinite().all()) for value in found.values()):
        raise ValueError("its results are not finite")
    return found


def _continued(model: nn.Module, inputs: dict[str, Any], options: set[str]) -> dict[str, Tensor]:
    if "use_cache" not in options or set(inputs) != {"input_ids"}:
        return {}
    ids = inputs["input_ids"]
    first = model(input_ids=ids[:, :-2], use_cache=True)
    kept = next((k for k in ("past_key_values", "cache_params") if k in options and first.get(k) is not None), None)
    if kept is None:
        return {}
    found = named(first)
    second = model(input_ids=ids[:, -2:-1], use_cache=True, **{kept: first[kept]})
    found |= {f"next.{name}": value for name, value in named(second).items()}
    third = model(input_ids=ids[:, -1:], use_cache=True, **{kept: second[kept]})
    return found | {f"after.{name}": value for name, value in named(third).items()}


def named(returned: Any) -> dict[str, Tensor]:
    """All floating tensors of what a model returned but its caches, by name."""
    found: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key not in ("past_key_values", "cache_params"):
                    add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (tuple, list)):
            for index, inner in enumerate(value):
                add(f"{name}.{index}" if name else str(index), inner)

    add("", returned)
    return found


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest result where that is above one; infinite if shapes differ."""
    if set(found) != set(expected) or any(found[k].shape != expected[k].shape for k in expected):
        return float("inf")
    worst = 0.0
    for name, value in expected.items():
        if not value.numel():
            continue
        error = float((found[name] - value).abs().max()) / max(1.0, float(value.abs().max()))
        worst = max(worst, error if error == error else float("inf"))
    return worst
