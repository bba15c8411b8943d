"""What tests of products on a CPU share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w,
    "columns": lambda w: w.t().contiguous().t(),
    "some of longer rows": lambda w: F.pad(w, (3, 2))[:, 3:-2],
    "some of longer columns": lambda w: F.pad(w, (0, 0, 1, 5)).t().contiguous()[:, 1:-5].t(),
}
"""Ways in which a weight may lie in memory."""


def weights_seen(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple[int, ...]]:
    """The shapes of the weights that a function of the module does not decline, as they come."""
    seen: list[tuple[int, ...]] = []
    multiplied = getattr(module, name)

    def watch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        result: torch.Tensor | None = multiplied(x, weight, bias)
        if result is not None:
            seen.append(tuple(weight.shape))
        return result

    monkeypatch.setattr(module, name, watch)
    return seen
