"""Encodings as text, and the parts of a weight."""

from __future__ import annotations

import torch

from paraxis.kernels.quantized import Encoding, Parts
from paraxis.kernels.quantized.encoding import FP4, encoding_of


def test_an_encoding_is_its_text() -> None:
    for encoding in (Encoding(), Encoding((128, 64), FP4, "bfloat16", True, "token")):
        assert encoding_of(encoding.key) == encoding and hash(encoding_of(encoding.key)) == hash(encoding)
    assert Encoding(table=FP4).packed and not Encoding().packed
    assert Encoding(rounding="float16").rounding_dtype is torch.float16 and Encoding().rounding_dtype is None


def test_parts_by_name() -> None:
    parts = Parts(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2), columns=torch.zeros(8, dtype=torch.int32))
    assert [name for name, _ in parts.present()] == ["codes", "scales", "columns"]
    assert parts.nbytes == 32 + 32 + 32
    doubled = parts.map(lambda t: t + t)
    assert doubled.zeros is None and torch.equal(doubled.scales, torch.full((4, 2), 2.0))
