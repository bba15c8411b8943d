"""Running a model for its shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture.dummy.tiny_multimodal import IMAGE_TOKEN, llava, on_meta
from torch import nn

from paraxis.capture.dummy.shapes import FeatureMismatch, run_for_shapes


def inputs_with(tokens: int) -> dict[str, Any]:
    ids = torch.ones(2, tokens + 4, dtype=torch.int64)
    ids[:, 2 : 2 + tokens] = IMAGE_TOKEN
    return {"input_ids": ids, "pixel_values": torch.zeros(2, 3, 32, 32)}


def test_features_are_counted_without_weights() -> None:
    output, counts = run_for_shapes(on_meta(llava), inputs_with(16))
    assert output.logits.shape == (2, 20, 128) and counts["image"] == 32


def test_an_error_says_the_features_so_far() -> None:
    with pytest.raises(ValueError, match="do not match") as raised:
        run_for_shapes(on_meta(llava), inputs_with(3))
    assert raised.value.counts == {"image": 32}  # type: ignore[attr-defined]


class Values(nn.Module):
    """What a model does depends on integers: they have their values, floating-point tensors have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.linear(x).split(lengths.tolist())
        chosen = parts[1][mask]
        return torch.cat((chosen, x[chosen.argmax(-1)] if chosen.isnan().any() else chosen))


def test_integers_have_values() -> None:
    mask = torch.tensor([True, False, True])
    output, _ = run_for_shapes(Values(), {"x": torch.ones(5, 4), "lengths": torch.tensor([2, 3]), "mask": mask})
    assert output.shape == (4, 4)


class Scatter(nn.Module):
    """Puts features in the place of tokens without a check."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(mask[:, None], features)


def test_more_tokens_than_features_are_an_error() -> None:
    """On fake tensors nothing else would find it."""
    inputs = {"x": torch.ones(5, 4), "mask": torch.arange(5) < 3, "features": torch.ones(2, 4)}
    with pytest.raises(FeatureMismatch, match="3 placeholder tokens for 2 features"):
        run_for_shapes(Scatter(), inputs)
    inputs["features"] = torch.ones(3, 4)
    assert run_for_shapes(Scatter(), inputs)[1] == {"scattered": 3}


class Remembers(nn.Module):
    """Makes a table when it is called first, and notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.table: torch.Tensor | None = None
        self.calls: list[torch.Size] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4) * x.new_ones(4)
        self.calls.append(x.shape)
        self.steps = self.steps + x.sum()
        return self.linear(x) + self.table


def test_nothing_is_left_in_the_model() -> None:
    """A fake table on the rank that plans for all would make the ranks' programs differ."""
    model = Remembers()
    steps = model.steps
    run_for_shapes(model, {"x": torch.ones(5, 4)})
    assert model.table is None and model.calls == [] and model.steps is steps
    assert model(torch.ones(5, 4)).shape == (5, 4)
