"""Checksums: equal for equal values, different for different ones, on the host and on a device."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from paraxis.distributed import checksum
from paraxis.distributed.checksum import CHUNK, device_checksum, sums_of

NAN = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
OTHER_NAN = torch.tensor([-4194304, 0x3F800000], dtype=torch.int32).view(torch.float32)


@pytest.fixture(params=["host", "device"])
def place(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sums of a device are computed by the same operators on the host."""
    if request.param == "device":
        monkeypatch.setattr(checksum, "is_on_host", lambda tensor: False)
    return str(request.param)


def total(*args: Any, **kwargs: Any) -> int:
    sums = sums_of(("x", "y"), args, kwargs)
    sums.settle()
    return sums.total


EQUAL = {
    "nan": (NAN, OTHER_NAN),
    "nan in bfloat16": (NAN.bfloat16(), OTHER_NAN.bfloat16()),
    "zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "strides": (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
    "gradient": (torch.ones(3), torch.ones(3, requires_grad=True)),
    "complex": (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64).conj()),
    "large": (torch.arange(2 * CHUNK), torch.arange(2 * CHUNK)),
    "empty": (torch.ones(0, 3), torch.ones(0, 3)),
    "mapping": ({"a": 1, "b": [torch.ones(2)]}, UserDict({"a": 1, "b": [torch.ones(2)]})),
    "float nan": (float("nan"), float("nan")),
    "no plain data": (object(), object()),
}
DIFFERENT = {
    "one element": (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
    "order": (torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1])),
    "mask": (torch.tensor([True, False]), torch.tensor([False, True])),
    "shape": (torch.ones(2, 3), torch.ones(3, 2)),
    "dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
    "float": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
    "bfloat16": (torch.ones(2).bfloat16(), torch.tensor([1, 2]).bfloat16()),
    "large": (torch.zeros(CHUNK + 5), torch.zeros(CHUNK + 5).index_fill_(0, torch.tensor([CHUNK + 2]), 1)),
    "nested": ({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 2]}),
    "in a list": ([torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]),
    "text": ("eager", "sdpa"),
    "bool": (True, False),
    "int and bool": (1, True),
    "numpy": (np.arange(3), np.arange(3) + 1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_equal_sums(place: str, name: str) -> None:
    one, other = EQUAL[name]
    assert total(one) == total(other)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_have_different_sums(place: str, name: str) -> None:
    one, other = DIFFERENT[name]
    assert total(one) != total(other)


def test_how_an_argument_is_passed_does_not_matter() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert total(a, b) == total(x=a, y=b) == total(y=b, x=a) == total(a, y=b, z=None)
    assert total(a, b) != total(b, a)


def test_a_large_tensor_that_was_written_to_is_summed_again(place: str) -> None:
    states = torch.zeros(100, 100)
    before = total(states)
    assert total(states) == before
    states[3, 4] = 1
    assert total(states) != before
    with torch.inference_mode():
        states = torch.zeros(100, 100)
        before = total(states)
        states[3, 4] = 1
        assert total(states) != before


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "is_on_host", lambda tensor: False)
    sums = sums_of(("x",), (torch.ones(2),), {})
    assert sums.late, "the number is not read yet"
    sums.settle()
    assert not sums.late and set(sums.sums) == {"x"}


def test_the_sum_of_one_element_tells_all_values_apart() -> None:
    assert len({int(device_checksum(torch.tensor([n]))) for n in range(-500, 500)}) == 1000
