"""Loading: only a rank's slices are read, and quantizing while loading gives what quantizing all would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.quantized_formats import CASES
from weights.quantized.checkpoint import counted_reads, damaged, load

from paraxis.distributed.redistribute import slice_box
from paraxis.placement import Layout, Shard
from paraxis.tensor.quantized import QuantizedTensor
from paraxis.weights.quantized.load import _quantize
from paraxis.weights.quantized.parameters import quantized_weight
from paraxis.weights.quantized.pieces import of_one
from paraxis.weights.quantized.stored import Stored
from ranks import RankPool


def bytes_read(folder: str) -> tuple[int, int]:
    """(bytes read of quantized weights, bytes of this rank's shards of them)."""
    with counted_reads() as read:
        model = load(folder)
    held = [p.local for p in model.parameters() if isinstance(p.local, QuantizedTensor)]
    plain = sum(sum(t.nbytes for n, t in q.parts.present() if n not in ("rows", "columns")) for q in held)
    return sum(read), plain


@pytest.mark.parametrize(("kind", "world"), [("dense", 3), ("moe", 2)])
def test_only_slices_are_read(kind: str, world: int, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    folder = damaged(tmp_path, kind=kind)
    for read, held in ranks(world).run(bytes_read, folder):
        assert held <= read <= 1.05 * held


def initialized(folder: str) -> dict[str, torch.Tensor]:
    """The full values of the quantized parameters of a model without a checkpoint."""
    model = load(folder, skip_load_weights=True, init_seed=3)
    found = {n: p.full_tensor().detach() for n, p in model.named_parameters() if p.spec.quantized is not None}
    assert dist.get_world_size() == 1 or any(p.spec.is_parallel for p in model.parameters())
    return {name: tensor + 0 for name, tensor in found.items()}


def test_without_a_checkpoint_weights_are_the_same_on_any_number_of_ranks(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    folder = damaged(tmp_path, kind="moe")
    (one,) = ranks(1).run(initialized, folder)
    assert len(one) == 6 and all(t.abs().max() > 0 for t in one.values())
    for several in ranks(2).run(initialized, folder):
        assert all(torch.equal(several[name], tensor) for name, tensor in one.items())


def can_be_sliced(case: str) -> bool:
    """Whether blocks are quantized each for itself: not in the order of activations, nor with quantized scales."""
    return "ordered" not in case and "nested" not in case and CASES[case].format.linears


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", [name for name in CASES if can_be_sliced(name)])
def test_slices_are_quantized_as_the_full_weight(case: str, world: int, dim: int) -> None:
    format = CASES[case].format
    torch.manual_seed(0)
    weight = torch.randn(72, 96)
    tensors = format.quantize(weight)
    headers = {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}
    spec = quantized_weight(of_one(Stored("w.weight", format, {}, (72, 96), headers)), (72, 96))
    expected = CASES[case].dequantize(tensors, (72, 96)).float()
    placement = Shard.of(dim, Layout.even((72, 96)[dim], world, 2))

    def dense(name: str, stored: Stored, index: Any) -> torch.Tensor:
        found = weight
        for d, ranges in enumerate(index):
            found = torch.cat([found.narrow(d, a, b - a) for a, b in ranges], d)
        return found

    for rank in range(world):
        parts = _quantize("w", spec, placement, rank, dense)
        shard = spec.assemble(parts, placement, rank, torch.float32)
        assert torch.allclose(shard.dequantized(), slice_box(expected, placement, rank), rtol=1e-5, atol=0)
