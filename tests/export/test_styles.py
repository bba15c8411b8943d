"""The shards of the styles."""

from __future__ import annotations

import pytest
import torch

from paraxis.export.styles import parameter_style, parse_parameter_style, shard_of


def test_shards_of_packed_segments() -> None:
    tensor = torch.arange(8)
    assert shard_of(tensor, 0, 1, 1, 2).tolist() == [4, 5, 6, 7]
    assert shard_of(tensor, 0, 2, 1, 2).tolist() == [2, 3, 6, 7]
    with pytest.raises(ValueError, match=r"\(8,\) cannot be sharded evenly on dimension 0 over 3 ranks"):
        shard_of(tensor, 0, 1, 0, 3)


def test_styles_of_parameters() -> None:
    assert parse_parameter_style(parameter_style(-2, 2)) == (-2, 2)
    assert parse_parameter_style("column") is None
