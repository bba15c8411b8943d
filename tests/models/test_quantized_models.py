"""Quantized checkpoints on ranks: logits and tokens of the model with dequantized weights, and the same file again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.quantized import ARCHITECTURES, write
from models.quantized_formats import CASES
from safetensors.torch import load_file

import paraxis
from ranks import RankPool

IDS = torch.arange(14).view(2, 7) + 3


def run(
    folder: str, saved: str, generates: bool, compile: str | None = None, **options: Any
) -> tuple[Any, Any, int, int]:
    """(logits, tokens, bytes of the shards, bytes that the plan says) of a rank; saves the checkpoint again."""
    ctx = paraxis.ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    model = paraxis.parallelize_model(folder, ctx, show_progress=False, compile=compile, **options)
    with torch.no_grad():
        logits = model(IDS).logits
    tokens = model.generate(IDS, max_new_tokens=5, do_sample=False) if generates else None
    if saved:
        model.save_pretrained(saved)
    planned = 0
    for parameter in model.parameters():
        weight = parameter.spec.quantized
        planned += parameter.local.nbytes if weight is None else weight.nbytes(parameter.placement, ctx.rank)
    return logits, tokens, sum(p.local.nbytes for p in model.parameters()), planned


def check(pool: RankPool, case: str, kind: str, folder: Path, compile: str | None = None, plain: bool = False) -> None:
    """Write a checkpoint, run it on ranks, and compare. ``plain``: the ranks quantize it while they load it."""
    each = CASES[case]
    reference = write(kind, folder, each.format, each.config, each.dequantize, inputs=each.inputs, **each.overrides)
    generates = kind != "encoder"
    with torch.no_grad():
        logits = reference(IDS).logits
    tokens = reference.generate(IDS, max_new_tokens=5, do_sample=False) if generates else None
    options = {"quantization_config": each.config} if plain else {}
    source = str(folder / "original" if plain else folder)
    for found, chosen, held, planned in pool.run(
        run, source, str(folder / "saved"), generates, compile, **options, timeout=600
    ):
        assert float((found - logits).abs().max()) < each.tolerance
        assert tokens is None or torch.equal(chosen, tokens)
        assert held == planned
    before, after = (load_file(path / "model.safetensors") for path in (folder, folder / "saved"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        other = after[key]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, key
        assert tensor.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8)), key


QUICK = [
    ("fp8-blocks", "dense", 2),
    ("fp8-blocks", "packed", 3),
    ("fp8-tensor", "encoder", 2),
    ("ct-int4-ordered", "moe", 2),
    ("ct-nvfp4", "moe", 4),
    ("mxfp4", "experts", 3),
    ("gptq-ordered", "mla", 2),
    ("bnb-nf4-nested", "gqa", 3),
]


@pytest.mark.parametrize(("case", "kind", "world"), QUICK)
def test_quantized_checkpoints(
    case: str, kind: str, world: int, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    check(ranks(world), case, kind, tmp_path)


def test_compiled_by_inductor(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    check(ranks(2), "fp8-blocks", "dense", tmp_path, "inductor")


FROM_PLAIN = [("fp8-blocks", "moe", 3), ("ct-int4-asymmetric", "packed", 2), ("bnb-nf4", "gqa", 2)]


@pytest.mark.parametrize(("case", "kind", "world"), FROM_PLAIN)
def test_plain_checkpoints_are_quantized_by_slices_as_the_full_model_would_be(
    case: str, kind: str, world: int, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    check(ranks(world), case, kind, tmp_path, plain=True)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES)
def test_every_format_on_every_architecture(
    case: str, kind: str, world: int, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    if CASES[case].kinds and kind not in CASES[case].kinds:
        pytest.skip("not a format of this architecture")
    check(ranks(world), case, kind, tmp_path)
