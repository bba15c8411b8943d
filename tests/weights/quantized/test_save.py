"""Saving: what is stored comes back bit by bit (full models: tests/models/test_quantized_models.py)."""

from __future__ import annotations

import pytest
import torch
from models.quantized_formats import CASES
from weights.quantized.test_pieces import composed

from paraxis.errors import CheckpointError
from paraxis.placement import REPLICATE
from paraxis.tensor.parameter_meta import ParameterMeta
from paraxis.tensor.sharded_tensor import ShardedTensor
from paraxis.weights.quantized.parameters import quantized_weight
from paraxis.weights.quantized.save import _joined, is_quantized, stored_tensors


@pytest.mark.parametrize("case", CASES)
def test_parts_are_stored_as_they_were_read(case: str) -> None:
    format = CASES[case].format
    torch.manual_seed(0)
    tensors = format.quantize(torch.randn(64, 96))

    def read(suffix: str, index: tuple[tuple[tuple[int, int], ...], ...] | None) -> torch.Tensor:
        found = tensors[suffix]
        for dim, ((start, stop),) in enumerate(index or ()):
            found = found.narrow(dim, start, stop - start)
        return found

    headers = {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}
    format = format.refined(headers, read)
    parts = {}
    for name, form in format.forms(headers, (64, 96)).items():
        rows = 64 if form.rows.follows == "rows" else form.rows.size
        columns = 96 if form.columns.follows == "columns" else form.columns.size
        dims = (-(-rows // form.rows.block), -(-columns // form.columns.block))
        index = tuple(((0, n),) for n in dims)
        parts[name] = format.load(name, index[1:] if name == "columns" else index, read, (64, 96))
    constants = {suffix: tensors[suffix] for suffix in format.constants() if suffix in tensors}
    stored = format.store(parts, (64, 96), constants)
    for suffix, tensor in stored.items():
        before = tensors[suffix]
        assert tensor.dtype == before.dtype and tensor.numel() == before.numel()
        assert tensor.contiguous().flatten().view(torch.uint8).equal(before.contiguous().flatten().view(torch.uint8))
    assert stored.keys() | set(format.constants()) >= tensors.keys()


def test_pieces_that_share_a_block() -> None:
    blocks = torch.arange(4).unsqueeze(1)
    assert _joined([(24, blocks[1:]), (0, blocks[:2])], 16).flatten().tolist() == [0, 1, 2, 3]


def test_a_part_of_a_stored_weight_is_refused() -> None:
    composition = composed(lambda a: a[5:11], (6, 8), 1)
    composition.first.headers.update({".weight": torch.empty(20, 8), ".weight_scale_inv": torch.empty(2, 1)})
    weight = quantized_weight(composition, (6, 8))
    meta = ParameterMeta("w", (6, 8), placement=REPLICATE, quantized=weight)
    tensor = ShardedTensor(torch.empty(6, 8), meta, (6, 8))
    assert is_quantized(tensor) and not is_quantized(torch.empty(1))
    with pytest.raises(CheckpointError, match="w: the checkpoint stores it together with other parameters"):
        stored_tensors("w", tensor)
