"""``torch.nn.utils.parametrize`` and what is built on it, on a parallel model: as on the unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import batch, max_difference, parallel, reference
from torch import nn
from torch.nn.utils import parametrize


class Halved(nn.Module):
    """Half of the weight. Its inverse sets a weight to twice as much."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Masked(nn.Module):
    """The weight below its diagonal. It has no inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tril()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=batch(256)[0]).logits  # type: ignore[no-any-return]


def step(model: Any) -> None:
    ids, labels = batch(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def parametrized(folder: str, compile: str | None, called: bool) -> list[tuple[float, float]]:
    """(error of the parallel model, change of the logits) after each thing that is done to both models."""
    models = parallel(folder, compile=compile)[0], reference(folder)
    before = logits(models[1])
    if called:
        logits(models[0])
    found = []

    def compare() -> None:
        nonlocal before
        expected = logits(models[1])
        found.append((max_difference(logits(models[0]), expected), max_difference(expected, before)))
        before = expected

    for model in models:
        parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", Masked())
    compare()
    for model in models:
        parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Halved())
        step(model)
    compare()
    for model in models:
        parametrize.remove_parametrizations(model.model.layers[0].mlp.down_proj, "weight")
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight = torch.linspace(-1, 1, 128 * 64).view(128, 64)
    compare()
    for model in models:
        parametrize.remove_parametrizations(model.model.layers[0].mlp.up_proj, "weight")
        step(model)
    compare()
    return found


@pytest.mark.parametrize(
    ("compile", "called"),
    [(None, False), (None, True), pytest.param("inductor", True, marks=pytest.mark.long)],
)
def test_parametrizations_of_a_parallel_model(ranks: Any, checkpoints: Any, compile: str | None, called: bool) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for found in ranks(2).run(parametrized, folder, compile, called, timeout=600):
        assert max(error for error, _ in found) < 1e-4
        assert min(change for _, change in found) > 1e-3
