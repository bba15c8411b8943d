"""Running a model for its shapes: floating-point tensors are fake, integers and booleans are real.

What a model does with its inputs depends on values (where the image tokens are, how many patches an image has), but
only on integers. So token ids, masks, grids and positions are computed, and everything that would take time is not.
An integer that is computed from a fake tensor (the index of a maximum) is zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ...compat.torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    call_forward_and_hooks,
    fake_tensor_logger,
    pytree,
)
from ...compat.transformers import batched_experts
from ..repeated_blocks import find_repeated, without_repeats

aten = torch.ops.aten
FEATURES = re.compile(r"get_(image|video|audio)_features")
"""The methods that compute what the placeholder tokens of a modality stand for."""

MISMATCH = re.compile(r"tokens:? \(?\d+\)?,? (?:and )?features:? \(?(\d+)")
"""How models say that they have another number of placeholder tokens than of features."""

Counts = dict[str, int]
"""Features by modality; ``scattered``: those that were put in the place of tokens, whatever they are."""


class _Shapes(TorchDispatchMode):
    """Runs operators: on fake tensors if one of the arguments is one, else for real."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default):
            return 0.0 if func is aten._local_scalar_dense.default else False
        if func in (aten.masked_scatter.default, aten.masked_scatter_.default):
            self._scattered(*args)
        args, kwargs = pytree.tree_map(lambda x: x, (args, kwargs))
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (args[0], _positions(args[1]), *args[2:])
        result = func(*args, **kwargs)
        return pytree.tree_map(self._value, result)

    def _scattered(self, target: Any, mask: Any, source: Any) -> None:
        """Features are put where the placeholder tokens are: count them, and compare."""
        if isinstance(mask, FakeTensor) or target.dim() < 2 or source.dim() < 1 or source.shape[-1] != target.shape[-1]:
            return
        features = source.numel() // max(source.shape[-1], 1)
        self.counts["scattered"] = self.counts.get("scattered", 0) + features
        places = int(torch.broadcast_to(mask, target.shape).sum()) // max(target.shape[-1], 1)
        if places > features:
            raise FeatureMismatch(f"{places} placeholder tokens for {features} features")

    def _value(self, x: Any) -> Any:
        if isinstance(x, FakeTensor) and not x.is_floating_point() and not x.is_complex():
            return torch.zeros(x.shape, dtype=x.dtype)
        return x


class FeatureMismatch(ValueError):
    """The model has another number of placeholder tokens than of features to put there."""


def _positions(indices: Any) -> list[Any]:
    """Boolean masks as the positions of what they select."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def run_for_shapes(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Counts]:
    """What the model returns, and the features that it computed for placeholder tokens. Raises what the model raises.

    ``FeatureMismatch.counts`` and any other exception carry the features seen so far as ``counts``.
    """
    repeated = find_repeated(model)
    if repeated:
        try:
            with without_repeats(model, repeated):
                return _run(model, inputs)
        except FeatureMismatch:
            raise
        except Exception as error:  # with blocks missing, or for another reason, which running all of it shows
            if getattr(error, "counts", None):
                raise
    return _run(model, inputs)


def _run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Counts]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counts: Counts = {}

    def fake(x: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")

    def real(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_floating_point():
            return fake(x)
        return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x.cpu()

    state: dict[str, Any] = {name: fake(p) for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer.device.type != "cpu":
            state[name] = real(buffer)
    arguments = pytree.tree_map(real, inputs)
    with (
        _attributes_restored(model),
        torch.no_grad(),
        batched_experts(model),
        _counting(model, counts),
        _quiet(),
        _Shapes(counts),
    ):
        try:
            result = functional_call(_Forward(model), {f"model.{k}": v for k, v in state.items()}, kwargs=arguments)
        except Exception as error:
            said = MISMATCH.search(str(error))
            if said and not counts:
                counts["scattered"] = int(said[1])
            error.counts = counts  # type: ignore[attr-defined]
            raise
    return result, counts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of what fails on fake tensors: that a form of inputs does not fit is no news."""
    logger = fake_tensor_logger()
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a call leaves in the modules: a table of positions, say, which would be fake, and on one rank alone."""
    before = []
    for module in model.modules():
        buffers = dict(module._buffers)
        inside = {name: value.copy() for name, value in vars(module).items() if type(value) in (dict, list)}
        before.append((module, dict(vars(module)), buffers, inside))
    try:
        yield
    finally:
        for module, attributes, buffers, inside in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, value in inside.items():
                if name not in ("_parameters", "_modules"):
                    _refill(attributes[name], value)
            _refill(module._buffers, buffers)


def _refill(container: Any, before: Any) -> None:
    """Put the former content back into a list or a dict."""
    if isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


class _Forward(nn.Module):
    """The model's own call, whatever was compiled for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        """Run the model."""
        return call_forward_and_hooks(self.model, **kwargs)


@contextmanager
def _counting(model: nn.Module, counts: Counts) -> Iterator[None]:
    """Note how many features the model computes for the placeholder tokens of each modality."""
    changed: list[tuple[nn.Module, str]] = []
    depth = [0]

    def counted(method: Callable[..., Any], modality: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = method(*args, **kwargs)
            finally:
                depth[0] -= 1
            if not depth[0]:
                counts[modality] = counts.get(modality, 0) + _rows(result)
            return result

        return run

    try:
        for module in model.modules():
            for name in dir(type(module)):
                found = FEATURES.fullmatch(name)
                if found and name not in module.__dict__:
                    module.__dict__[name] = counted(getattr(module, name), found[1])
                    changed.append((module, name))
        yield
    finally:
        for module, name in changed:
            del module.__dict__[name]


def _rows(features: Any) -> int:
    """How many tokens these features stand for: all dimensions but the last."""
    if isinstance(features, torch.Tensor):
        return features.numel() // max(features.shape[-1], 1) if features.dim() > 1 else 1
    for name in ("pooler_output", "last_hidden_state"):
        inner = getattr(features, name, None)
        if inner is not None:
            return _rows(inner)
    if isinstance(features, dict):
        return _rows(next(iter(features.values()))) if features else 0
    if isinstance(features, (list, tuple)):
        each = [x for x in features if isinstance(x, torch.Tensor)]
        inner = features[0] if features and not isinstance(features[0], torch.Tensor) else each
        return sum(map(_rows, each)) if inner is each else _rows(inner)
    return 0
