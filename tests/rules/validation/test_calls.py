"""Sample calls from schemas and from torch's operator database."""

from __future__ import annotations

import sys

import pytest
import torch
from rules.operators import gate, head_softmax

from paraxis.rules.registry import registered
from paraxis.rules.validation.calls import (
    MAX_CALLS,
    from_schema,
    pointwise_overloads,
    random_tensor,
    recorded_calls,
    schema_samples,
    working_call,
)

aten = torch.ops.aten


def test_arguments_from_a_schema() -> None:
    args, kwargs = from_schema(aten.addcmul.default, [(4, 6), (6,)], torch.float64)
    assert [tuple(x.shape) for x in args] == [(4, 6), (6,), (6,)] and kwargs == {}
    with pytest.raises(NotImplementedError):
        from_schema(aten.cat.default, [(4, 6)], torch.float64)


def test_a_working_call_uses_a_dtype_that_runs() -> None:
    found = working_call(aten.bitwise_not.default, [(4, 6)])
    assert found is not None and found[0][0].dtype == torch.int64
    assert working_call(aten.cat.default, [(4, 6)]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex128])
def test_random_tensors_vary(dtype: torch.dtype) -> None:
    x = random_tensor((6, 8), dtype)
    assert x.dtype == dtype and len(set(x.flatten().tolist())) > 1


def test_samples_from_a_schema_run_and_vary_in_shape() -> None:
    calls = schema_samples(head_softmax)
    assert 2 <= len(calls) <= MAX_CALLS and all(c.target is head_softmax for c in calls)
    assert {c.args[0].ndim for c in calls} >= {2, 3} and len({c.args[1] for c in calls}) > 1
    assert all(c.args[0].shape == c.args[1].shape for c in schema_samples(gate))
    assert schema_samples(aten.cat.default) == []


def test_pointwise_overloads_are_those_that_torch_tags() -> None:
    found = set(pointwise_overloads(registered()))
    assert aten.relu.default in found and aten.mm.default not in found and aten.contiguous.default not in found


@pytest.mark.filterwarnings("ignore")
def test_recorded_calls_have_tensors_of_two_dimensions() -> None:
    before = "expecttest" in sys.modules
    found = recorded_calls([aten.mm.default, aten.bernoulli.p], limit=1)
    assert list(found) == [aten.mm.default] and len(found[aten.mm.default]) == 1, "random operators are left out"
    assert ("expecttest" in sys.modules) == before
