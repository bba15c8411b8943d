"""A small model that is written like a large one: the same classes and counts, narrower, with random weights.

Whether code works on a rank's part of its heads is seen as well on narrow heads. So the numbers of heads, experts and
groups stay what they are, blocks that are like others are left out, and all widths are divided by the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..capture.repeated_blocks import Repeated, find_repeated, without_repeats
from ..weights.meta_init import MetaAwareMethodsPatcher

LARGEST = 40_000_000
"""Parameters that are still run as they are."""
FACTORS = (1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 5, 10, 20, 40)
VOCABULARY = 2048

_WIDTH = re.compile(
    r"(size|dim|width|inner|rank|embd|embed|d_model|d_ff|d_kv|dff|channels|d_head|d_state|d_ssm)$|^n_(embd|inner)$"
)
_COUNT = re.compile(
    r"^(num|n)_(?!embd|inner)|heads|layers|experts|max|position|token|batch|image|patch|window|kernel|chunk|block|group"
    r"|step|vocab|beam|codebook"
)


class NotSmall(ValueError):
    """There is no small model like the large one that runs."""


def narrowed(data: dict[str, Any], factor: int, world: int) -> dict[str, Any]:
    """A configuration with all widths divided by ``factor``, where they divide, and a small vocabulary."""
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
    """A smaller one that leaves the same remainder."""
    if size <= 2 * VOCABULARY:
        return size
    unit = world * -(-VOCABULARY // world)
    return unit + size % world


def _token(value: Any, vocabulary: int) -> Any:
    if isinstance(value, list):
        return [_token(v, vocabulary) for v in value]
    return vocabulary - 1 if isinstance(value, int) and value >= vocabulary else value


@contextmanager
def small_like(config: Any, cls: type, world: int, obstacle: Callable[[nn.Module], str]) -> Iterator[nn.Module]:
    """A model like that of ``config``, small enough to be run several times; in float32, with random weights.

    Args:
        config: Of the large model.
        cls: The class of it.
        world: The number of ranks; what divides by it must go on doing so.
        obstacle: Says why a model that was made will not do, or nothing.
    """
    found = "it is too large at every width"
    for factor in FACTORS:
        try:
            model, repeated = _built(config, cls, factor, world)
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for blocks in (repeated, []) if repeated else ([],):
            with without_repeats(model, blocks):
                if sum(p.numel() for p in model.parameters()) > LARGEST:
                    continue
                _fill(model)
                why = obstacle(model)
                if not why:
                    yield model
                    return
                found = why
    raise NotSmall(f"no small model like it could be run: {found}")


def _built(config: Any, cls: type, factor: int, world: int) -> tuple[nn.Module, list[Repeated]]:
    data = config.to_dict()
    made = type(config).from_dict(narrowed(data, factor, world) if factor > 1 else data)
    made.dtype = torch.float32
    implementation = getattr(config, "_attn_implementation", None)
    if implementation in ("eager", "sdpa"):
        made._attn_implementation = implementation
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with MetaAwareMethodsPatcher():
            model = cls(made).eval()
    finally:
        torch.set_default_dtype(before)
    return model, find_repeated(model)


def _fill(model: nn.Module) -> None:
    """Random weights for all parameters, none of them zero or one alone: what they do must be seen in the results."""
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
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.ndim <= 1:
                parameter.copy_(torch.nan_to_num(parameter, 1.0) + 0.1 * drawn)
                continue
            wanted = parameter.shape[-1] ** -0.5
            if not bool(parameter.isfinite().all()) or not bool(parameter.any()):
                parameter.copy_(wanted * drawn)
            elif float(parameter.std()) < wanted / 2:
                parameter.mul_(wanted / max(float(parameter.std()), 1e-6))


def _initialize(model: nn.Module) -> None:
    """As the model's own code does it, module by module, as far as it does."""
    own = getattr(model, "_init_weights", None)
    for module in model.modules():
        if own is None or not any(True for _ in module.parameters(recurse=False)):
            continue
        try:
            own(module)
        except Exception:  # what it leaves is filled by numbers of the same size as others
            continue
