"""The listing of a local program: valid Python, collectives with their reasons, repeated blocks named once."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import torch
from solver.programs import Transformer
from torch import nn

from paraxis.capture.repeated_blocks import Repeated
from paraxis.plan.listing import _Listing, list_program
from paraxis.plan.offline import plan_offline

IDS = (torch.zeros(2, 8, dtype=torch.long),)


def test_a_program_is_python_with_placements() -> None:
    with plan_offline(Transformer(layers=6), 4, None, {"example_inputs": IDS}, rank=1) as planned:
        text = list_program(planned)
    torch._dynamo.reset()
    ast.parse(text)
    assert text.startswith("# The local program of rank 1 of 4.")
    assert "\n    # layers.0.mlp\n" in text and "RowParallelLinear['layers.0.mlp.down']" in text
    assert "float32[2, 8, 32] Partial; weight [32, 16] of [32, 64]" in text
    assert "Shard(2); weight [16, 32] of [64, 32]" in text
    assert "Replicate; <== COLLECTIVE: partial output of a row-parallel layer" in text
    assert "# layers.2 to layers.5 repeat layers." in text


def test_repeated_blocks_are_named_in_ranges() -> None:
    listing = object.__new__(_Listing)
    repeated = Repeated("model.layers", nn.ModuleList(), 2, {2: 1, 3: 1, 4: 0, 6: 1})
    listing.planned = SimpleNamespace(repeated=[repeated])  # type: ignore[assignment]
    assert listing._others() == [
        "# model.layers.2 to model.layers.3 repeat model.layers.1.",
        "# model.layers.4 repeats model.layers.0.",
        "# model.layers.6 repeats model.layers.1.",
    ]
