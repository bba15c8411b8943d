"""A small model with the code of a large one: the same classes, heads and experts, narrower, with random weights.

Whether code runs on a rank's shard of the heads shows on narrow heads as well. So the numbers of heads, experts and
groups stay, repeated blocks are left out, and all widths are divided by the same factor.

Configurations do not say which of their numbers are widths; two regular expressions on the names of fields guess. A
wrong guess is safe. A model that cannot be built, does not run or has sizes that the number of ranks does not divide is
refused, and the next factor is tried; if none is left, only styles that are always exact are exported. A size that the
number of ranks does not divide does not become divisible by making it smaller. And the small model decides only where
activations may stay sharded, never what a layer computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..capture.repeated_blocks import Repeated, find_repeated, without_repeats
from ..compat.transformers import attention_implementation, init_weights_of, set_attention_implementation
from ..weights.meta_init import MetaAwareMethodsPatcher

MAX_PARAMETERS = 40_000_000
"""Parameters of a model that is small enough to run."""
FACTORS = (1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 5, 10, 20, 40)
"""Divisors of the widths, in the order they are tried."""
VOCABULARY = 2048
"""The size of a small vocabulary."""

_WIDTH = re.compile(
    r"(size|dim|width|inner|rank|embd|embed|d_model|d_ff|d_kv|dff|channels|d_head|d_state|d_ssm)$|^n_(embd|inner)$"
)
_COUNT = re.compile(
    r"^(num|n)_(?!embd|inner)|heads|layers|experts|max|position|token|batch|image|patch|window|kernel|chunk|block|group"
    r"|step|vocab|beam|codebook"
)


class NoSmallModel(ValueError):
    """No small model with the code of the large one runs."""


def narrowed(data: dict[str, Any], factor: int, world: int) -> dict[str, Any]:
    """A configuration with all widths that ``factor`` divides divided by it, and a small vocabulary."""
    found: dict[str, Any] = {}
    vocabularies = [v for k, v in data.items() if "vocab_size" in k and isinstance(v, int)]
    for key, value in data.items():
        if isinstance(value, dict) and key.endswith("config"):
            value = narrowed(value, factor, world)
        elif "vocab_size" in key and isinstance(value, int):
            value = _vocabulary(value, world)
        elif re.search(r"_token_ids?$", key) and vocabularies:
            value = _token(value, _vocabulary(min(vocabularies), world))
        elif _WIDTH.search(key) and not _COUNT.search(key):
            if isinstance(value, list):
                value = [_divided(v, factor) for v in value]
            else:
                value = _divided(value, factor)
        found[key] = value
    return found


def _divided(value: Any, factor: int) -> Any:
    is_width = isinstance(value, int) and not isinstance(value, bool) and value >= factor and value % factor == 0
    return value // factor if is_width else value


def _vocabulary(size: int, world: int) -> int:
    """A smaller size with the same remainder modulo the number of ranks."""
    if size <= 2 * VOCABULARY:
        return size
    unit = world * -(-VOCABULARY // world)
    return unit + size % world


def _token(value: Any, vocabulary: int) -> Any:
    """A special token id, or a list of them, inside the small vocabulary."""
    if isinstance(value, list):
        return [_token(v, vocabulary) for v in value]
    return vocabulary - 1 if isinstance(value, int) and value >= vocabulary else value


@contextmanager
def small_model(config: Any, cls: type, world: int, problem_of: Callable[[nn.Module], str]) -> Iterator[nn.Module]:
    """A small model with the code of a large one, in float32, with random weights.

    Args:
        config: The configuration of the large model.
        cls: Its class.
        world: The number of ranks.
        problem_of: Returns why a small model cannot be used, or an empty text.

    Raises:
        NoSmallModel: No width gives a model that can be used.
    """
    problem = "it is too large at every width"
    for factor in FACTORS:
        try:
            model, repeated = _built(config, cls, factor, world)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for blocks in (repeated, []) if repeated else ([],):
            with without_repeats(model, blocks):
                if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                    continue
                _fill(model)
                why = problem_of(model)
                if not why:
                    yield model
                    return
                problem = why
    raise NoSmallModel(f"no small model with its code runs: {problem}")


def _built(config: Any, cls: type, factor: int, world: int) -> tuple[nn.Module, list[Repeated]]:
    """The model with widths divided by ``factor``, on meta, and its repeated blocks."""
    data = config.to_dict()
    small = type(config).from_dict(narrowed(data, factor, world) if factor > 1 else data)
    small.dtype = torch.float32
    implementation = attention_implementation(config)
    if implementation in ("eager", "sdpa"):
        set_attention_implementation(small, implementation)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with MetaAwareMethodsPatcher():
            model = cls(small).eval()
    finally:
        torch.set_default_dtype(default_dtype)
    return model, find_repeated(model)


def _fill(model: nn.Module) -> None:
    """Random values for all parameters, so that each has an effect on the outputs: none are all zero or all one."""
    generator = torch.Generator().manual_seed(0)
    filled: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in filled:
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                filled[id(parameter)] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = filled[id(parameter)]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in filled.values():
            parameter.fill_(float("nan") if parameter.is_floating_point() else 0)
        _initialize(model)
        for parameter in filled.values():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.ndim <= 1:
                parameter.copy_(torch.nan_to_num(parameter, 1.0) + 0.1 * noise)
                continue
            std = parameter.shape[-1] ** -0.5
            if not bool(parameter.isfinite().all()) or not bool(parameter.any()):
                parameter.copy_(std * noise)
            elif float(parameter.std()) < std / 2:
                parameter.mul_(std / max(float(parameter.std()), 1e-6))


def _initialize(model: nn.Module) -> None:
    """Initialize weights with the model's own code, as far as it runs."""
    init_weights = init_weights_of(model)
    for module in model.modules():
        if init_weights is None or not any(True for _ in module.parameters(recurse=False)):
            continue
        try:
            init_weights(module)
        except Exception:  # the caller fills what is left
            continue
