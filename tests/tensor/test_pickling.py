"""Modules with hooks refuse to be pickled before their hooks are written."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from paraxis.placement import REPLICATE
from paraxis.tensor.pickling import RefusesPickling, refuse_pickling
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec


def hooked(sharded: bool) -> nn.Module:
    """A block with a hook that cannot be pickled, in a model."""
    block = nn.Sequential(nn.Linear(2, 2))
    if sharded:
        weight: Any = ShardedTensor(torch.ones(2, 2), ShardSpec(REPLICATE, None), (2, 2))
        block[0]._parameters["weight"] = weight
    block.register_forward_hook(lambda module, args, output: None)
    return nn.Sequential(block)


def test_the_answer_comes_before_the_hooks() -> None:
    model = hooked(sharded=True)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(model[0])
    order = list(vars(model[0]))
    for _ in range(2):  # once is enough
        refuse_pickling(model)
    assert [name for name in vars(model[0]) if name in order] == order
    for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match=r"the module '0'.*save_pretrained.*save_state"):
            write(model[0])


def test_copies_are_made_as_before() -> None:
    model = hooked(sharded=True)
    refuse_pickling(model)
    for copied in (copy.copy(model[0]), copy.deepcopy(model[0])):
        assert copied is not model[0] and isinstance(vars(copied)["_refuses_pickling"], RefusesPickling)


def test_other_modules_are_left_alone() -> None:
    model = hooked(sharded=False)
    refuse_pickling(model)
    assert "_refuses_pickling" not in vars(model[0])
