"""What the tests of CPU matmul kernels share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda w: w,
    "column-major": lambda w: w.t().contiguous().t(),
    "slice of a row-major one": lambda w: F.pad(w, (3, 2))[:, 3:-2],
    "slice of a column-major one": lambda w: F.pad(w, (0, 0, 1, 5)).t().contiguous()[:, 1:-5].t(),
}
"""Memory layouts of a weight."""


def record_weights(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple[int, ...]]:
    """The shapes of the weights that a kernel function of the module computes with, call by call."""
    shapes: list[tuple[int, ...]] = []
    original = getattr(module, name)

    def recorder(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        result: torch.Tensor | None = original(x, weight, bias)
        if result is not None:
            shapes.append(tuple(weight.shape))
        return result

    monkeypatch.setattr(module, name, recorder)
    return shapes
