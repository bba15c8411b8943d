"""Comparing one model of the zoo with the unsharded one, on a rank."""

from __future__ import annotations

import time
from collections import Counter
from inspect import signature
from math import isfinite, prod
from typing import Any

import torch
import torch.distributed as dist
from models.compare import context, gradient_errors, max_difference

from paraxis.placement import local_shape
from zoo.cases import Case, find
from zoo.jobs import be_quiet, first_line

NEW_TOKENS = 5


def compare_model(name: str, folder: str | None, device: str = "cpu") -> dict[str, Any]:
    """Errors, shards and collectives of a model. ``folder`` is its checkpoint; None for a plain module."""
    be_quiet()
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = False  # full precision
    case, started = find(name), time.monotonic()
    model, unsharded, ctx = pair(case, folder, device)
    planned = time.monotonic() - started
    inputs = {key: value.to(device) for key, value in case.inputs(unsharded).items()}
    training = {**inputs, "use_cache": False} if "use_cache" in signature(unsharded.forward).parameters else inputs
    found, right = run(model, training), run(unsharded, training)
    result: dict[str, Any] = {"outputs": differences(found, right), "loss": 0.0}
    if "loss" in right:
        result["loss"] = float((found["loss"] - right["loss"]).abs() / right["loss"].abs().clamp(min=1.0))
    result |= gradients(model, unsharded, found, right)
    if result["gradients"] > 1e-3:
        result |= in_double(case, folder, device, model, unsharded)
    result |= sharding(ctx, model)
    if case.generates and can_generate(unsharded):
        result |= tokens(model, unsharded, inputs[unsharded.main_input_name])
    return {**result, "planned": planned, "seconds": time.monotonic() - started}


def tokens(model: Any, unsharded: Any, inputs: torch.Tensor) -> dict[str, Any]:
    """Whether greedy decoding with a KV cache gives the same tokens, unless the unsharded model cannot generate."""
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    try:
        expected = unsharded.generate(inputs, **options)
    except Exception as error:
        return {"no_tokens": f"unsharded model: {first_line(error)}"}
    return {"tokens": bool(torch.equal(model.generate(inputs, **options), expected))}


def gradients(model: Any, unsharded: Any, found: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The largest relative error of a gradient, unless the unsharded model has no gradients."""
    try:
        objective(right).backward()
    except (RuntimeError, AssertionError) as error:
        return {"gradients": 0.0, "worst": [], "no_gradients": f"unsharded model: {first_line(error)}"}
    objective(found).backward()
    errors = gradient_errors(model, unsharded)
    worst = sorted(errors, key=lambda n: -errors[n])[:3]
    return {"gradients": max(errors.values(), default=0.0), "worst": worst}


def in_double(case: Case, folder: str | None, device: str, model: Any, unsharded: Any) -> dict[str, Any]:
    """Whether gradients that differ in float32 differ by rounding only.

    That is so if all agree to 1e-6 in float64, and the unsharded model's float32 gradients are about as far from its
    float64 ones as ours are from them.
    """
    errors = gradient_errors(model, unsharded)
    single = {name: p.grad for name, p in unsharded.named_parameters()}
    precise, exact, _ = pair(case, folder, device, torch.float64)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in case.inputs(exact).items()}
    inputs = {key: value.to(device) for key, value in inputs.items()}
    found, right = run(precise, inputs), run(exact, inputs)
    result = gradients(precise, exact, found, right)
    rounding = {
        name: float((p.grad - single[name]).norm() / p.grad.norm().clamp(min=1e-30))
        for name, p in exact.named_parameters()
        if errors[name] > 1e-3 and p.grad is not None
    }
    rounded = result["gradients"] < 1e-6 and all(rounding[name] > errors[name] / 3 for name in rounding)
    return {"double": result["gradients"], "rounding": max(rounding.values()), "rounded": rounded}


def pair(
    case: Case, folder: str | None, device: str, dtype: torch.dtype | None = None, ctx: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """(parallel model, unsharded model, context); ``options`` are those of ``parallelize_model``."""
    from paraxis import parallelize_model

    ctx = ctx or context(device=device)
    if folder is None:
        unsharded = case.make().to(device, dtype)
        model = parallelize_model(
            case.make().to(dtype), ctx, example_inputs=case.inputs(unsharded), show_progress=False, **options
        )
        return model, unsharded, ctx
    built = case.make()
    unsharded = type(built).from_pretrained(folder, dtype=dtype or torch.float32).to(device).eval()
    for name, parameter in unsharded.named_parameters():  # loading loses requires_grad
        parameter.requires_grad_(built.get_parameter(name).requires_grad)
    if case.kind != "causal-lm":  # which are planned with dummy inputs
        example = {k: v for k, v in case.inputs(unsharded).items() if k != "labels"}
        options["example_inputs"] = {
            k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in example.items()
        }
    model = parallelize_model(folder, ctx, torch_dtype=dtype, show_progress=False, **options).eval()
    return model, unsharded, ctx


def run(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every floating-point tensor that the model returns, by name."""
    output = model(**inputs)
    named: dict[str, torch.Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                named[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (tuple, list)):
            for index, inner in enumerate(value):
                add(f"{name}.{index}", inner)

    add("", output if isinstance(output, dict) else {"output": output})
    return {name: value for name, value in named.items() if "past_key_values" not in name}


def differences(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference of an output."""
    if set(found) != set(right):
        raise AssertionError(f"outputs {sorted(found)} instead of {sorted(right)}")
    worst = 0.0
    for name, expected in right.items():
        difference = max_difference(found[name], expected) if expected.numel() else 0.0
        worst = max(worst, difference if isfinite(difference) else float("inf"))
    return worst


def objective(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss or, without one, a weighted sum of all outputs."""
    if "loss" in outputs:
        return outputs["loss"]
    generator = torch.Generator().manual_seed(3)
    total: Any = 0.0
    for name in sorted(outputs):
        value = outputs[name]
        if value.requires_grad:
            total = (
                total
                + (value * torch.randn(value.shape, generator=generator).to(value.device)).sum() / value.numel() ** 0.5
            )
    return total


def can_generate(model: Any) -> bool:
    """Whether the model has ``generate``."""
    return hasattr(model, "can_generate") and model.can_generate()


def sharding(ctx: Any, model: Any) -> dict[str, Any]:
    """What the plan says: fractions, collectives, replicated parameters with reasons, graph breaks."""
    plan = ctx.plan
    numel = {name: p.numel() for name, p in model.named_parameters()}
    replicated = sorted(plan.replicated, key=lambda item: -numel.get(item[0], 0))
    return {
        "fraction": plan.sharded_fraction,
        "collectives": plan.count(),
        "communicated": sorted(
            Counter((c.kind, pattern(c.module), c.reason) for c in plan.collectives).items(), key=lambda item: item[0]
        ),
        "replicated": [(name, why) for name, why in replicated if len(plan.parameters[name].global_shape) > 1][:12],
        "heaviest": heaviest(plan),
        "parameters": sum(numel.values()),
        "layers": depth(model),
        "gathered": sorted({reason for _, reason in plan.gathered}),
        "breaks": plan.breaks,
        "unplanned": len(plan.unplanned),
        "optimal": plan.optimal,
        "rank": dist.get_rank(),
    }


def heaviest(plan: Any) -> list[tuple[str, float, float]]:
    """The parameters of which a rank holds more than its share, the largest excess first.

    Each with its name, the fraction of it on the rank that holds most, and the excess as a fraction of the model.
    """
    total = sum(prod(p.global_shape) for p in plan.parameters.values())
    found: dict[str, list[float]] = {}
    for name, p in plan.parameters.items():
        numel = prod(p.global_shape)
        local = max(prod(local_shape(p.placement, p.global_shape, rank)) for rank in range(plan.world_size))
        if numel:
            entry = found.setdefault(pattern(name), [0.0, 0.0])
            entry[0] = max(entry[0], local / numel)
            entry[1] += (local - numel / plan.world_size) / total
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return [(name, share, more) for name, (share, more) in ordered[:4] if more > 0]


def pattern(name: str) -> str:
    """The name of a module with stars for numbers: one name for all repeated blocks."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def depth(model: Any) -> int:
    """The number of blocks: the entries of the outermost lists of modules."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    outer = [m for m in lists if not any(m is not o and any(m is x for x in o.modules()) for o in lists)]
    return max([sum(len(m) for m in outer), 1])
