"""Running a sharded model on simulated ranks and comparing its outputs with those of the full model."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.dummy_inputs import text_call
from .candidates import generic
from .simulate import run_sharded
from .styles import EXPERTS, PACKED, ROW, ROW_SPLIT, Assignment, parse_parameter_style

TOLERANCE = 1e-4
"""The largest error of an output, relative to the largest output if that is above one."""
LENGTH = 12
"""Tokens of the inputs."""
CACHES = ("past_key_values", "cache_params")
"""What models call their KV caches and states."""


@dataclass(frozen=True)
class Outcome:
    """The result of running a sharded model: whether it is exact, its largest error, and what is wrong."""

    exact: bool
    error: float | None
    reason: str = ""


class Check:
    """Compares a sharded model with the full model."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.model, self.world = model, world
        self.inputs = example_inputs(model)
        self.expected = outputs(model, self.inputs)

    def __call__(self, assignment: Assignment) -> Outcome:
        """Run the model with these styles on all ranks."""
        if not assignment:
            return Outcome(True, 0.0)
        try:
            by_rank = run_sharded(
                self.model, assignment, self.world, generic, lambda model: outputs(model, self.inputs, self.expected)
            )
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            return Outcome(False, None, f"its code does not run on a shard ({type(error).__name__}: {line})")
        worst = max(_error(found, self.expected) for found in by_rank)
        if worst <= TOLERANCE:
            return Outcome(True, worst)
        return Outcome(False, worst, f"its code computes something else on a shard (error {worst:.2g})")


def is_divisible(model: nn.Module, assignment: Assignment, world: int) -> bool:
    """Whether the model has all parameters of the styles, with sizes that are divisible by the number of ranks."""
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(generic(name), []).append(module)
    for pattern, style in assignment.items():
        dims = parse_parameter_style(style)
        owner, _, leaf = pattern.rpartition(".")
        for module in modules.get(pattern if dims is None else owner, [None]):  # type: ignore[list-item]
            weight = None if module is None else getattr(module, "weight" if dims is None else leaf, None)
            if style == EXPERTS:
                if module is None:
                    return False
                continue
            if not isinstance(weight, Tensor):
                return False
            dim, segments = dims or {ROW: (1, 1), ROW_SPLIT: (1, 1), PACKED: (0, 2)}.get(style, (0, 1))
            if weight.shape[dim] % (world * segments):
                return False
    return True


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Random inputs, always the same."""
    inputs = text_call(model, torch.device("cpu"))
    alone = not any(value.is_floating_point() for value in inputs.values())  # else ids have to agree with images
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 2
    for name, value in inputs.items():
        if name.endswith("input_ids") and alone:
            longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
            length = min(LENGTH, longest) if longest > 0 else LENGTH
            inputs[name] = torch.randint(0, vocabulary, (value.shape[0], length), generator=generator)
        elif isinstance(value, Tensor) and value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator)
    return inputs


def outputs(model: nn.Module, inputs: dict[str, Any], like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The outputs of one call, and those of a prefill and two decode steps with its KV cache.

    The latter only if the model has a cache or, with ``like``, if the outputs to compare with have them.
    """
    options = set(signature(model.forward).parameters)
    with torch.no_grad():
        found = tensors_by_name(model(**inputs, **({"use_cache": False} if "use_cache" in options else {})))
        if like is None or any(name.startswith("cached.") for name in like):
            try:
                cached = _outputs_with_cache(model, inputs, options)
            except Exception:
                if like is not None:
                    raise
                cached = {}
            found |= {f"cached.{name}": value for name, value in cached.items()}
    if like is None and not all(bool(value.isfinite().all()) for value in found.values()):
        raise ValueError("its outputs are not finite")
    return found


def _outputs_with_cache(model: nn.Module, inputs: dict[str, Any], options: set[str]) -> dict[str, Tensor]:
    """The outputs of a prefill and of two decode steps; none for a model without a cache."""
    if "use_cache" not in options or set(inputs) != {"input_ids"}:
        return {}
    ids = inputs["input_ids"]
    prefill = model(input_ids=ids[:, :-2], use_cache=True)
    cache = next((k for k in CACHES if k in options and prefill.get(k) is not None), None)
    if cache is None:
        return {}
    found = tensors_by_name(prefill)
    first = model(input_ids=ids[:, -2:-1], use_cache=True, **{cache: prefill[cache]})
    found |= {f"next.{name}": value for name, value in tensors_by_name(first).items()}
    second = model(input_ids=ids[:, -1:], use_cache=True, **{cache: first[cache]})
    return found | {f"after.{name}": value for name, value in tensors_by_name(second).items()}


def tensors_by_name(returned: Any) -> dict[str, Tensor]:
    """All floating-point tensors that a model returned, without its caches."""
    found: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key not in CACHES:
                    add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (tuple, list)):
            for index, inner in enumerate(value):
                add(f"{name}.{index}" if name else str(index), inner)

    add("", returned)
    return found


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error, relative to the largest output if that is above one; infinite if shapes differ."""
    if set(found) != set(expected) or any(found[k].shape != expected[k].shape for k in expected):
        return float("inf")
    worst = 0.0
    for name, value in expected.items():
        if not value.numel():
            continue
        error = float((found[name] - value).abs().max()) / max(1.0, float(value.abs().max()))
        worst = max(worst, error if error == error else float("inf"))
    return worst
