"""Masks that transformers leaves out when it runs eagerly and makes when it is traced, and what that changes.

Without padding, ``create_causal_mask`` returns no mask, and attention is causal if its module says so (``is_causal``).
Traced, it does not look whether there is padding and returns a causal mask. The two differ where modules with a causal
mask say that they are not causal, such as decoders whose prefix is read in both directions: eagerly, all tokens attend
to all others. A captured program does what the eager model does. Seen on transformers 5.17 and 5.22.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

CREATE = ("create_causal_mask", "create_sliding_window_causal_mask")
MASKS = "transformers.masking_utils"

_full: dict[int, weakref.ref[Any]] = {}
"""The configurations whose attention is full where there is no mask, by the identity of the object."""

_seen: set[str] = set()


def note_full_attention(model: nn.Module) -> None:
    """Note the configurations in this model whose attention modules say that they are not causal."""
    causal: dict[int, bool] = {}
    configs: dict[int, Any] = {}
    modules = [m for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool) and hasattr(m, "config")]
    kinds = {type(m) for m in modules}
    for module in modules:
        key = id(module.config)
        configs[key] = module.config
        causal[key] = causal.get(key, False) or bool(module.is_causal) or _is_told(type(module), kinds)
    for key, config in configs.items():
        if not causal[key]:
            _full[key] = weakref.ref(config, lambda _, key=key: _full.pop(key, None))  # type: ignore[misc]


def _is_told(kind: type, attention: set[type]) -> bool:
    """Whether another class of the same file says in a call whether attention is causal."""
    others = [c for c in vars(sys.modules[kind.__module__]).values() if isinstance(c, type) and c not in attention]
    forwards = [inspect.unwrap(f) for c in others if callable(f := vars(c).get("forward"))]
    return any(_passes(code) for f in forwards if (code := getattr(f, "__code__", None)) is not None)


def _passes(code: CodeType) -> bool:
    """Whether ``is_causal`` is a keyword of a call."""
    return any(
        "is_causal" in x if isinstance(x, tuple) else isinstance(x, CodeType) and _passes(x) for x in code.co_consts
    )


def follow_eager_masks(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, let the loaded models have the masks that they have eagerly."""
    masks = sys.modules.get(MASKS)
    for name, module in list(sys.modules.items()):
        if masks is None or name in _seen or not name.startswith("transformers.") or name == MASKS:
            continue
        _seen.add(name)
        for function in CREATE:
            found = vars(module).get(function)
            if callable(found) and found is vars(masks).get(function):
                setattr(module, function, _follow(vars(module)[function], applies, windowed=function != CREATE[0]))


def _follow(create: Callable[..., Any], applies: Callable[[], bool], windowed: bool) -> Callable[..., Any]:
    """A function that creates masks, with the masks that it creates eagerly."""

    @wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        mask = create(*args, **kwargs)
        if args or not applies() or not isinstance(mask, torch.Tensor) or id(kwargs.get("config")) not in _full:
            return mask
        window = kwargs["config"].sliding_window if windowed else None
        return _without_padding(mask, window, **kwargs)

    return created


def _without_padding(mask: Tensor, window: int | None, **kwargs: Any) -> Tensor | None:
    """The mask of these arguments: none, or full, where there is neither padding nor anything else to mask."""
    extra = ("or_mask_function", "and_mask_function", "block_sequence_ids")
    if not kwargs.get("allow_is_causal_skip", True) or any(kwargs.get(name) is not None for name in extra):
        return mask
    padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    queries, keys = mask.shape[-2], mask.shape[-1]
    if mask.dtype != torch.bool or queries != keys or (window is not None and keys >= window):
        return mask
    if padding is not None:
        return mask | padding[:, :keys].bool().all() if padding.dim() == 2 else mask
    if positions is not None and kwargs.get("past_key_values") is None:  # several sequences in a row are told by these
        return mask | (positions[..., 1:] - positions[..., :-1] == 1).all()
    return None
