"""The inputs that a model is planned with when none are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paraxis.capture.dummy_inputs import example_call


class Model(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)


@pytest.mark.parametrize(("longest", "length"), [(None, 8), (-1, 8), (0, 8), (5, 5), (1000, 8)])
def test_no_longer_than_the_positions(longest: int | None, length: int) -> None:
    """Some configurations say -1 where any length will do."""
    _, inputs = example_call(Model(max_position_embeddings=longest), None, torch.device("cpu"))
    assert inputs["input_ids"].shape == (2, length)


def test_a_row_per_codebook() -> None:
    _, inputs = example_call(Model(num_codebooks=4), None, torch.device("cpu"))
    assert inputs["input_ids"].shape == (8, 8)


def test_what_is_not_from_transformers_needs_examples() -> None:
    with pytest.raises(ValueError, match="pass example_inputs="):
        example_call(nn.Linear(2, 2), None, torch.device("cpu"))
